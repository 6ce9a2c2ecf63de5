"""A rollout engine behind HTTP: one GPU trains, another one samples.  It may be killed and restarted at any moment."""

from __future__ import annotations

import json
import queue
import threading
import traceback
from contextlib import closing
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import HEARTBEAT_SECONDS, EngineFacts, GatedEngine, Rows

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


class _Handler(BaseHTTPRequestHandler):
    server: RolloutServer

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._answer(404, {"error": f"no such page: {self.path}"})
        busy = self.server.engine_lock.locked()
        self._answer(200, {**vars(self.server.facts), "version": self.server.version, "busy": busy})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if self.path == "/gates":
                self._set_gates(body)
            elif self.path == "/sample":
                self._sample(body)
            else:
                self._answer(404, {"error": f"no such page: {self.path}"})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client is gone; it will ask again
        except ValueError as error:
            self._answer(400, {"error": str(error)})
        except Exception as error:
            traceback.print_exc()
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _set_gates(self, body: dict[str, Any]) -> None:
        if not isinstance(body, dict) or "alpha" not in body:
            raise ValueError('gates are sent as {"alpha": [[...]]}')
        alpha = torch.tensor(body["alpha"], dtype=torch.float32)
        with self.server.engine_lock:
            self.server.version = self.server.engine.set_gates(alpha)
        self._answer(200, {"version": self.server.version})

    def _sample(self, body: dict[str, Any]) -> None:
        try:
            version, eos_ids = body["version"], list(body["eos_ids"])
            rows, sampling = Rows(**body["rows"]), SamplingParams(**body["sampling"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a request for samples: {error}") from None
        lines: queue.Queue[Any] = queue.Queue()
        gone = threading.Event()

        def work() -> None:
            try:
                with self.server.engine_lock:
                    if self.server.version != version:
                        return lines.put({"stale": self.server.version})
                    with closing(self.server.engine.sample(rows, sampling, eos_ids)) as samples:  # type: ignore[type-var]
                        for index, sample in samples:
                            lines.put({"index": index, **asdict(sample)})
                            if gone.is_set():
                                return None
                lines.put({"done": len(rows.prompts)})
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
