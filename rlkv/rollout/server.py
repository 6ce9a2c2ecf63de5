"""A rollout engine behind HTTP: one GPU trains, another one samples.  It may be killed and restarted at any moment."""

from __future__ import annotations

import ipaddress
import json
import queue
import socket
import sys
import threading
import time
import traceback
from contextlib import closing, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn
from urllib.parse import urlsplit

from rlkv.rollout.gated import HEARTBEAT_SECONDS, EngineFacts, GatedEngine, SampleRequest, read_gates

MOST_BYTES = 128 << 20  # of a request: some 18 million token ids
REQUEST_SECONDS = 60.0  # in which a request must have arrived
SILENCE_SECONDS = 30.0  # without a byte, in either direction
_END = object()


class RolloutServer(ThreadingHTTPServer):
    """Serves ``engine`` until :meth:`shutdown`; requests for samples run one after the other.

    ``address``: host and port, 0 for a free one (``server_port``); ValueError if it cannot listen there.
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
            raise ValueError(f"cannot listen at {host}:{port} ({error.strerror}): choose another --port") from error
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
        self.request_version = self.protocol_version  # as long as none was read, 0.9: answers without a status
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
        """Refuse what a web page sends, and on this machine alone any other name of it (DNS rebinding)."""
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
            raise _Refused(400, f"Content-Length must be one whole number, got {ascii(', '.join(lengths))[:40]}")
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
