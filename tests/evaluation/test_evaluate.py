"""rlkv-eval on the tiny model: files, methods, presets, refusals, agreement with other ways."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cli.app import CONFIGS, parse, read_config
from rlkv.cli.jobs import run_eval as evaluate
from rlkv.evaluation import sandbox
from rlkv.evaluation.evaluate import (
    EvalConfig,
    named_gates,
    number_for,
    parse_method,
    parse_methods,
)
from rlkv.evaluation.sandbox import SandboxError
from rlkv.evaluation.tasks.registry import find_tasks
from rlkv.eviction import H2O, RKV, RPC
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.options import CacheOptions
from rlkv.models.shape import ModelShape
from rlkv.utils.files import write_jsonl
from tests.helpers.families import make_family
from tests.helpers.gates import tiny_gates
from tests.helpers.infer import infer
from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.helpers.plain_decoding import decode

N = 12
TOKENS = 50
SMALL = ("--limit", "6", "--max-new-tokens", str(TOKENS), "--batch-size", "4")
METHODS = ("full", "mine@0.5", "mine@0.5+rkv@24:buffer=4", "mine@0.5+full:rkv@24:buffer=4")


@pytest.fixture(scope="module")
def gates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gates") / "gates.pt"
    tiny_gates().save(path)
    return path


def run(folder: Path, *more: str) -> dict[str, Any]:
    """The results of a small evaluation."""
    evaluate(["--output-dir", str(folder), *SMALL, *more])
    return json.loads((folder / "results.json").read_text())


def rows_file(folder: Path, method: str = "full") -> Path:
    return folder / "tiny" / method / "rows-0-of-1.jsonl"


@pytest.fixture(scope="module")
def evaluated(gates_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an evaluation of N problems, which lie in ``problems.jsonl``."""
    folder = tmp_path_factory.mktemp("evaluated")
    drawn = tiny.problems(N, seed=11, max_definitions=6)
    write_jsonl(folder / "problems.jsonl", drawn)
    options = ["--gates", f"mine={gates_file}", "--data", str(folder / "problems.jsonl")]
    run(folder / "eval", *options, "--methods", *METHODS, "--limit", str(N))
    return folder


def test_files_and_report(evaluated: Path) -> None:
    folder = evaluated / "eval"
    content = json.loads((folder / "results.json").read_text())
    results = content["results"]
    assert tuple(row["method"] for row in results) == METHODS
    assert all(row["n"] == N for row in results)
    assert results[0]["kv_bytes"] == results[0]["kv_bytes_full"]
    assert results[1]["kv_bytes"] < results[1]["kv_bytes_full"]
    difference = results[1]["accuracy"] - results[0]["accuracy"]
    assert results[1]["difference"] == pytest.approx(difference)
    config = content["config"]
    assert (config["sink"], config["window"], config["stop_repetitive"]) == (4, 16, False)
    for name in ("report.md", "report.html"):
        assert "mine+rkv@24:buffer=4" in (folder / name).read_text()
    assert (folder / "accuracy-tiny.png").read_bytes().startswith(b"\x89PNG")
    assert "](<accuracy-tiny.png>)" in (folder / "report.md").read_text()
    assert "data:image/png" in (folder / "report.html").read_text()


@pytest.mark.parametrize(("method", "suffix"), [("full", "_full"), ("mine@0.5", "")])
def test_every_problem_has_one_text_and_one_verdict(
    evaluated: Path, gates_file: Path, method: str, suffix: str
) -> None:
    output = evaluated / "answers.jsonl"
    problems = evaluated / "problems.jsonl"
    if not output.exists():
        options = ["--gates", gates_file, "--sparsity", "0.5", "--max-new-tokens", TOKENS]
        infer(*options, "--input", problems, "--output", output, "--compare-full")
    inferred = [json.loads(line) for line in output.read_text().splitlines()]
    lines = rows_file(evaluated / "eval", method).read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: int(row["key"].rpartition("/")[2]))
    assert len(rows) == len(inferred) == N
    names = {"text": "output", "correct": "correct", "finish_reason": "finish_reason"}
    for name, other in names.items():
        assert [row[name] for row in rows] == [row[other + suffix] for row in inferred]

    gates = HeadGates.load(gates_file)
    cache = CacheSettings(gates.deploy_sink, gates.deploy_window)
    allocation = HeadAllocation.from_gates(gates, 0.0 if suffix else 0.5)
    drawn = [json.loads(line) for line in problems.read_text().splitlines()]
    completions, correct = decode(*tiny.load(), drawn, allocation, cache, TOKENS, N)
    assert correct == [row["correct"] for row in rows]
    assert [each.token_ids for each in completions] == [row["token_ids"] for row in rows]
    assert 0 < sum(correct) < N, "a test of verdicts needs both"


