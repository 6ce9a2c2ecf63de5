"""A hub on this machine: a folder is the repository ``owner/model``; or an error."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.helpers.child import running
from tests.helpers.paths import ROOT

REPO = "owner/model"
COMMIT = "0" * 40


@dataclass
class FakeHub:
    """The hub's repository and what it was asked.

    ``folder`` None: every request gets ``status``, or what the repository's name ends with
    (``owner/model-404``).  ``requests`` lists method and path of each one.
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
            if self.path.startswith(f"/api/models/{REPO}/") and hub.folder:
                return self.send(self.listing())
            asked = self.path.replace(COMMIT, "main")
            repo, _, name = asked.partition("/resolve/main/")
            path = hub.folder / name if hub.folder and repo == f"/{REPO}" and name else None
            if path is None or not path.is_file():
                named = repo.rpartition("-")[2]
                status = int(named) if named.isdigit() else hub.status
                self.send_response(404 if hub.folder else status)
                if hub.folder and path is not None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def listing(self) -> Any:
            """The repository at its commit, or the files of its tree."""
            assert hub.folder is not None
            files = sorted(hub.folder.iterdir())
            if "/tree/" in self.path:
                tree = []
                for file in files:
                    size = file.stat().st_size
                    tree.append({"type": "file", "path": file.name, "size": size, "oid": file.name})
                return tree
            siblings = [{"rfilename": file.name} for file in files]
            return {"id": REPO, "sha": COMMIT, "siblings": siblings}

        def do_POST(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            assert hub.folder is not None
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                if f"{asked['organization']}/{asked['name']}" != REPO:
                    return self.send({"error": "You may not write here"}, 403)
                return self.send({"url": f"{hub.url}/{REPO}"})
            if self.path == "/api/validate-yaml":
                return self.send({"errors": [], "warnings": []})
            if self.path == f"/api/models/{REPO}/preupload/main":
                regular = {"uploadMode": "regular", "shouldIgnore": False}
                asked = json.loads(body)["files"]
                return self.send({"files": [{"path": file["path"], **regular} for file in asked]})
            assert self.path == f"/api/models/{REPO}/commit/main"
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    (hub.folder / line["value"]["path"]).write_bytes(content)
            self.send({"commitUrl": f"{hub.url}/{REPO}/commit/{COMMIT}", "commitOid": COMMIT})

        def send(self, content: Any, status: int = 200) -> None:
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub


def run_with_hub(
    code: str, endpoint: str, home: Path, *arguments: str, **variables: str
) -> list[str]:
    """The lines that ``code`` prints in a process with this hub and a cache in ``home``.

    The hub's client reads its address at import, hence the process of its own.
    """
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment |= {"no_proxy": "127.0.0.1", **variables}
    for name, value in os.environ.items():
        if not name.startswith(("HF_", "TRANSFORMERS_", "HUGGINGFACE_")):
            environment.setdefault(name, value)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
