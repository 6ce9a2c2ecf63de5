"""Rollout servers and their client: samples over HTTP, other gates, broken connections, servers
gone or silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rlkv.attention import LocalSizes
from rlkv.cli.app import parse
from rlkv.rollout import remote as connection
from rlkv.rollout.base import EngineFacts, Rows, Sample, SamplingParams, gate_version
from rlkv.rollout.hf import GatedHFEngine
from rlkv.rollout.remote import RolloutClient, RolloutServer
from tests.helpers.models import make_tiny_model
from tests.helpers.programs import load_program

SERVE = load_program("rollout/serve_vllm.py")
FACTS = EngineFacts("tiny", 2, 6, 64, 3, 4, 128)
SAMPLING = SamplingParams(9, temperature=1.0, seed=3)
ROWS = Rows([[5, 6, 7], [9] * 11, [30, 31], [12], [40, 50]], list(range(5)), rollout=2)


@contextmanager
def serving(engine: object) -> Iterator[tuple[RolloutServer, str]]:
    with RolloutServer(("127.0.0.1", 0), engine, FACTS) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def make_client(*urls: str, patience: float = 20.0) -> RolloutClient:
    return RolloutClient(urls, patience)


class Scripted:
    """An engine that gives row r the token r, and breaks off after so many samples of each request."""

    def __init__(self, breaks: list[int | None]) -> None:
        self.breaks, self.asked, self.version = breaks, [], "none"

    def set_gates(self, alpha_LH: torch.Tensor) -> str:
        self.version = gate_version(alpha_LH)
        return self.version

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        self.asked.append(rows.numbers)
        limit = self.breaks.pop(0) if self.breaks else None
        for count, index in enumerate(reversed(range(len(rows.prompts)))):
            if count == limit:
                raise RuntimeError("out of memory")
            yield index, Sample([rows.numbers[index]], [-0.5], "stop", self.version)


def test_samples_over_http_are_the_engines() -> None:
    sizes, alpha = LocalSizes(2, 6), torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    engine = GatedHFEngine(make_tiny_model("llama"), sizes, pad_id=0, max_rows=2)
    with serving(engine) as (_, url):
        client = make_client(url)
        client.check(sizes, positions=64)
        assert client.facts(client.servers[0]) == FACTS
        version = client.set_gates(alpha)
        found = dict(client.sample(ROWS, SAMPLING, [2]))
    engine.set_gates(alpha)
    assert found == dict(
        engine.sample(ROWS, SAMPLING, [2])
    )  # floats are sent with all their digits
    assert {sample.version for sample in found.values()} == {version} == {gate_version(alpha)}
    assert client.retries == 0


def test_a_failing_engine_is_asked_for_the_missing_rows_only() -> None:
    engine = Scripted([2, 0, 1])
    with serving(engine) as (_, url):
        client = make_client(url)
        client.set_gates(torch.ones(3, 4))
        found = dict(client.sample(ROWS, SAMPLING, [2]))
    assert {index: sample.token_ids for index, sample in found.items()} == {
        i: [i] for i in range(5)
    }
    assert engine.asked == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1, 2], [0, 1]]
    assert client.retries == 3


def test_samples_of_other_gates_are_thrown_away(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Scripted([])
    with serving(engine) as (server, url):
        ours, theirs = make_client(url), make_client(url)
        version = ours.set_gates(torch.zeros(3, 4))
        theirs.set_gates(torch.ones(3, 4))
        for client in (ours, theirs):  # another run takes the server
            dict(client.sample(ROWS, SAMPLING, [2]))
        found = dict(ours.sample(ROWS, SAMPLING, [2]))
        assert server.version == version
        assert {sample.version for sample in found.values()} == {version}
        assert (ours.retries, len(found)) == (1, 5)
        assert f"its gates are {theirs.version}, not {version}" in capsys.readouterr().out
        engine.version = (
            "changed"  # behind the server's back, between its look at the version and the samples
        )
        engine.set_gates = lambda alpha_LH: version
        impatient = make_client(url, patience=0.3)
        impatient.set_gates(torch.zeros(3, 4))
        with pytest.raises(ValueError, match="its gates"):
            dict(impatient.sample(ROWS, SAMPLING, [2]))


class Slow(Scripted):
    """Needs longer than the patience for a sample before it breaks off."""

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int]
    ) -> Iterator[tuple[int, Sample]]:
        if self.breaks:
            time.sleep(0.6)
        yield from super().sample(rows, sampling, eos_ids)


def test_the_patience_begins_with_the_failure() -> None:
    with serving(Slow([0])) as (_, url):
        client = make_client(url, patience=0.5)
        client.set_gates(torch.zeros(3, 4))
        assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5
        assert client.retries == 1


def test_a_server_without_gates_is_sent_them_again() -> None:
    with serving(Scripted([])) as (server, url):
        client = make_client(url)
        version = client.set_gates(torch.zeros(3, 4))
        server.version = "none"  # as after a restart
        assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5
        assert server.version == version


def test_a_server_that_is_gone_is_named_after_the_patience() -> None:
    with serving(Scripted([])) as (_, url):
        pass
    client = make_client(url, patience=0.4)
    client.set_gates(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"ConnectionRefusedError.*rollout/serve_vllm"):
        dict(client.sample(ROWS, SAMPLING, [2]))
    assert client.retries >= 2


class _Silent(BaseHTTPRequestHandler):
    """Takes a request and answers nothing at first; later ones go to a real server's handler."""

    silent = 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"alpha" not in body and _Silent.silent:
            _Silent.silent -= 1
            self.server.hold.wait(20)  # type: ignore[attr-defined]
            return
        self.send_response(200)
        self.end_headers()
        version = gate_version(torch.ones(3, 4))
        if b"alpha" in body:
            answer = f'{{"version": "{version}"}}\n'
        else:
            line = (
                '{{"index": {}, "token_ids": [{}], "logprobs": [0], "finish_reason": "stop", '
                '"version": "{}"}}\n'
            )
            answer = "\n".join(line.format(i, i, version) for i in range(5)) + '{"done": 5}\n'
        self.wfile.write(answer.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_silent_server_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Silent) as server:
        server.hold = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        client = make_client(f"http://127.0.0.1:{server.server_port}")
        client.set_gates(torch.ones(3, 4))
        assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5
        assert client.retries == 1
        server.hold.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def test_heartbeats_keep_a_slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkv.rollout.remote.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(connection, "SILENCE", 0.5)
    engine, go = Scripted([]), threading.Event()
    quick = engine.sample
    engine.sample = lambda *args: (go.wait(1.2), (yield from quick(*args)))[1]
    with serving(engine) as (_, url):
        client = make_client(url)
        client.set_gates(torch.ones(3, 4))
        assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5
    assert client.retries == 0  # more than twice the silence, and not taken for dead


