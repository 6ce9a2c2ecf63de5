"""A rollout engine behind HTTP: one GPU trains, others sample, and may be killed and restarted.

``POST /sample`` takes gates and a chunk of rows and answers all of them at once, ``GET /health``
says what the server has and whether it is busy.  Requests and answers are JSON.  The client keeps
the chunks in a queue: one that a server owes goes back there when the server fails.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.rollout.base import (
    EngineFacts,
    GatedEngine,
    Rows,
    Sample,
    SamplingParams,
    check_length,
    gate_version,
)
from rlkv.utils.numbers import check_number, check_whole

HEALTH_SECONDS = 5.0  # between looks at a server that has not answered yet
SILENCE_SECONDS = 30.0  # without a byte, in either direction
REQUEST_SECONDS = 60.0  # in which a request must have arrived
RETRY_SECONDS = 0.5  # between a failure and the next try
MOST_BYTES = 128 << 20  # of a request: some 18 million token ids


# --- requests


def read_request(
    body: Any, facts: EngineFacts
) -> tuple[Tensor, tuple[Rows, SamplingParams, list[int]]]:
    """Return the gates, float32 ``[layers, KV heads]``, and what to sample under them.

    Raises:
        ValueError: unless ``body``, which is any JSON, is a request that the engine can serve.
    """
    names = ["alpha", "rows", "sampling", "eos_ids"]
    alpha, rows, sampling, eos_ids = _values(body, "the request", names)
    prompts, numbers, rollout = _values(rows, "rows", ["prompts", "numbers", "rollout"])
    options = [option.name for option in fields(SamplingParams)]
    params = SamplingParams(*_values(sampling, "sampling", options))
    _check_gates(alpha, facts)
    _check_list("prompts", prompts)
    _check_ids("eos_ids", eos_ids, facts.vocab_size)
    _check_ids("numbers", numbers, 2**31)
    check_whole("rollout", rollout, 0)
    for place, prompt in enumerate(prompts):
        name = f"prompt {place}"
        _check_ids(name, prompt, facts.vocab_size)
        if not prompt:
            raise ValueError(f"{name} is empty: there is nothing to complete")
        check_length(name, len(prompt), params.max_new_tokens, facts.max_positions)
    gates = torch.tensor(alpha, dtype=torch.float32)
    return gates, (Rows(prompts, numbers, rollout), params, eos_ids)


def _check_gates(alpha: Any, facts: EngineFacts) -> None:
    is_matrix = isinstance(alpha, list) and all(isinstance(layer, list) for layer in alpha)
    heads_of_layers = [facts.num_kv_heads] * facts.num_layers
    if not is_matrix or [len(layer) for layer in alpha] != heads_of_layers:
        raise ValueError(
            f"the model has gates [{facts.num_layers}, {facts.num_kv_heads}]: send a list of "
            f"{facts.num_kv_heads} numbers for each of {facts.num_layers} layers"
        )
    for number, layer in enumerate(alpha):
        for head, gate in enumerate(layer):
            check_number(f"the gate of layer {number}, head {head}", gate, 0, 1)


def _values(body: Any, what: str, names: list[str]) -> list[Any]:
    """Take the values of an object that has these names and no others."""
    if not isinstance(body, dict) or body.keys() != set(names):
        raise ValueError(f"{what} must be an object with {', '.join(names)}")
    return [body[name] for name in names]


def _check_list(name: str, values: Any) -> None:
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list")


def _check_ids(name: str, values: Any, below: int) -> None:
    _check_list(name, values)
    for value in values:
        check_whole(name, value, 0, below - 1)


# --- the client


class Failure(Exception):
    """The server could not be reached, broke off, or failed; the same request may succeed later."""


class ServerError(Failure):
    """The server answered that it failed."""


class Connection:
    """The server at ``url``, the ``number``-th of a run.

    Attributes:
        failing_since: the first of the latest requests that all failed; None: the last one worked.
        facts: what it said of its engine when the training began.
    """

    def __init__(self, url: str, number: int) -> None:
        """ValueError unless ``url`` is ``http://host[:port]``."""
        try:
            parts = urlsplit(url)
            host = parts.hostname if parts.scheme == "http" else None
            port = parts.port
            # refuses what no host's name can hold
            http.client.HTTPConnection(host or "", port or 80)
        except (ValueError, http.client.InvalidURL):  # which do not name the address
            host = None
        if not host:
            raise ValueError(
                f"the rollout server's address must look like http://host:port, got {url!r}"
            )
        self.url = url
        self.number = number
        self.host = host
        self.port = port or 80
        self.failing_since: float | None = None
        self.facts: EngineFacts | None = None

    def sample(self, job: _Job, chunk: list[int]) -> list[Sample]:
        """Return a sample for each row of the chunk, all of the job's gates.

        Raises:
            Failure: as :meth:`exchange`, or for an answer that does not belong to the request.
            ValueError: if the server refuses the request, or was restarted with another engine.
        """
        if not chunk:  # only shows whether the server works again
            self.exchange("GET", "/health")
            return []
        request = {
            "alpha": job.alpha_LH.tolist(),
            "rows": asdict(job.rows.only(chunk)),
            "sampling": asdict(job.sampling),
            "eos_ids": job.eos_ids,
        }
        answer = self.exchange("POST", "/sample", request)
        self._check_facts(EngineFacts(**answer["facts"]))
        samples = [Sample(**{**made, "source": self.number}) for made in answer["samples"]]
        for sample in samples:
            if sample.version != job.version:
                raise Failure(f"its gates are {sample.version}, not {job.version}")
        if len(samples) != len(chunk):
            raise Failure(f"it answered {len(samples)} of {len(chunk)} rows")
        return samples

    def _check_facts(self, now: EngineFacts) -> None:
        """Raise ValueError if the server samples otherwise than when the training began."""
        before = now if self.facts is None else self.facts
        changed = []
        for name in ("model", "sink", "window", "model_files"):
            old = getattr(before, name)
            new = getattr(now, name)
            if old != new:
                changed.append(f"{name} was {old!r} and is now {new!r}")
        if changed:
            raise ValueError(
                f"the rollout server at {self.url} was restarted with another engine "
                f"({', '.join(changed)}): start it as before, then repeat the training's command, "
                "which resumes from its last checkpoint"
            )

    def exchange(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of the answer, which may take as long as the server is alive.

        Raises:
            Failure: if there is no answer, or one that may differ the next time.
            ValueError: if the server refuses the request.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SILENCE_SECONDS)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            # sampling takes minutes without a byte; a machine that is gone sends none either
            while path == "/sample" and not wait([connection.sock], HEALTH_SECONDS):
                busy = self.exchange("GET", "/health").get("busy")
                # an answer may just have been on its way
                if not busy and not wait([connection.sock], HEALTH_SECONDS):
                    raise Failure("it has forgotten the request")
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failure(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 200:
            return answer
        reason = answer.get("error", "no reason given")
        if response.status >= 500:
            raise ServerError(reason)
        raise ValueError(f"the rollout server at {self.url} refused the request: {reason}")


@dataclass
class _Job:
    """One rollout: what to sample, the chunks of rows that nobody samples, what has arrived."""

    rows: Rows
    sampling: SamplingParams
    eos_ids: list[int]
    alpha_LH: Tensor
    version: str
    chunks: SimpleQueue[list[int]] = field(default_factory=SimpleQueue)
    arrived: SimpleQueue[tuple[int, Sample] | Exception] = field(default_factory=SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    # first row of a chunk -> number of a server -> when it first answered that it failed
    errors: dict[int, dict[int, float]] = field(default_factory=dict)


class RolloutClient:
    """A :class:`~rlkv.rollout.base.GatedEngine` behind the servers at ``urls``.

    Attributes:
        retries: requests that failed and were repeated.
        patience: seconds in which all servers fail after which ValueError is raised.
    """

    def __init__(self, urls: Sequence[str], patience: float = 600.0) -> None:
        """ValueError for an address that is not ``http://host[:port]``."""
        self.servers = [Connection(url, number) for number, url in enumerate(urls)]
        self.patience = patience
        self.version = "none"
        self.retries = 0
        self._alpha_LH: Tensor | None = None
        self._deadline: float | None = None  # while all servers fail
        self._lock = threading.Lock()

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; the servers get them with the rows."""
        self._alpha_LH = alpha_LH.detach().float().cpu().clone()
        self.version = gate_version(self._alpha_LH)
        return self.version

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)``, each index once, all of the client's gates.

        The rows are dealt to the servers that answer, one chunk each, so that every engine fills
        the places of rows that end early with others.

        Raises:
            ValueError: if a server refuses a request, or all of them fail for longer than the
                patience.
        """
        if self._alpha_LH is None:
            raise ValueError("set_gates comes before sample: the servers have none of their own")
        answering = [
            server for server in self.servers if server.failing_since is None
        ] or self.servers
        job = _Job(rows, sampling, eos_ids, self._alpha_LH, self.version)
        indices = range(len(rows.prompts))
        for server in self.servers:
            chunk: list[int] = []
            if server in answering:
                chunk = list(indices[answering.index(server) :: len(answering)])
            threading.Thread(target=self._work, args=(server, job, chunk), daemon=True).start()
        try:
            for _ in indices:
                found = job.arrived.get()
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            job.ended.set()
            for _ in self.servers:
                job.chunks.put([])

    def _work(self, server: Connection, job: _Job, chunk: list[int]) -> None:
        """Have ``server`` sample its chunk, then those of others that fail, until the job ends."""
        try:
            while not job.ended.is_set():
                try:
                    samples = server.sample(job, chunk)
                except Failure as failure:
                    if chunk:
                        if isinstance(failure, ServerError):
                            self._note_error(server, job, chunk[0], failure)
                        job.chunks.put(chunk)
                    self._note_failure(server, failure, job.ended)
                    chunk = []
                    with suppress(Empty):  # others may have taken it meanwhile
                        chunk = job.chunks.get_nowait()
                    continue
                with self._lock:
                    server.failing_since = None
                    self._deadline = None  # the patience begins again with the next failure
                for found in zip(chunk, samples, strict=True):
                    job.arrived.put(found)
                chunk = job.chunks.get()  # empty at the end of the job
        except Exception as error:
            job.arrived.put(error)

    def _note_failure(self, server: Connection, failure: Failure, ended: threading.Event) -> None:
        """Pause before the next try; ValueError if all servers have failed for too long."""
        if ended.is_set():
            return
        with self._lock:
            self.retries += 1
            now = time.monotonic()
            if server.failing_since is None:
                print(f"rollout server at {server.url}: {failure}; trying again", flush=True)
                server.failing_since = now
            works = any(other.failing_since is None for other in self.servers)
            if self._deadline is None and not works:
                self._deadline = now + self.patience
            pause = RETRY_SECONDS
            if self._deadline is not None:
                pause = min(pause, self._deadline - now)
        if pause <= 0:
            raise self._gone(server, failure) from failure
        ended.wait(pause)

    def _note_error(self, server: Connection, job: _Job, first: int, error: ServerError) -> None:
        """Raise ValueError if all servers have failed for longer than the patience.

        On this chunk, or on all.  Each of them may answer meanwhile that it works, which it does
        for other rows.
        """
        with self._lock:
            now = time.monotonic()
            errors = job.errors.setdefault(first, {})
            errors.setdefault(server.number, now)
            since = [errors.get(other.number, other.failing_since) for other in self.servers]
            failed = [moment for moment in since if moment is not None]
            if len(failed) == len(since) and now - max(failed) > self.patience:
                raise self._gone(server, error) from error

    def _gone(self, server: Connection, failure: Failure) -> ValueError:
        return ValueError(
            f"the rollout server at {server.url} has failed for {self.patience:.0f} s "
            f"({failure}): start rollout/serve_vllm.py, then repeat the training's command, "
            "which resumes from its last checkpoint"
        )

    def check(self, sizes: LocalSizes, positions: int, model_files: str | None = None) -> None:
        """Wait for the servers to start, and check that they sample as the training does.

        Args:
            model_files: digest of those of the training, None: not known.

        Raises:
            ValueError: if one has another sink, window or other model files than the training, or
                too few positions.
        """
        for server in self.servers:
            facts = self._facts(server)
            server.facts = facts
            if (facts.sink, facts.window) != (sizes.sink, sizes.window):
                raise ValueError(
                    f"the rollout server at {server.url} mixes with sink {facts.sink} and window "
                    f"{facts.window}, the training with {sizes.sink} and {sizes.window}: start "
                    f"rollout/serve_vllm.py with --sink {sizes.sink} --window {sizes.window}"
                )
            if model_files is not None and facts.model_files not in (model_files, None):
                raise ValueError(
                    f"the rollout server at {server.url} serves {facts.model} from other files "
                    "than the training's: start rollout/serve_vllm.py with the same model"
                )
            if facts.max_positions < positions:
                raise ValueError(
                    f"the rollout server at {server.url} takes {facts.max_positions} tokens per "
                    f"row, the training needs {positions}: start rollout/serve_vllm.py with "
                    f"--max-positions {positions}"
                )

    def _facts(self, server: Connection) -> EngineFacts:
        """Ask what engine ``server`` has, for as long as the patience lasts."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                answer = server.exchange("GET", "/health")
                return EngineFacts(**{fact.name: answer[fact.name] for fact in fields(EngineFacts)})
            except (KeyError, TypeError):
                raise ValueError(
                    f"{server.url} is not a rollout server of this version of rlkv: its /health "
                    "lacks a field of one"
                ) from None
            except Failure as failure:
                if time.monotonic() > deadline:
                    raise self._gone(server, failure) from failure
                time.sleep(RETRY_SECONDS)


# --- the server


class RolloutServer(ThreadingHTTPServer):
    """Serves ``engine`` until :meth:`shutdown`; requests for samples run one after the other.

    ``address``: host and port, 0 for a free one (``server_port``); ValueError if it cannot listen
    there.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], engine: GatedEngine, facts: EngineFacts) -> None:
        self.engine = engine
        self.facts = facts
        self.version = "none"  # no gates have been set since the start
        self.engine_lock = threading.Lock()
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            host, port = address
            raise ValueError(
                f"cannot listen at {host}:{port} ({error.strerror}): choose another --port"
            ) from error
        self.is_local = _is_local(str(self.server_address[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the client is gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Refused(ValueError):
    """A request that gets another status than 400."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RolloutServer
    timeout = SILENCE_SECONDS  # of each read and write

    def setup(self) -> None:
        super().setup()
        # a request that trickles in never falls silent
        self.deadline = threading.Timer(REQUEST_SECONDS, self._end_of_request)
        self.deadline.daemon = True
        self.deadline.start()

    def finish(self) -> None:
        self.deadline.cancel()
        super().finish()

    def _end_of_request(self) -> None:
        """Let whoever waits for the rest of the request read its end."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line per request."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer as JSON, also what http.server itself refuses."""
        self.request_version = self.protocol_version  # before one is read it answers as HTTP/0.9
        with suppress(OSError):
            self._answer(code, {"error": message or self.responses[code][0]})
            # read on for a moment: closing with unread bytes would lose the answer
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            end = time.monotonic() + 2
            while time.monotonic() < end and self.rfile.read1(1 << 16):
                pass

    def do_GET(self) -> None:
        self._serve("/health", self._health)

    def do_POST(self) -> None:
        self._serve("/sample", self._sample)

    def _serve(self, path: str, answer: Callable[[], dict[str, Any]]) -> None:
        try:
            self._check_sender()
            if self.path != path:
                raise _Refused(404, f"no such page: {self.path}")
            content = answer()
        except (ConnectionError, TimeoutError):
            pass  # the client is gone; it will ask again
        except ValueError as error:
            self.send_error(getattr(error, "status", 400), str(error))
        except Exception as error:
            traceback.print_exc()  # for the operator of the server; the client tries again
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})
        else:
            self._answer(200, content)

    def _check_sender(self) -> None:
        """Refuse web pages, and at localhost any name that a web page may have rebound to it."""
        if "Origin" in self.headers:
            raise _Refused(403, "requests of web pages are not answered")
        try:
            named = urlsplit("//" + self.headers.get("Host", "localhost")).hostname or ""
        except ValueError:
            named = ""
        if self.server.is_local and not _is_local(named):
            raise _Refused(403, "this server listens at localhost and is not known by another name")

    def _read_json(self) -> Any:
        """Read the body; :class:`_Refused` unless it is JSON of a declared, bounded length."""
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "the body must be JSON, with Content-Type: application/json")
        length = self.headers.get("Content-Length", "").strip()
        if not (length.isascii() and length.isdigit()):
            raise _Refused(411, "the length of the body must be given as Content-Length")
        if len(length) > 12 or int(length) > MOST_BYTES:
            raise _Refused(413, f"the body may have {MOST_BYTES} bytes: send fewer rows at once")
        body = self.rfile.read(int(length))
        self.deadline.cancel()
        if len(body) < int(length):
            raise ValueError(f"the body ends after {len(body)} of {length} bytes")
        try:
            return json.loads(body)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from None

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _health(self) -> dict[str, Any]:
        busy = self.server.engine_lock.locked()
        return {**asdict(self.server.facts), "version": self.server.version, "busy": busy}

    def _sample(self) -> dict[str, Any]:
        alpha_LH, asked = read_request(self._read_json(), self.server.facts)
        made: dict[int, Sample] = {}
        with self.server.engine_lock:
            if self.server.version != gate_version(alpha_LH):
                self.server.version = "none"  # if this fails, the next request sets them too
                self.server.version = self.server.engine.set_gates(alpha_LH)
            # closed when the client is gone: the engine must be free when it asks again
            with closing(self.server.engine.sample(*asked)) as samples:  # type: ignore[type-var]
                for index, sample in samples:
                    made[index] = sample
                    self._check_client()
        found = [asdict(made[index]) for index in sorted(made)]
        return {"samples": found, "facts": asdict(self.server.facts)}

    def _check_client(self) -> None:
        """Raise ConnectionError if the client has closed the connection."""
        if wait([self.connection], timeout=0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError("the client is gone")