def test_samples_and_early_stops_are_reported(tmp_path: Path) -> None:
    options = ["--num-samples", "3", "--temperature", "2.0", "--limit", "3", "--stop-repetitive"]
    found = run(tmp_path, *options, "--repetition", "8", "7")["results"][0]
    assert (found["n"], found["samples"], list(found["pass_at_k"])) == (3, 3, ["1", "2"])
    lines = rows_file(tmp_path).read_text().splitlines()
    ended = sum(json.loads(line)["finish_reason"] == "repetition" for line in lines)
    assert found["stopped_for_repetition"] == ended > 0


def test_rows_that_were_not_made_alike_are_named(tmp_path: Path) -> None:
    options = ["--limit", "2"]
    run(tmp_path, *options, "--methods", "full", "--batch-size", "1")
    assert "made alike" not in (tmp_path / "report.md").read_text()
    methods = ["--methods", "full", "random-heads@0.5"]
    run(tmp_path, *options, *methods, "--batch-size", "2")
    page = (tmp_path / "report.md").read_text()
    assert "made alike: seconds, in bfloat16 the tokens of texts, and verdicts of" in page
    assert ": tiny full; 2 texts at once" in page
    # a file that is continued otherwise is named with both
    file = rows_file(tmp_path)
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    run(tmp_path, *options, *methods, "--batch-size", "2")
    page = (tmp_path / "report.md").read_text()
    assert re.search(r"1 texts at once[^;]*: tiny full; 2 texts[^;]*: tiny full, tiny rand", page)


def test_where_programs_run_is_said_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "mbpp_test.jsonl"
    folder = tmp_path / "out"
    data.write_text('{"prompt": "Add.", "test": ["assert f(3) == 4"], "code": ""}')
    options = ["--tasks", "mbpp", "--data", str(data)]

    def fail() -> None:
        raise SandboxError("install bubblewrap")

    monkeypatch.setattr(sandbox, "find_isolation", fail)
    with pytest.raises(ValueError, match="install bubblewrap"):
        run(folder, *options)
    assert not folder.exists()
    monkeypatch.setattr(sandbox, "find_isolation", lambda: (sandbox.Isolation(), "a box"))
    assert run(folder, *options)["config"]["sandbox"] == "a box"
    assert "Programs were shut in by a box." in (folder / "report.md").read_text()


@pytest.mark.parametrize("name", ["llama8b", "qwen7b", "qwen3_4b", "tiny"])
def test_the_example_configs(name: str) -> None:
    config = parse(EvalConfig, arguments=["--config", f"eval_{name}", "--output-dir", "out"])
    assert config.batch_size == (50 if name == "tiny" else 16)
    assert config.stop_repetitive is not (name == "tiny")
    rankings = [item.partition("=")[0] for item in config.gates]
    methods = parse_methods(config.methods, rankings)
    assert {m.ranking for m in methods} == {None, "random-heads", *rankings}
    assert find_tasks(config.tasks, None)
    if name != "tiny":  # they evaluate what the training writes
        trained = read_config(CONFIGS / f"{name}.yaml")
        assert config.gates[0] == f"rlkv={trained['output_dir']}/gates.pt"
        assert (config.model, config.sink) == (trained["model"], trained["deploy_sink"])