def test_what_cannot_work_is_refused_at_once() -> None:
    engine = GatedHFEngine(make_tiny_model("llama"), LocalSizes(2, 6), pad_id=0)
    with serving(engine) as (_, url):
        client = make_client(url)
        with pytest.raises(ValueError, match="set_gates"):
            dict(client.sample(ROWS, SAMPLING, [2]))
        client.set_gates(torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"gates \[3, 4\].*\[2, 2\]"):
            dict(client.sample(ROWS, SAMPLING, [2]))
        with pytest.raises(ValueError, match="--sink 4 --window 6"):
            client.check(LocalSizes(4, 6), 10)
        with pytest.raises(ValueError, match="--max-positions 65"):
            client.check(LocalSizes(2, 6), 65)
        with pytest.raises(ValueError, match="eos_ids"):
            next(client.servers[0].lines("POST", "/sample", {"version": "x"}))
        with pytest.raises(ValueError, match="/metrics"):
            next(client.servers[0].lines("GET", "/metrics"))
        assert client.retries == 0
    with pytest.raises(ValueError, match="http://host:port"):
        RolloutClient(["localhost:8700"])


@contextmanager
def serving_all(*engines: object) -> Iterator[list[tuple[RolloutServer, str]]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(engine)) for engine in engines]


