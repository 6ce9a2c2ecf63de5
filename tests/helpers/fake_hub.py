"""A hub on this machine: serves one folder as the repository ``owner/model``, or answers with an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = "owner/model"


@dataclass
class FakeHub:
    """``folder`` None: every request gets ``status``, or what the repository's name ends with (``owner/model-404``).

    ``requests`` lists method and path of each one.
    """

    folder: Path | None = None
    status: int = 404
    url: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Run ``hub`` at ``hub.url`` until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            repo, _, name = self.path.partition("/resolve/main/")
            path = hub.folder / name if hub.folder and repo == f"/{REPO}" and name else None
            if path is None or not path.is_file():
                named = repo.rpartition("-")[2]
                self.send_response(404 if hub.folder else int(named) if named.isdigit() else hub.status)
                if hub.folder and path is not None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
