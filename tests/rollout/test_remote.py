"""Rollout servers and their client: chunks over HTTP, servers that fail, hostile requests."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.cli.app import parse
from rlkv.models.loading import files_digest
from rlkv.rollout import remote
from rlkv.rollout.base import EngineFacts, Rows, Sample, SamplingParams, gate_version
from rlkv.rollout.hf import GatedHFEngine
from rlkv.rollout.remote import RolloutClient, RolloutServer
from tests.helpers.child import running, wait_until
from tests.helpers.models import make_tiny_model
from tests.helpers.programs import load_program

SERVE = load_program("rollout/serve_vllm.py")

FACTS = EngineFacts("tiny", 2, 6, 64, 3, 4, 128)
SAMPLING = SamplingParams(9, temperature=1.0, seed=3)
ROWS = Rows([[5, 6, 7], [9] * 11, [30, 31], [12], [40, 50]], list(range(5)), rollout=2)
OFF = torch.zeros(3, 4)
ON = torch.ones(3, 4)


class Scripted:
    """An engine that gives row r the token r, and fails at so many samples of each request."""

    def __init__(self, *fails: int | None) -> None:
        self.fails = list(fails)
        self.asked: list[list[int]] = []
        self.version = "none"
        self.go: threading.Event | None = None  # samples wait for it

    def set_gates(self, alpha_LH: torch.Tensor) -> str:
        self.version = gate_version(alpha_LH)
        return self.version

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        self.asked.append(rows.numbers)
        limit = self.fails.pop(0) if self.fails else None
        for count, index in enumerate(reversed(range(len(rows.prompts)))):
            if count == limit:
                raise RuntimeError("out of memory")
            yield index, Sample([rows.numbers[index]], [-0.5], "stop", self.version)
            if self.go is not None:
                self.go.wait(20)


@contextmanager
def serving(*engines: Any) -> Iterator[list[RolloutServer]]:
    servers = [RolloutServer(("127.0.0.1", 0), engine, FACTS) for engine in engines]
    with ExitStack() as stack:
        yield [stack.enter_context(running(server)) for server in servers]


def url(server: Any) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def client_of(*servers: Any, gates: torch.Tensor = OFF, patience: float = 20.0) -> RolloutClient:
    client = RolloutClient([url(server) for server in servers], patience)
    client.set_gates(gates)
    return client


def tokens(client: RolloutClient) -> dict[int, list[int]]:
    found = list(client.sample(ROWS, SAMPLING, [2]))
    assert len(found) == len(dict(found))
    return {index: sample.token_ids for index, sample in found}


ALL = {row: [row] for row in range(5)}


# --- samples


def test_gates_that_may_be_half_set_are_set_again() -> None:
    engine = Scripted()
    stock = engine.set_gates
    tried = []

    def fail_half_way(alpha_LH: torch.Tensor) -> str:
        tried.append(stock(alpha_LH))
        if tried[-1] == gate_version(ON):
            raise RuntimeError("the prefix cache is in use")
        return tried[-1]

    engine.set_gates = fail_half_way  # type: ignore[method-assign]
    with serving(engine) as servers:
        assert tokens(client_of(*servers, gates=OFF)) == ALL
        with pytest.raises(ValueError, match="prefix cache"):
            tokens(client_of(*servers, gates=ON, patience=0.1))
        assert tokens(client_of(*servers, gates=OFF)) == ALL
    assert tried[0] == tried[-1] == gate_version(OFF)


@pytest.mark.parametrize("count", [1, 3])
def test_samples_over_http_are_the_engines(count: int) -> None:
    pytest.importorskip("peft")
    sizes = LocalSizes(2, 6)
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    engines = []
    for _ in range(count):
        engines.append(GatedHFEngine(make_tiny_model("llama"), sizes, pad_id=0, max_rows=2))
    with serving(*engines) as servers:
        client = client_of(*servers, gates=alpha)
        client.check(sizes, positions=64)
        found = dict(client.sample(ROWS, SAMPLING, [2]))
    expected = dict(engines[0].sample(ROWS, SAMPLING, [2]))
    assert sorted(found) == list(range(5))
    for index, sample in found.items():
        assert sample.token_ids == expected[index].token_ids
        assert sample.logprobs == pytest.approx(expected[index].logprobs, abs=1e-5)
        assert sample.version == client.version == gate_version(alpha)
    assert client.retries == 0
    if count == 1:
        assert found == expected  # floats are sent with all their digits


def test_a_chunk_that_fails_is_sampled_again() -> None:
    engine = Scripted(2, 0, 1)
    with serving(engine) as servers:
        client = client_of(*servers)
        assert tokens(client) == ALL
    assert engine.asked == [[0, 1, 2, 3, 4]] * 4
    assert client.retries == 3


def test_others_take_the_rows_of_a_server_that_fails() -> None:
    dead = Scripted(*[0] * 99)
    alive = Scripted()
    with serving(alive, dead) as servers:
        client = client_of(*servers, patience=0.1)
        assert tokens(client) == ALL
        assert tokens(client) == ALL
        asked = [number for numbers in alive.asked for number in numbers]
        assert sorted(asked) == sorted([*range(5)] * 2)


def test_a_server_that_comes_back_is_used_again() -> None:
    second = Scripted(0)
    with serving(Scripted(), second) as servers:
        client = client_of(*servers)
        deadline = time.monotonic() + 20
        while len(second.asked) < 2 and time.monotonic() < deadline:
            assert tokens(client) == ALL
    assert len(second.asked) > 1
    assert client.retries == 1


@pytest.mark.parametrize(("name", "value"), [("window", 7), ("model", "t"), ("model_files", "5f")])
def test_a_server_that_comes_back_with_another_engine_is_refused(name: str, value: Any) -> None:
    with serving(Scripted()) as (server,):
        client = client_of(server)
        client.check(LocalSizes(2, 6), positions=64)
        assert tokens(client) == ALL
        server.facts = replace(FACTS, model_files="6e")
        with pytest.raises(ValueError, match="from other files than the training"):
            client_of(server).check(LocalSizes(2, 6), positions=64, model_files="5f")
        server.facts = replace(FACTS, max_positions=65)
        assert tokens(client) == ALL
        server.facts = replace(FACTS, **{name: value})
        with pytest.raises(ValueError, match=f"another engine .{name} was .* and is now '?{value}"):
            tokens(client)


def test_samples_are_those_of_the_clients_gates() -> None:
    engine = Scripted()
    with serving(engine) as (server,):
        ours = client_of(server, gates=OFF)
        for client in (ours, client_of(server, gates=ON), ours):  # two runs share the server
            found = dict(client.sample(ROWS, SAMPLING, [2]))
            assert {sample.version for sample in found.values()} == {client.version}
        server.version = "none"  # as after a restart
        assert tokens(ours) == ALL
        assert ours.retries == 0
        # behind the server's back
        engine.version = "changed"
        with pytest.raises(ValueError, match="its gates are changed"):
            tokens(client_of(server, gates=OFF, patience=0.3))


def test_a_client_that_is_gone_frees_the_engine() -> None:
    engine = Scripted()
    engine.go = threading.Event()
    with serving(engine) as (server,):
        body = json.dumps({**REQUEST, "rows": TWO_ROWS}).encode()
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(raw("/sample", body))
            wait_until(lambda: engine.asked)
        engine.go.set()
        wait_until(lambda: not server.engine_lock.locked())
        assert tokens(client_of(server)) == ALL


# --- servers that do not answer


def test_the_patience_ends_when_all_servers_fail() -> None:
    with serving(Scripted(), Scripted()) as servers:
        pass
    client = client_of(*servers, patience=0.4)
    with pytest.raises(ValueError, match=r"ConnectionRefusedError.*rollout/serve_vllm"):
        tokens(client)
    assert client.retries >= 2
    with pytest.raises(ValueError, match="ConnectionRefusedError"):
        client.check(LocalSizes(2, 6), 10)
    with serving(Scripted()) as alive:
        assert tokens(client_of(*alive, *servers, patience=0.0)) == ALL


def test_the_patience_ends_when_all_servers_fail_on_the_same_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # while it has no rows, each of them answers that it works
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)
    failing = [Scripted(*[0] * 999), Scripted(*[0] * 999)]
    with serving(Scripted()) as dead:
        pass
    with serving(*failing) as servers, pytest.raises(ValueError, match="out of memory"):
        tokens(client_of(*servers, patience=0.3))
    # one chunk, which two hand to each other, beside a third server that is gone
    one = Rows(ROWS.prompts[:1], ROWS.numbers[:1], ROWS.rollout)
    with serving(*failing) as servers:
        client = client_of(*servers, *dead, patience=0.3)
        with pytest.raises(ValueError, match="has failed for 0 s"):
            list(client.sample(one, SAMPLING, [2]))
    assert client.retries < 100


def test_a_slow_engine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.5)
    engine = Scripted()
    engine.go = threading.Event()
    with serving(engine) as servers:
        client = client_of(*servers, patience=0.1)
        threading.Timer(1.2, engine.go.set).start()
        assert tokens(client) == ALL
    assert client.retries == 0  # longer than the silence, and not taken for dead


class _Silent(BaseHTTPRequestHandler):
    """Takes a request for samples and answers nothing; nor its health, unless it is given."""

    def do_GET(self) -> None:
        if self.server.health is None:  # type: ignore[attr-defined]
            self.server.hold.wait(20)  # type: ignore[attr-defined]
        self.answer(self.server.health)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.hold.wait(20)  # type: ignore[attr-defined]

    def answer(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def silence(health: Any) -> Iterator[Any]:
    silent: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    silent.hold = threading.Event()
    silent.health = health
    with running(silent):
        try:
            yield silent
        finally:
            silent.hold.set()


@pytest.mark.parametrize("health", [None, {"busy": False}, {}])
def test_a_server_that_does_not_work_on_a_request_counts_as_dead(
    health: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 0.5)
    with silence(health) as silent, serving(Scripted()) as alive:
        client = client_of(silent, *alive)
        assert tokens(client) == ALL
        assert client.retries == 1


@pytest.mark.parametrize("health", [{"busy": False}, "ok", []])
def test_another_server_than_ours_is_refused(health: Any) -> None:
    named = "is not a rollout server of this version"
    with silence(health) as other, pytest.raises(ValueError, match=named):
        client_of(other).check(LocalSizes(2, 6), 10)


def test_what_cannot_work_is_refused_at_once() -> None:
    with serving(Scripted()) as (server,):
        client = RolloutClient([url(server)])
        with pytest.raises(ValueError, match="set_gates"):
            tokens(client)
        client.set_gates(torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"gates \[3, 4\]"):
            tokens(client)
        with pytest.raises(ValueError, match="--sink 4 --window 6"):
            client.check(LocalSizes(4, 6), 10)
        with pytest.raises(ValueError, match="--max-positions 65"):
            client.check(LocalSizes(2, 6), 65)
        client.check(LocalSizes(2, 6), 64)
        assert client.retries == 0
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{server.server_port} .*--port"):
            RolloutServer(("127.0.0.1", server.server_port), Scripted(), FACTS)
    for address in ("http://[fd00::a]:8700", "http://[::1]"):
        RolloutClient([address])
    for address in ("localhost:8700", "http://host:port", "http://host:99999", "http://ho st:87"):
        with pytest.raises(ValueError, match=f"look like http://host:port, got '{address}'"):
            RolloutClient([address])
    assert SERVE.ServeConfig().host == "127.0.0.1"
    for option, value in (("--port", "65536"), ("--engine", "sglang")):
        with pytest.raises(ValueError, match=f"{option} '?{value}"):
            parse(SERVE.ServeConfig, arguments=[option, value])
    for kv_gib in (0, -1):
        with pytest.raises(ValueError, match=f"--kv-gib.* {kv_gib}"):
            SERVE.ServeConfig(kv_gib=kv_gib).check()


def test_the_tiny_model_can_be_served_by_transformers() -> None:
    config = SERVE.ServeConfig(
        engine="hf", model="tiny", sink=4, window=16, dtype="float32", max_rows=2
    )
    engine, facts = SERVE.load_engine(config)
    assert facts == EngineFacts("tiny", 4, 16, 1024, 4, 6, 313, files_digest("tiny"))
    for asked, positions in ((500, 500), (5000, 1024)):  # as the engine of vLLM
        _, facts = SERVE.load_engine(replace(config, max_positions=asked))
        assert facts.max_positions == positions
    alpha = torch.zeros(4, 6)
    assert engine.set_gates(alpha) == gate_version(alpha)
    samples = dict(engine.sample(ROWS, SAMPLING, [2]))
    assert {sample.version for sample in samples.values()} == {gate_version(alpha)}


# --- hostile requests: one sentence, nothing changed, and the server serves the next one

GATES = [[0.5] * 4] * 3
ONE_ROW = {"prompts": [[5, 6]], "numbers": [0], "rollout": 0}
TWO_ROWS = {"prompts": [[5], [6]], "numbers": [0, 1], "rollout": 0}
OPTIONS = {"max_new_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}
REQUEST = {"alpha": GATES, "rows": ONE_ROW, "sampling": OPTIONS, "eos_ids": [2]}
BODY = json.dumps(REQUEST).encode()
JSON = ["Content-Type: application/json"]


@pytest.fixture(scope="module")
def server() -> Iterator[RolloutServer]:
    with serving(Scripted()) as (running,):
        yield running


def send(server: RolloutServer, request: bytes) -> tuple[int, Any]:
    """Return the status and the JSON of the answer."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        answer = b""
        with suppress(ConnectionError):  # refused before all was sent
            connection.sendall(request)
        while more := connection.recv(1 << 16):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def raw(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *headers, *JSON, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def check_refused(server: RolloutServer, status: int, sentence: str, request: bytes) -> None:
    before = (server.version, list(server.engine.asked))
    found, answer = send(server, request)
    assert found == status, answer
    assert sentence in answer["error"]
    assert "\n" not in answer["error"]
    assert (server.version, server.engine.asked) == before
    assert send(server, raw("/health", b"", method="GET"))[0] == 200


def test_what_is_refused_below_is_right_otherwise(server: RolloutServer) -> None:
    status, answer = send(server, raw("/sample", BODY))
    assert status == 200
    assert [sample["token_ids"] for sample in answer["samples"]] == [[0]]
    assert server.version == gate_version(torch.tensor(GATES))


def gates(value: Any) -> dict[str, Any]:
    return {**REQUEST, "alpha": [[0.5] * 4, [0.5] * 4, [0.5] * 3 + [value]]}


def rows(**changed: Any) -> dict[str, Any]:
    return {**REQUEST, "rows": {**ONE_ROW, **changed}}


def sampling(**changed: Any) -> dict[str, Any]:
    return {**REQUEST, "sampling": {**OPTIONS, **changed}}


BODIES = [
    *[(gates(gate), "layer 2, head 3 is") for gate in (7.0, True, None, "1", 10**400)],
    *[({**REQUEST, "alpha": alpha}, "gates") for alpha in (None, [], [1], [[]], [GATES] * 3)],
    *[(body, "must be an object with") for body in (None, [], {}, {**REQUEST, "more": 1})],
    ({**REQUEST, "rows": {"prompts": []}}, "rows must be an object"),
    ({**REQUEST, "eos_ids": 2}, "eos_ids must be a list"),
    ({**REQUEST, "eos_ids": [128]}, "eos_ids is 128: it must be a whole"),
    (rows(prompts="\ud800"), "prompts must be a list"),
    (rows(prompts=["\ud800"]), "prompt 0 must be a list"),
    (rows(prompts=[[]]), "prompt 0 is empty"),
    *[(rows(prompts=[[5, token]]), "must be a whole number from 0 to 127")
      for token in (128, -1, 2**70, 5.0, True, None, "\ud800", [5])],
    (rows(prompts=[[5] * 56]), "56 tokens, which with max_new_tokens=9 exceeds"),
    (rows(numbers=[0, 1]), "1 prompts, but 2 row numbers"),
    (rows(numbers=[-1]), "numbers is -1"),
    (rows(rollout=2**31), "rollout is 2147483648"),
    (sampling(max_new_tokens=10**9), "max_new_tokens=1000000000 exceeds"),
    (sampling(max_new_tokens=True), "max_new_tokens is True"),
    (sampling(temperature="1"), "temperature, if not 0"),
    (sampling(seed="9" * 9999), "seed is"),
]  # fmt: skip
TEXTS = [
    (b"", "not JSON"),
    (b"\xff\xfe\x00", "not JSON"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"alpha": [[' + b"9" * 5000 + b"]]}", "not JSON"),
    (json.dumps(gates(float("nan"))).encode(), "is nan"),
    (json.dumps(gates("big")).replace('"big"', "1e999").encode(), "is inf"),
]
TEXTS += [(json.dumps(body).encode(), sentence) for body, sentence in BODIES]


@pytest.mark.parametrize(("body", "sentence"), TEXTS)
def test_bodies(server: RolloutServer, body: bytes, sentence: str) -> None:
    check_refused(server, 400, sentence, raw("/sample", body))


LENGTH = f"Content-Length: {len(BODY)}"
POST = "POST /sample HTTP/1.1"


@pytest.mark.parametrize(
    ("status", "sentence", "lines", "body"),
    [
        (415, "application/json", [POST, "Content-Type: text/plain", LENGTH], BODY),
        (415, "application/json", [POST, LENGTH], BODY),
        (403, "web pages", [POST, "Origin: http://127.0.0.1", *JSON, LENGTH], BODY),
        (403, "web pages", ["GET /health HTTP/1.1", "Origin: null"], b""),
        (403, "another name", [POST, "Host: rebound.example:8700", *JSON, LENGTH], BODY),
        (403, "another name", ["GET /health HTTP/1.1", "Host: [::1"], b""),
        (411, "Content-Length", [POST, *JSON], b""),
        (411, "Content-Length", [POST, *JSON, "Transfer-Encoding: chunked"], b"0\r\n\r\n"),
        *[(411, "Content-Length", [POST, *JSON, f"Content-Length: {length}"], BODY)
          for length in ("-1", "1_0", "")],
        (413, "may have", [POST, *JSON, f"Content-Length: {1 << 40}"], b" " * (1 << 20)),
        (413, "may have", [POST, *JSON, "Content-Length: " + "9" * 6000], BODY),
        (404, "/none", ["POST /none HTTP/1.1", *JSON, LENGTH], BODY),
        (404, "/metrics", ["GET /metrics HTTP/1.1"], b""),
        (501, "PUT", ["PUT /sample HTTP/1.1", *JSON, LENGTH], BODY),
        (431, "", ["GET /health HTTP/1.1", *(f"X-{n}: 1" for n in range(200))], b""),
        (414, "", ["GET /" + "a" * 70_000 + " HTTP/1.1"], b""),
    ],
)  # fmt: skip
def test_requests(
    server: RolloutServer, status: int, sentence: str, lines: list[str], body: bytes
) -> None:
    check_refused(server, status, sentence, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def test_a_silent_client_is_left(server: RolloutServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote._Handler, "timeout", 0.3)
    for part in (b"POST /sample HT", raw("/sample", BODY)[:-5]):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            connection.sendall(part)
            assert connection.recv(1) == b""


def test_a_request_that_trickles_in_is_ended(
    server: RolloutServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 0.3)
    asked = len(server.engine.asked)
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        with suppress(ConnectionError):  # the end may come between two bytes
            for byte in raw("/sample", BODY):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        with suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
    assert time.monotonic() - started < 0.02 * len(raw("/sample", BODY))
    assert len(server.engine.asked) == asked


def test_a_body_that_is_cut_off(server: RolloutServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(raw("/sample", BODY)[:-5])
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert b" 400 " in answer
    assert f"ends after {len(BODY) - 5} of {len(BODY)} bytes".encode() in answer