def test_rows_are_dealt_to_several_servers() -> None:
    sizes, alpha = LocalSizes(2, 6), torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    engines = [
        GatedHFEngine(make_tiny_model("llama"), sizes, pad_id=0, max_rows=rows)
        for rows in (1, 2, 3)
    ]
    with serving_all(*engines) as served:
        client = make_client(*(url for _, url in served))
        client.check(sizes, positions=64)
        client.set_gates(alpha)
        found = dict(client.sample(ROWS, SAMPLING, [2]))
    expected = dict(engines[0].sample(ROWS, SAMPLING, [2]))
    assert {i: sample.token_ids for i, sample in found.items()} == {
        i: s.token_ids for i, s in expected.items()
    }
    assert [found[i].source for i in range(5)] == [0, 1, 2, 0, 1]
    assert client.retries == 0


def test_others_take_the_rows_of_a_server_that_dies() -> None:
    alive, dead = Scripted([]), Scripted([1, 0, 0, 0, 0, 0])
    with serving_all(alive, dead) as served:
        client = make_client(*(url for _, url in served), patience=0.1)
        client.set_gates(torch.zeros(3, 4))
        found = dict(client.sample(ROWS, SAMPLING, [2]))
        assert {i: sample.token_ids for i, sample in found.items()} == {i: [i] for i in range(5)}
        assert alive.asked[0] == [0, 2, 4]
        assert dead.asked[0] == [1, 3]
        assert [sample.source for _, sample in sorted(found.items())] == [0, 0, 0, 1, 0]
        asked = len(dead.asked)
        dict(client.sample(ROWS, SAMPLING, [2]))  # the next rollout does not wait for it
        assert (alive.asked[-1], len(dead.asked)) == ([0, 1, 2, 3, 4], asked)


def test_a_server_that_comes_back_is_used_again() -> None:
    first, second = Scripted([]), Scripted([0])
    with serving_all(first, second) as served:
        client = make_client(*(url for _, url in served))
        client.set_gates(torch.zeros(3, 4))
        while not (len(second.asked) > 1 and second.asked[-1] == [1, 3]):
            assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5
        assert client.retries == 1


def test_the_patience_ends_when_all_servers_fail() -> None:
    with serving_all(Scripted([]), Scripted([])) as served:
        urls = [url for _, url in served]
    client = make_client(*urls, patience=0.4)
    client.set_gates(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="ConnectionRefusedError"):
        dict(client.sample(ROWS, SAMPLING, [2]))
    with serving(Scripted([])) as (_, url):
        client = make_client(url, *urls, patience=0.0)
        client.set_gates(torch.zeros(3, 4))
        assert len(dict(client.sample(ROWS, SAMPLING, [2]))) == 5


def test_a_taken_port_and_an_unknown_engine_are_named() -> None:
    with (
        serving(Scripted([])) as (server, _),
        pytest.raises(ValueError, match=rf"127\.0\.0\.1:{server.server_port} .*--port"),
    ):
        RolloutServer(("127.0.0.1", server.server_port), Scripted([]), FACTS)
    with pytest.raises(ValueError, match="--engine 'sglang'"):
        parse(SERVE.ServeConfig, arguments=["--engine", "sglang"])


def test_the_tiny_model_can_be_served_by_transformers() -> None:
    config = SERVE.ServeConfig(
        engine="hf", model="tiny", sink=4, window=16, dtype="float32", max_rows=2
    )
    engine, facts = SERVE.load_engine(config)
    assert facts == EngineFacts("tiny", 4, 16, 1024, 4, 6, 313)
    alpha = torch.zeros(4, 6)
    assert engine.set_gates(alpha) == gate_version(alpha)
    samples = dict(engine.sample(ROWS, SAMPLING, [2]))
    assert sorted(samples) == [0, 1, 2, 3, 4]
    assert {sample.version for sample in samples.values()} == {gate_version(alpha)}
