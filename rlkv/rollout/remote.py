"""A rollout engine behind HTTP: one GPU trains, another one samples.  It may be killed and
restarted at any moment.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn
from urllib.parse import urlsplit

from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.rollout.base import (
    HEARTBEAT_SECONDS,
    EngineFacts,
    GatedEngine,
    Rows,
    Sample,
    SampleRequest,
    SamplingParams,
    gate_version,
    read_gates,
)

SILENCE = 15 * HEARTBEAT_SECONDS  # seconds without a byte after which a server counts as dead


class Failure(Exception):
    """The server could not be reached, broke off, or failed; the same request may succeed later."""


class Connection:
    """The server at ``url``, the ``number``-th of a run.

    Attributes:
        version: of the gates that it has, as far as is known.
        pause: seconds between failures and the next try; 0 while it answers.
    """

    def __init__(self, url: str, number: int = 0) -> None:
        """ValueError unless ``url`` is ``http://host[:port]``."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(
                f"the rollout server's address must look like http://host:port, got {url!r}"
            )
        self.url, self.number = url, number
        self._host, self._port = parts.hostname, parts.port or 80
        self.version, self.pause = "none", 0.0

    def facts(self) -> EngineFacts:
        """What the server says of its engine; ValueError if it is not a rollout server."""
        answer = next(self.lines("GET", "/health"), {})
        try:
            return EngineFacts(**{field.name: answer[field.name] for field in fields(EngineFacts)})
        except KeyError as error:
            raise ValueError(
                f"{self.url} is not a rollout server: its /health has no {error}"
            ) from None

    def send_gates(self, alpha_LH: Tensor, version: str) -> None:
        """Unless it has them."""
        if self.version == version:
            return
        found = next(self.lines("POST", "/gates", {"alpha": alpha_LH.tolist()}), {}).get("version")
        if found != version:
            raise Failure(f"the server took gates {found} for {version}")
        self.version = version

    def ask(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """The samples of one request, until it ends, breaks off or turns out to be stale."""
        request = {
            "version": self.version,
            "rows": asdict(rows),
            "sampling": asdict(sampling),
            "eos_ids": eos_ids,
        }
        for line in self.lines("POST", "/sample", request):
            if "error" in line:
                raise ValueError(
                    f"the rollout server at {self.url} refused the request: {line['error']}"
                )
            if "failed" in line:
                raise Failure(line["failed"])
            if "done" in line:
                return
            found = line.get("stale", line.get("version"))
            if found != self.version:
                raise Failure(f"its gates are {found}, not {self.version}")
            yield line.pop("index"), Sample(**{**line, "source": self.number})

    def lines(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The lines of JSON of one exchange as they arrive, without the heartbeats, which are empty
        lines.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=SILENCE)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                for line in answer:
                    if line.strip():
                        yield json.loads(line)  # the last line of a server that died is cut off
                return
            error = json.loads(answer.read()).get("error", "no reason given")
        except (OSError, http.client.HTTPException, ValueError) as failure:
            raise Failure(f"{type(failure).__name__}: {failure}") from failure
        finally:
            connection.close()
        if answer.status >= 500:
            raise Failure(error)
        raise ValueError(f"the rollout server at {self.url} refused the request: {error}")


FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0
Ask = Callable[[Rows], Iterator[tuple[int, Sample]]]


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
        self._alpha_LH: Tensor | None = None
        self.version = "none"
        self.retries = 0

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Sample under these gates from now on; every server is sent them before its next rows."""
        self._alpha_LH = alpha_LH.detach().float().cpu().clone()
        self.version = gate_version(self._alpha_LH)
        return self.version

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)``, each index once, all of the client's gates.

        ValueError if a server refuses a request, or all of them fail for longer than the patience.
        """
        fit = [server for server in self.servers if not server.pause] or self.servers
        job = _Job(self, self.servers)
        for server in self.servers:
            share = (
                list(range(len(rows.prompts)))[fit.index(server) :: len(fit)]
                if server in fit
                else []
            )
            ask = partial(server.ask, sampling=sampling, eos_ids=eos_ids)
            threading.Thread(
                target=self._work, args=(job, server, share, rows, ask), daemon=True
            ).start()
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
                        raise ValueError(
                            "set_gates comes before sample: the servers have none of their own"
                        )
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
        """Raise ``ValueError`` if a server has another sink or window than the training, or too few
        positions.
        """
        for server in self.servers:
            facts = self.facts(server)
            if (facts.sink, facts.window) != (sizes.sink, sizes.window):
                raise ValueError(
                    f"the rollout server at {server.url} mixes with sink {facts.sink} and window "
                    f"{facts.window}, the "
                    f"training with {sizes.sink} and {sizes.window}: start rollout/serve_vllm.py "
                    "with "
                    f"--sink {sizes.sink} --window {sizes.window}"
                )
            if facts.max_positions < positions:
                raise ValueError(
                    f"the rollout server at {server.url} takes {facts.max_positions} tokens per "
                    "row, the training "
                    f"needs {positions}: start rollout/serve_vllm.py with --max-positions "
                    f"{positions}"
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
    """The rows of one rollout that nobody has been asked for, and what has arrived.

    Used by a thread per server.
    """

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
        """A sample arrived, or all that it was asked for: the patience begins again with the next
        failure.
        """
        with self._changed:
            server.pause, self._deadline = 0.0, None

    def failed(self, server: Connection, failure: Failure, owed: Iterable[int] = ()) -> None:
        """Leave the rows to the others and pause.

        ValueError if all servers have failed for too long.
        """
        client = self.client
        with self._changed:
            if self.ended:
                return
            self._left += owed
            self._changed.notify_all()
            client.retries += 1
            if not server.pause:
                print(f"rollout server at {server.url}: {failure}; trying again", flush=True)
            server.version, server.pause = (
                "none",
                min(2 * server.pause or FIRST_PAUSE, LONGEST_PAUSE),
            )
            if self._deadline is None and all(other.pause for other in self.servers):
                self._deadline = time.monotonic() + client.patience
            left = LONGEST_PAUSE if self._deadline is None else self._deadline - time.monotonic()
            if left <= 0:
                raise ValueError(
                    f"the rollout server at {server.url} did not answer for {client.patience:.0f} "
                    f"s ({failure}): start "
                    "rollout/serve_vllm.py, then repeat the training's command, which resumes from "
                    "its last checkpoint"
                ) from failure
            self._changed.wait_for(lambda: self.ended, min(server.pause, left))


MOST_BYTES = 128 << 20  # of a request: some 18 million token ids
REQUEST_SECONDS = 60.0  # in which a request must have arrived
SILENCE_SECONDS = 30.0  # without a byte, in either direction
_END = object()


class RolloutServer(ThreadingHTTPServer):
    """Serves ``engine`` until :meth:`shutdown`; requests for samples run one after the other.

    ``address``: host and port, 0 for a free one (``server_port``); ValueError if it cannot listen
    there.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], engine: GatedEngine, facts: EngineFacts) -> None:
        self.engine, self.facts = engine, facts
        self.version = "none"  # no gates have been set since the start
        self.engine_lock = threading.Lock()
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            host, port = address
            raise ValueError(
                f"cannot listen at {host}:{port} ({error.strerror}): choose another --port"
            ) from error
        self.local = _is_local(str(self.server_address[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the client is gone or too slow."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Refused(Exception):
    """A request that gets this status and sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: RolloutServer
    timeout = SILENCE_SECONDS  # of each read and write

    def setup(self) -> None:
        super().setup()
        self.late = False
        self.deadline = threading.Timer(REQUEST_SECONDS, self._end_of_request)
        self.deadline.daemon = True
        self.deadline.start()

    def finish(self) -> None:
        self.deadline.cancel()
        super().finish()

    def _end_of_request(self) -> None:
        """Let whoever waits for the rest of the request read its end."""
        self.late = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses in the form of all other answers."""
        self.request_version = (
            self.protocol_version
        )  # as long as none was read, 0.9: answers without a status
        self._refuse(408 if self.late else code, message or self.responses[code][0])

    def do_GET(self) -> None:
        try:
            self._check_sender()
            if self.path != "/health":
                raise _Refused(404, f"no such page: {self.path}")
        except _Refused as refused:
            return self._refuse(refused.status, str(refused))
        busy = self.server.engine_lock.locked()
        self._answer(200, {**vars(self.server.facts), "version": self.server.version, "busy": busy})

    def do_POST(self) -> None:
        pages = {"/gates": self._set_gates, "/sample": self._sample}
        try:
            self._check_sender()
            if self.path not in pages:
                raise _Refused(404, f"no such page: {self.path}")
            pages[self.path](self._read_json())
        except _Refused as refused:
            self._refuse(refused.status, str(refused))
        except (ConnectionError, TimeoutError):
            pass  # the client is gone; it will ask again
        except ValueError as error:
            self._refuse(400, str(error))
        except Exception as error:
            traceback.print_exc()
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})

    def _check_sender(self) -> None:
        """Refuse what a web page sends, and on this machine alone any other name of it (DNS
        rebinding).
        """
        if self.late:
            raise _Refused(408, f"the request did not arrive within {REQUEST_SECONDS:g} s")
        if "Origin" in self.headers:
            raise _Refused(403, "requests of web pages are not answered")
        try:
            named = urlsplit("//" + self.headers.get("Host", "localhost")).hostname or ""
        except ValueError:
            named = ""
        if self.server.local and not _is_local(named):
            raise _Refused(403, "this server listens at localhost and is not known by another name")

    def _read_json(self) -> Any:
        """The body; :class:`_Refused` unless it is JSON of a declared, bounded length."""
        if self.headers.get_content_type() != "application/json":
            raise _Refused(415, "the body must be JSON, with Content-Type: application/json")
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in self.headers:
            raise _Refused(411, "the length of the body must be given as Content-Length")
        text = lengths[0].strip()
        if len(lengths) > 1 or not (text.isascii() and text.isdigit()):
            raise _Refused(
                400,
                f"Content-Length must be one whole number, got {ascii(', '.join(lengths))[:40]}",
            )
        if len(text) > 12 or int(text) > MOST_BYTES:
            raise _Refused(413, f"the body may have {MOST_BYTES} bytes: send fewer rows at once")
        try:
            body = self.rfile.read(int(text))
        except TimeoutError:
            body = b""
            self.late = True
        if len(body) < int(text):
            if self.late:
                raise _Refused(408, f"the body of {text} bytes did not arrive in time")
            raise _Refused(400, f"the body ends after {len(body)} of {text} bytes")
        self.deadline.cancel()
        try:
            return json.loads(body, parse_constant=_no_number)
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from None

    def _refuse(self, status: int, message: str) -> None:
        """Answer, and read on for a moment: a connection closed with unread bytes loses the answer."""
        self._answer(status, {"error": message})
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            end = time.monotonic() + 2
            while time.monotonic() < end and self.rfile.read1(1 << 16):
                pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _set_gates(self, body: Any) -> None:
        alpha = read_gates(body, self.server.facts)
        with self.server.engine_lock:
            self.server.version = self.server.engine.set_gates(alpha)
        self._answer(200, {"version": self.server.version})

    def _sample(self, body: Any) -> None:
        asked = SampleRequest.read(body, self.server.facts)
        lines: queue.Queue[Any] = queue.Queue()
        gone = threading.Event()

        def work() -> None:
            try:
                with self.server.engine_lock:
                    if self.server.version != asked.version:
                        return lines.put({"stale": self.server.version})
                    made = self.server.engine.sample(asked.rows, asked.sampling, asked.eos_ids)
                    with closing(made) as samples:  # type: ignore[type-var]
                        for index, sample in samples:
                            lines.put({"index": index, **asdict(sample)})
                            if gone.is_set():
                                return None
                lines.put({"done": len(asked.rows.prompts)})
            except ValueError as error:
                lines.put({"error": str(error)})
            except Exception as error:
                traceback.print_exc()  # for the operator of the server; the client tries again
                lines.put({"failed": f"{type(error).__name__}: {error}"})
            finally:
                lines.put(_END)

        threading.Thread(target=work, daemon=True).start()
        self.send_response(200)
        self.send_header("Content-Type", "application/jsonl")
        self.end_headers()  # HTTP/1.0: the answer ends with the connection
        try:
            while True:
                try:
                    line = lines.get(timeout=HEARTBEAT_SECONDS)
                except queue.Empty:
                    self.wfile.write(b"\n")
                    continue
                if line is _END:
                    return
                self.wfile.write(json.dumps(line).encode() + b"\n")
        finally:
            gone.set()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
