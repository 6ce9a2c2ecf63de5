"""Requests that a rollout server must refuse: one sentence, nothing changed, and it serves the next
one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from rlkv.cli.app import parse
from rlkv.rollout import remote as server_module
from rlkv.rollout.remote import RolloutServer
from tests.rollout.test_server import FACTS, SERVE, Scripted, serving

GATES = [[0.5] * 4] * 3
ROWS = {"prompts": [[5, 6]], "numbers": [0], "rollout": 0}
SAMPLING = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
REQUEST = {"version": "none", "rows": ROWS, "sampling": SAMPLING, "eos_ids": [2]}
JSON = ["Content-Type: application/json"]


@pytest.fixture(scope="module")
def server() -> Iterator[RolloutServer]:
    with serving(Scripted([])) as (running, _):
        yield running


def send(server: RolloutServer, *parts: bytes, pause: float = 0.0) -> tuple[int, str]:
    """The status, and the error or the rest of the answer, for a request that is sent in these
    parts.
    """
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        answer = b""
        with suppress(ConnectionError):  # refused before all was sent
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        while more := connection.recv(1 << 16):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(body)["error"] if status >= 400 else body.decode()


def raw(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *headers, *JSON, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def check_refused(
    server: RolloutServer, statuses: int, sentence: str, *parts: bytes, pause: float = 0.0
) -> None:
    """Refused with that status and sentence; the gates stay, no sample is made, and the server
    lives on.
    """
    version, asked = server.version, list(server.engine.asked)
    status, error = send(server, *parts, pause=pause)
    assert (status, sentence in error, "\n" in error) == (statuses, True, False), (status, error)
    assert (server.version, server.engine.asked) == (version, asked)
    assert send(server, raw("/health", b"", method="GET"))[0] == 200


def test_what_is_refused_below_is_right_otherwise(server: RolloutServer) -> None:
    status, answer = send(server, raw("/gates", json.dumps({"alpha": GATES}).encode()))
    assert (status, json.loads(answer)) == (200, {"version": server.version})
    status, answer = send(
        server, raw("/sample", json.dumps({**REQUEST, "version": server.version}).encode())
    )
    assert (status, json.loads(answer.splitlines()[-1])) == (200, {"done": 1})


def rows(**changed: Any) -> dict[str, Any]:
    return {**REQUEST, "rows": {**ROWS, **changed}}


def sampling(**changed: Any) -> dict[str, Any]:
    return {**REQUEST, "sampling": {**SAMPLING, **changed}}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        *[("/gates", {"alpha": [[0.5] * 4, [0.5] * 4, [0.5] * 3 + [gate]]}, "gate of layer 2, head 3 must be in [0, 1]")
          for gate in (7.0, -0.1, True, None, "0.5", 10**400)],
        *[("/gates", {"alpha": alpha}, "gates") for alpha in (None, 1, [], [1], [[]], [[0.5] * 4] * 2, [GATES] * 3)],
        *[("/gates", body, "must be an object with alpha") for body in (None, [], "alpha", 7, {}, {"beta": 1})],
        *[("/sample", body, "must be an object with") for body in (None, [], 7, {}, {**REQUEST, "more": 1})],
        *[("/sample", {**REQUEST, "rows": part}, "rows must be an object") for part in (None, [], {"prompts": []})],
        ("/sample", {**REQUEST, "version": ["none"]}, "version must be a text"),
        ("/sample", {**REQUEST, "eos_ids": 2}, "eos_ids must be a list"),
        ("/sample", {**REQUEST, "eos_ids": [128]}, "eos_ids: 128 is not a whole number from 0 to "
                                                   "127"),
        ("/sample", rows(prompts="\ud800"), "prompts must be a list"),
        ("/sample", rows(prompts=["\ud800"]), "prompt 0 must be a list"),
        ("/sample", rows(prompts=[[]]), "prompt 0 is empty"),
        *[("/sample", rows(prompts=[[5, token]]), "is not a whole number from 0 to 127")
          for token in (128, -1, 2**70, 5.0, True, None, "\ud800", [5])],
        ("/sample", rows(prompts=[[5] * 56]), "56 tokens, which with max_new_tokens=9 exceeds the "
                                              "server's 64"),
        ("/sample", rows(numbers=[0, 1]), "1 prompts, but 2 row numbers"),
        ("/sample", rows(numbers=[-1]), "numbers: -1"),
        ("/sample", rows(rollout=2**31), "rollout: 2147483648"),
        ("/sample", sampling(max_new_tokens=10**9), "max_new_tokens=1000000000 exceeds"),
        ("/sample", sampling(max_new_tokens=0), "max_new_tokens is 0"),
        *[("/sample", sampling(max_new_tokens=value), "max_new_tokens must be a whole number")
          for value in (9.0, True, "9", None)],
        ("/sample", sampling(temperature="1"), "temperature must be a number"),
        ("/sample", sampling(temperature=-1), "temperature, if not 0"),
        ("/sample", sampling(top_p=7), "top_p is 7"),
        ("/sample", sampling(seed=2**63), "seed is"),
    ],
)  # fmt: skip
def test_bodies(server: RolloutServer, path: str, body: Any, sentence: str) -> None:
    check_refused(server, 400, sentence, raw(path, json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/gates", b"", "not JSON"),
        ("/gates", b"\xff\xfe\x00", "not JSON"),
        ("/gates", b"[" * 200_000, "nested too deeply"),
        ("/gates", b'{"alpha": [[' + b"9" * 5000 + b"]]}", "not JSON"),
        *[("/gates", json.dumps({"alpha": [[0.5] * 4, [0.5] * 4, [0.5] * 3 + [float(value)]]}).encode(), value)
          for value in ("NaN", "Infinity", "-Infinity")],
        ("/gates", b'{"alpha": [[1e999,0,0,0],[0,0,0,0],[0,0,0,0]]}', "got inf"),
        ("/sample", json.dumps(sampling(temperature=7)).replace("7", "1e999").encode(), "temperature must be a number"),
    ],
)  # fmt: skip
def test_bodies_that_are_not_json(
    server: RolloutServer, path: str, body: bytes, sentence: str
) -> None:
    check_refused(server, 400, sentence, raw(path, body))


BODY = json.dumps({"alpha": GATES}).encode()
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    ("status", "sentence", "lines", "body"),
    [
        (415, "application/json", ["POST /gates HTTP/1.1", "Content-Type: text/plain", LENGTH], BODY),
        (415, "application/json", ["POST /gates HTTP/1.1", LENGTH], BODY),
        (403, "web pages", ["POST /gates HTTP/1.1", "Origin: http://127.0.0.1", *JSON, LENGTH], BODY),
        (403, "web pages", ["GET /health HTTP/1.1", "Origin: null"], b""),
        (403, "another name", ["POST /gates HTTP/1.1", "Host: rebound.example:8700", *JSON, LENGTH], BODY),
        (403, "another name", ["GET /health HTTP/1.1", "Host: [::1"], b""),
        (411, "Content-Length", ["POST /gates HTTP/1.1", *JSON], b""),
        (411, "Content-Length", ["POST /gates HTTP/1.1", *JSON, "Transfer-Encoding: chunked"], b"0\r\n\r\n"),
        *[(400, "one whole number", ["POST /gates HTTP/1.1", *JSON, f"Content-Length: {length}"], BODY)
          for length in ("-1", "+5", "1_0", "many", "", "5\r\nContent-Length: 6")],
        (413, "may have", ["POST /gates HTTP/1.1", *JSON, f"Content-Length: {1 << 40}"], b" " * (1 << 20)),
        (413, "may have", ["POST /gates HTTP/1.1", *JSON, "Content-Length: " + "9" * 6000], BODY),
        (404, "/none", ["POST /none HTTP/1.1", *JSON, LENGTH], BODY),
        (404, "/metrics", ["GET /metrics HTTP/1.1"], b""),
        (501, "PUT", ["PUT /gates HTTP/1.1", *JSON, LENGTH], BODY),
        (431, "", ["GET /health HTTP/1.1", *(f"X-{n}: 1" for n in range(200))], b""),
        (414, "", ["GET /" + "a" * 70_000 + " HTTP/1.1"], b""),
    ],
)  # fmt: skip
def test_requests(
    server: RolloutServer, status: int, sentence: str, lines: list[str], body: bytes
) -> None:
    check_refused(server, status, sentence, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1:1", "[::1]:8700"])
def test_names_of_this_machine(server: RolloutServer, host: str) -> None:
    assert send(server, raw("/health", b"", f"Host: {host}", method="GET"))[0] == 200


@pytest.mark.parametrize(
    "parts",
    [
        [raw("/gates", BODY)[:-5]],  # a body that never ends
        [bytes([byte]) for byte in raw("/gates", BODY)],  # slow from the first line on
        [b"POST /gates HTTP/1.1\r\n", *[b"X: 1\r\n"] * 90],  # slow headers
        [raw("/gates", BODY)[: -len(BODY)], *(bytes([byte]) for byte in BODY)],  # a slow body
    ],
)
def test_slow_requests(
    server: RolloutServer, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.5)
    threads = threading.active_count()
    check_refused(server, 408, "", *parts, pause=0.05)
    deadline = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_silent_client_is_left(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module._Handler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(b"POST /gates HT")
        assert connection.recv(1) == b""
    check_refused(server, 408, "did not arrive in time", raw("/gates", BODY)[:-5])


def test_a_body_that_is_cut_off(server: RolloutServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(raw("/gates", BODY)[:-5])
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b" 400 " in answer
    assert f"ends after {len(BODY) - 5} of {len(BODY)} bytes".encode() in answer


def test_it_listens_on_this_machine_unless_told_otherwise() -> None:
    assert SERVE.ServeConfig().host == "127.0.0.1"
    with RolloutServer(("0.0.0.0", 0), Scripted([]), FACTS) as server:
        assert not server.local
    with pytest.raises(ValueError, match="--port 65536 is not a port"):
        parse(SERVE.ServeConfig, arguments=["--port", "65536"])
