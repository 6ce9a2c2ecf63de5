"""The trainer's end of a rollout server: it outlives the server, and loses no prompt.

When a server dies, it sends the gates again and asks for the missing rows, which get the same tokens as before.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import HEARTBEAT_SECONDS, EngineFacts, Rows, Sample, gate_version

SILENCE = 15 * HEARTBEAT_SECONDS  # seconds without a byte after which a server counts as dead
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0


class _Failure(Exception):
    """The server could not be reached, broke off, or failed."""


class RolloutClient:
    """A :class:`~rlkv.rollout.gated.GatedEngine` behind ``url``.

    Attributes:
        retries: requests that failed and were repeated.
        stale: answers under other gates, discarded.
        patience: seconds without an answer after which a failed request raises ValueError instead of being repeated.
    """

    def __init__(
        self, url: str, patience: float = 600.0, report: Callable[[str], None] = lambda text: print(text, flush=True)
    ) -> None:
        """``report`` gets a line when the server stops answering; ValueError unless ``url`` is ``http://host[:port]``."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"the rollout server's address must look like http://host:port, got {url!r}")
        self.url, self.patience, self._report = url, patience, report
        self._host, self._port = parts.hostname, parts.port or 80
        self._alpha_LH: Tensor | None = None
        self.version = "none"
        self.retries = self.stale = 0

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Send the gates; errors as :meth:`sample`."""
        self._alpha_LH = alpha_LH.detach().float().cpu().clone()
        self.version = gate_version(self._alpha_LH)
        self._keep_trying(self._send_gates)
        return self.version

    def sample(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)``, each index once, all of the client's gates.

        ValueError if the server refuses the request, or nothing arrives for longer than the patience.
        """
        missing = dict(enumerate(rows.prompts))
        waiting: _Waiting | None = None  # the patience begins with a failure, not with a long sample
        while missing:
            asked = sorted(missing)
            try:
                for index, sample in self._ask(rows.only(asked), sampling, eos_ids):
                    del missing[asked[index]]
                    waiting = None
                    yield asked[index], sample
                if missing:
                    raise _Failure("the answer ended early")
            except _Failure as failure:
                waiting = waiting or _Waiting(self.patience)
                self._pause(waiting, failure)
                self._keep_trying(self._send_gates)

    def facts(self) -> EngineFacts:
        """What the server says of its engine; waits for it as long as the patience lasts."""
        found = self._keep_trying(lambda: next(self._lines("GET", "/health"), {}))
        try:
            return EngineFacts(**{field.name: found[field.name] for field in fields(EngineFacts)})
        except KeyError as error:
            raise ValueError(f"{self.url} is not a rollout server: its /health has no {error}") from None

    def check(self, sizes: LocalSizes, positions: int) -> None:
        """Raise ``ValueError`` if the server has another sink or window than the training, or too few positions."""
        facts = self.facts()
        if (facts.sink, facts.window) != (sizes.sink, sizes.window):
            raise ValueError(
                f"the rollout server mixes with sink {facts.sink} and window {facts.window}, the training with "
                f"{sizes.sink} and {sizes.window}: start rollout/serve_vllm.py with --sink {sizes.sink} "
                f"--window {sizes.window}"
            )
        if facts.max_positions < positions:
            raise ValueError(
                f"the rollout server takes {facts.max_positions} tokens per row, the training needs {positions}: "
                f"start rollout/serve_vllm.py with --max-positions {positions}"
            )

    def _send_gates(self) -> None:
        if self._alpha_LH is None:
            raise ValueError("set_gates comes before sample: the server has none of its own")
        answer: dict[str, Any] = next(self._lines("POST", "/gates", {"alpha": self._alpha_LH.tolist()}), {})
        found = answer.get("version")
        if found != self.version:
            raise _Failure(f"the server took gates {found} for {self.version}")

    def _ask(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """The samples of one request, until it ends, breaks off or turns out to be stale."""
        request = {"version": self.version, "rows": asdict(rows), "sampling": asdict(sampling), "eos_ids": eos_ids}
        for line in self._lines("POST", "/sample", request):
            if "error" in line:
                raise ValueError(f"the rollout server refused the request: {line['error']}")
            if "failed" in line:
                raise _Failure(line["failed"])
            if "done" in line:
                return
            found = line.get("stale", line.get("version"))
            if found != self.version:
                self.stale += 1
                raise _Failure(f"its gates are {found}, not {self.version}")
            yield line.pop("index"), Sample(**line)

    def _lines(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of JSON of one exchange as they arrive, without the heartbeats, which are empty lines."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENCE)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            if answer.status == 200:
                for line in answer:
                    if line.strip():
                        yield json.loads(line)  # the last line of a server that died is cut off
                return
            error = json.loads(answer.read()).get("error", "no reason given")
        except (OSError, http.client.HTTPException, ValueError) as failure:
            raise _Failure(f"{type(failure).__name__}: {failure}") from failure
        finally:
            connection.close()
        if answer.status >= 500:
            raise _Failure(error)
        raise ValueError(f"the rollout server refused the request: {error}")

    def _keep_trying(self, action: Callable[[], Any]) -> Any:
        waiting = _Waiting(self.patience)
        while True:
            try:
                return action()
            except _Failure as failure:
                self._pause(waiting, failure)

    def _pause(self, waiting: _Waiting, failure: _Failure) -> None:
        self.retries += 1
        if time.monotonic() >= waiting.deadline:
            raise ValueError(
                f"the rollout server at {self.url} did not answer for {self.patience:.0f} s ({failure}): start "
                "rollout/serve_vllm.py, then repeat the training's command, which resumes from its last checkpoint"
            ) from failure
        if waiting.pause == FIRST_PAUSE:
            self._report(f"rollout server at {self.url}: {failure}; trying again")
        time.sleep(max(0.0, min(waiting.pause, waiting.deadline - time.monotonic())))
        waiting.pause = min(2 * waiting.pause, LONGEST_PAUSE)


class _Waiting:
    """A pause that doubles, and a deadline."""

    def __init__(self, patience: float) -> None:
        self.pause, self.deadline = FIRST_PAUSE, time.monotonic() + patience