def test_sizes_come_from_the_gates(gates_file: Path) -> None:
    gates = HeadGates.load(gates_file)
    other = replace(gates, deploy_sink=16, deploy_window=64, deploy_protect_prompt=True)

    def settings(*given: HeadGates, policy: Any = None, **options: Any) -> CacheSettings:
        return CacheOptions(**options).cache_settings(dict(zip("ab", given, strict=False)), policy)

    assert settings() == CacheSettings(16, 64)
    assert settings(gates) == CacheSettings(4, 16)
    assert settings(gates, sink=8, prefill="local") == CacheSettings(8, 16, "local")
    assert settings(other) == CacheSettings(16, 64, protect_prompt=True)
    assert not settings(other, protect_prompt=False).protect_prompt
    assert settings(gates, other, sink=8, window=32, protect_prompt=True).protect_prompt
    # a policy has a field of its own
    assert not settings(other, policy=RKV(budget=64)).protect_prompt
    for options, message in (
        ({"sink": 8, "protect_prompt": True}, r"window.*a 16, b 64.*--window"),
        ({"sink": 8, "window": 32}, r"protect_prompt.*a False, b True.*--protect-prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(gates, other, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "random-heads@0.5", "random-heads@0.50"], "--methods.*'random-heads@0.50'"),
        (["--methods", "full", "random-heads@0.99+full:rkv@40"], "but none is full"),
        (["--baseline", "mine"], "--baseline 'mine' is not among the methods: choose from full"),
        (["--tasks"], "--tasks is empty"),
        (["--max-new-tokens", "tiny=5000"], "the longest prompt of tiny has"),
        (["--methods"], "--methods is empty"),
        (["--preset"], "there is no preset"),
        (["--num-samples", "4"], "greedy"),
        (["--limit", "0"], "--limit"),
        (["--config", "absent.yaml"], "--config .*absent.yaml"),
        (["--preset", "rlvk"], "'rlvk'.*modern, rkv, rlkv, rpc"),
        (["--num-samples", "0"], "--num-samples 0"),
        (["--num-samples", "four"], "--num-samples four"),
        (["--num-samples", "4", "2"], "--num-samples 4 2"),
        (["--num-samples", "4", "tiny=2", "tiny=3"], "'tiny=3'"),
        (["--num-samples", "tinny=2"], "'tinny'"),
        (["--max-new-tokens", "tiny=-1"], "'tiny=-1'"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(["--output-dir", str(tmp_path), *arguments])
    assert not any(tmp_path.iterdir()), "nothing is written"


def test_a_model_that_cannot_be_compressed_is_refused_before_any_text(tmp_path: Path) -> None:
    make_family("diffllama", max_position_embeddings=512).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    methods = ("--methods", "full", "random-heads@0.5", "--model", str(tmp_path / "model"))
    with pytest.raises(ValueError, match="compute with the keys and values"):
        run(tmp_path / "eval", *methods)
    assert not (tmp_path / "eval").exists()


# --- methods


@pytest.mark.parametrize(
    ("name", "ranking", "sparsity", "policy"),
    [
        ("full", None, None, None),
        ("rlkv@0.5", "rlkv", 0.5, None),
        ("random-heads@0.25", "random-heads", 0.25, None),
        ("rkv@ratio=0.5", None, None, RKV(ratio=0.5)),
        ("rkv@256:variant=published", None, None, RKV(budget=256, variant="published")),
        ("rpc@", None, None, RPC()),
        ("rpc", None, None, RPC()),
        ("rlkv@0.5+h2o@128", "rlkv", 0.5, H2O(budget=128)),
        ("h2o@128+duo@0.4", "duo", 0.4, H2O(budget=128)),
    ],
)
def test_names(name: str, ranking: str | None, sparsity: float | None, policy: Any) -> None:
    method = parse_method(name, ["rlkv", "duo"])
    assert (method.ranking, method.sparsity, method.policy) == (ranking, sparsity, policy)
    assert method.evict_from == "compressible"


def test_a_policy_of_the_full_heads() -> None:
    method = parse_method("rlkv@0.5+full:h2o@128", ["rlkv"])
    kept = method.cache(CacheSettings(4, 16, protect_prompt=True))
    assert kept == CacheSettings(4, 16, "full", H2O(budget=128), True, "full")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is not understood"),
        ("foo@0.5", "of full, rlkv, random-heads, .*sink_window"),
        ("rlkv", "'rlkv'.*rlkv@0.5"),
        ("rlkv@x", "'rlkv@x'"),
        ("rlkv@1.5", "sparsity 1.5"),
        ("rkv@2.5", "'rkv@2.5'"),
        ("rkv@256:size=3", "no option size"),
        ("rlkv@0.5+rlkv@0.4", "is not understood"),
        ("rkv@64+h2o@64", "is not understood"),
        ("full:rkv@64", "names no heads: write HEADS@SPARSITY.full:rkv@64, or rkv@64 to evict"),
        ("full:rlkv@0.5", "is not understood"),
    ],
)
def test_what_is_no_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(name, ["rlkv"])


def test_allocations() -> None:
    config = make_tiny_model("llama").config
    alpha = torch.linspace(0, 1, 12).view(3, 4)
    shape = ModelShape.from_config(config)
    gates = {"rlkv": HeadGates(alpha, model=shape), "duo": HeadGates(1 - alpha)}

    def full(name: str) -> torch.Tensor:
        return parse_method(name, list(gates)).allocation(config, gates, seed=3).full

    assert full("full").all()
    assert not full("rkv@64").any()
    assert full("rlkv@0.5").flatten().tolist() == [False] * 6 + [True] * 6
    assert full("duo@0.5+rkv@64").flatten().tolist() == [True] * 6 + [False] * 6
    assert full("random-heads@0.5").sum() == 6
    assert torch.equal(full("random-heads@0.5"), full("random-heads@0.5"))
    other = {"rlkv": HeadGates(torch.ones(2, 4))}
    with pytest.raises(ValueError, match="gates are for a model with 2 layers x 4 KV heads"):
        parse_method("rlkv@0.5", ["rlkv"]).allocation(config, other, seed=0)


def test_names_of_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lr=0.1" / "gates.tsv"
    file.parent.mkdir()
    HeadGates(torch.rand(2, 3, generator=torch.Generator().manual_seed(0))).save(file)
    assert list(named_gates([f"a b={file}", str(file)])) == ["a b", "gates"]
    for name in ("", " ", "a/b", "a+b", "a@0.5", "a,b", "a:b"):
        with pytest.raises(ValueError, match=re.escape(f"--gates: {name!r}")):
            named_gates([f"{name}=gates.tsv"])
    monkeypatch.chdir(file.parent)  # where an empty name would stand for this folder
    with pytest.raises(ValueError, match="'rlkv=' names no file"):
        named_gates(["rlkv="])


# --- presets


def config(*arguments: str) -> EvalConfig:
    return parse(EvalConfig, arguments=["--output-dir", "out", *arguments])


MODERN = {
    "math500": 2,
    "gpqa_diamond": 4,
    "livecodebench:medium": 4,
    "aime25": 16,
    "aime26": 16,
    "hmmt25": 16,
}


def test_a_level_of_a_task_has_the_number_of_the_task() -> None:
    values = ["1", "aime24=8", "livecodebench=4", "mmlu_pro:law=2", "longreason=3"]
    names = ("livecodebench:medium", "livecodebench", "mmlu_pro:law", "longreason:8k", "gsm8k")
    assert [number_for(name, values, "--num-samples") for name in names] == [4, 4, 2, 3, 1]


@pytest.mark.parametrize(
    ("preset", "samples", "limits"),
    [
        ("rlkv", {"gsm8k": 1}, {"gsm8k": 8192, "aime24": 16384, "mmlu_pro:law": 8192}),
        ("rkv", {"math500": 64, "aime24": 64}, {"math500": 16384, "aime24": 32768}),
        ("rpc", {"aime24": 8, "livecodebench": 4, "ifeval": 1}, {"aime24": 32768}),
        ("modern", MODERN, {"math500": 32768, "hmmt25": 32768}),
    ],
)
def test_presets(preset: str, samples: dict[str, int], limits: dict[str, int]) -> None:
    found = config("--preset", preset)
    tasks = {task.name: task for task in find_tasks(found.tasks, None)}
    assert preset == "rlkv" or tasks.keys() == samples.keys()
    assert {name: found.samples_of(tasks[name]) for name in samples} == samples
    assert {name: found.token_limit(tasks[name]) for name in limits} == limits
    is_own = preset == "rlkv"
    assert (found.temperature, found.top_p) == ((0.0, 1.0) if is_own else (0.6, 0.95))
    assert (found.prefill, found.stop_repetitive) == (
        ("published", True) if is_own else ("full", False)
    )
    built_in = config("--preset", preset, "--tasks", "tiny", "smol")
    limits_of = [built_in.token_limit(task) for task in find_tasks(built_in.tasks, None)]
    assert limits_of == [440, 448]


def test_the_command_line_comes_before_the_config_and_the_config_before_the_preset(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: rkv\ntemperature: 1.0\nnum_samples: 8\n")
    found = config("--config", str(file))
    assert found.tasks == ("math500", "aime24")
    assert (found.temperature, found.num_samples) == (1.0, ("8",))
    found = config("--config", str(file), "--preset", "modern", "--num-samples", "2")
    assert (found.tasks[1], found.temperature, found.num_samples) == ("gpqa_diamond", 1.0, ("2",))
    found = config("--config", "eval_llama8b", "--preset", "modern")
    assert (found.temperature, found.stop_repetitive, found.methods[1]) == (0.6, False, "rlkv@0.2")
    file.write_text("method: full\n")
    with pytest.raises(ValueError, match=r"mine.yaml.* method:"):
        config("--config", str(file))
