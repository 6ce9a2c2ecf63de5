"""HTTP exchanges with one rollout server: its facts, the gates, and samples as they arrive."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from rlkv.rollout.base import SamplingParams
from rlkv.rollout.gated import HEARTBEAT_SECONDS, EngineFacts, Rows, Sample

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
            raise ValueError(f"the rollout server's address must look like http://host:port, got {url!r}")
        self.url, self.number = url, number
        self._host, self._port = parts.hostname, parts.port or 80
        self.version, self.pause = "none", 0.0

    def facts(self) -> EngineFacts:
        """What the server says of its engine; ValueError if it is not a rollout server."""
        answer = next(self.lines("GET", "/health"), {})
        try:
            return EngineFacts(**{field.name: answer[field.name] for field in fields(EngineFacts)})
        except KeyError as error:
            raise ValueError(f"{self.url} is not a rollout server: its /health has no {error}") from None

    def send_gates(self, alpha_LH: Tensor, version: str) -> None:
        """Unless it has them."""
        if self.version == version:
            return
        found = next(self.lines("POST", "/gates", {"alpha": alpha_LH.tolist()}), {}).get("version")
        if found != version:
            raise Failure(f"the server took gates {found} for {version}")
        self.version = version

    def ask(self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]) -> Iterator[tuple[int, Sample]]:
        """The samples of one request, until it ends, breaks off or turns out to be stale."""
        request = {"version": self.version, "rows": asdict(rows), "sampling": asdict(sampling), "eos_ids": eos_ids}
        for line in self.lines("POST", "/sample", request):
            if "error" in line:
                raise ValueError(f"the rollout server at {self.url} refused the request: {line['error']}")
            if "failed" in line:
                raise Failure(line["failed"])
            if "done" in line:
                return
            found = line.get("stale", line.get("version"))
            if found != self.version:
                raise Failure(f"its gates are {found}, not {self.version}")
            yield line.pop("index"), Sample(**{**line, "source": self.number})

    def lines(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The lines of JSON of one exchange as they arrive, without the heartbeats, which are empty lines."""
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
