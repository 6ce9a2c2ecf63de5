"""The trainer's end of one or more rollout servers: it outlives them, and loses no prompt.

Rows are dealt to the servers.  When one fails, the others take the rows that it still owes, and it is sent the gates
again; a row gets the same tokens wherever it is sampled.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.connection import Connection, Failure
from rlkv.rollout.gated import EngineFacts, Rows, Sample, gate_version

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0
Ask = Callable[[Rows], Iterator[tuple[int, Sample]]]


class RolloutClient:
    """A :class:`~rlkv.rollout.gated.GatedEngine` behind the servers at ``urls``.

    Attributes:
        retries: requests that failed and were repeated.
        patience: seconds in which all servers fail after which ValueError is raised.
    """

    def __init__(self, urls: Sequence[str], patience: float = 600.0) -> None:
        """ValueError for an address that is not ``http://host[:port]``."""
        self.servers = [Connection(url, number) for number, url in enumerate(urls)]
        self.patience = patience
        self._alpha_LH: Tensor | None = None
        self.version = "none"
        self.retries = 0

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; every server is sent them before its next rows."""
        self._alpha_LH = alpha_LH.detach().float().cpu().clone()
        self.version = gate_version(self._alpha_LH)
        return self.version

    def sample(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)``, each index once, all of the client's gates.

        ValueError if a server refuses a request, or all of them fail for longer than the patience.
        """
        fit = [server for server in self.servers if not server.pause] or self.servers
        job = _Job(self, self.servers)
        for server in self.servers:
            share = list(range(len(rows.prompts)))[fit.index(server) :: len(fit)] if server in fit else []
            ask = partial(server.ask, sampling=sampling, eos_ids=eos_ids)
            threading.Thread(target=self._work, args=(job, server, share, rows, ask), daemon=True).start()
        try:
            for _ in rows.prompts:
                found = job.arrived.get()
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            job.end()

    def _work(self, job: _Job, server: Connection, share: list[int], rows: Rows, ask: Ask) -> None:
        """Ask ``server`` for its share, then for rows that others owe, until the job has ended."""
        try:
            while not job.ended:
                owed = dict(enumerate(share))
                try:
                    if self._alpha_LH is None:
                        raise ValueError("set_gates comes before sample: the servers have none of their own")
                    server.send_gates(self._alpha_LH, self.version)
                    for index, sample in ask(rows.only(share)) if share else ():
                        if index not in owed:
                            raise Failure(f"it sent row {index} twice")
                        job.arrived.put((owed.pop(index), sample))
                        job.succeeded(server)
                    if owed:
                        raise Failure("the answer ended early")
                    job.succeeded(server)
                except Failure as failure:
                    job.failed(server, failure, owed.values())
                share = job.take()
        except Exception as error:
            job.arrived.put(error)

    def check(self, sizes: LocalSizes, positions: int) -> None:
        """Raise ``ValueError`` if a server has another sink or window than the training, or too few positions."""
        for server in self.servers:
            facts = self.facts(server)
            if (facts.sink, facts.window) != (sizes.sink, sizes.window):
                raise ValueError(
                    f"the rollout server at {server.url} mixes with sink {facts.sink} and window {facts.window}, the "
                    f"training with {sizes.sink} and {sizes.window}: start rollout/serve_vllm.py with "
                    f"--sink {sizes.sink} --window {sizes.window}"
                )
            if facts.max_positions < positions:
                raise ValueError(
                    f"the rollout server at {server.url} takes {facts.max_positions} tokens per row, the training "
                    f"needs {positions}: start rollout/serve_vllm.py with --max-positions {positions}"
                )

    def facts(self, server: Connection) -> EngineFacts:
        """What ``server`` says of its engine; waits for it as long as the patience lasts."""
        job = _Job(self, [server])
        while True:
            try:
                found = server.facts()
            except Failure as failure:
                job.failed(server, failure)
            else:
                job.succeeded(server)
                return found


class _Job:
    """The rows of one rollout that nobody has been asked for, and what has arrived; used by a thread per server."""

    def __init__(self, client: RolloutClient, servers: list[Connection]) -> None:
        self.client, self.servers = client, servers
        self.arrived: queue.Queue[tuple[int, Sample] | Exception] = queue.Queue()
        self.ended = False
        self._left: list[int] = []
        self._deadline: float | None = None  # while all servers fail
        self._changed = threading.Condition()

    def take(self) -> list[int]:
        """Wait for rows that a server owes and nobody is asked for; none at the end of the job."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self.ended)
            share, self._left = self._left, []
            return share

    def end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def succeeded(self, server: Connection) -> None:
        """A sample arrived, or all that it was asked for: the patience begins again with the next failure."""
        with self._changed:
            server.pause, self._deadline = 0.0, None

    def failed(self, server: Connection, failure: Failure, owed: Iterable[int] = ()) -> None:
        """Leave the rows to the others and pause; ValueError if all servers have failed for too long."""
        client = self.client
        with self._changed:
            if self.ended:
                return
            self._left += owed
            self._changed.notify_all()
            client.retries += 1
            if not server.pause:
                print(f"rollout server at {server.url}: {failure}; trying again", flush=True)
            server.version, server.pause = "none", min(2 * server.pause or FIRST_PAUSE, LONGEST_PAUSE)
            if self._deadline is None and all(other.pause for other in self.servers):
                self._deadline = time.monotonic() + client.patience
            left = LONGEST_PAUSE if self._deadline is None else self._deadline - time.monotonic()
            if left <= 0:
                raise ValueError(
                    f"the rollout server at {server.url} did not answer for {client.patience:.0f} s ({failure}): start "
                    "rollout/serve_vllm.py, then repeat the training's command, which resumes from its last checkpoint"
                ) from failure
            self._changed.wait_for(lambda: self.ended, min(server.pause, left))
