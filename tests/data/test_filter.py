"""The filter job on recorded outputs and random tiny models: files, shards, engines, refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

from rlkv.cli.app import CONFIGS, parse
from rlkv.data import filter as filter_job
from rlkv.data.curriculum import COLUMNS, CURRICULUM, curriculum_folder
from rlkv.data.filter import (
    FilterConfig,
    decode_outputs,
    judge,
    parse_shard,
    run_filter,
    sized_and_announced,
)
from rlkv.data.problems import Problem, other_models, read_curriculum
from rlkv.models.shape import PUBLISHED, short_name
from rlkv.rollout.base import Completion, FinishReason, RolloutEngine
from rlkv.rollout.footprint import GIB
from rlkv.tiny import draw_problem
from rlkv.training.solutions import read_traces
from rlkv.utils.files import read_log
from rlkv.utils.runtime import library_facts
from rlkv.verifier import Verifier
from tests.helpers.installed import CPU_BUILD, pretend_vllm
from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.helpers.programs import run_program

PROGRAM = "data_prep/filter_deepscaler.py"
BUCKETS = ("0-64:4", "64-128:50")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 solved tiny problems: every 5th output is wrong, two have no answer."""
    rng = random.Random(0)
    rows = []
    for i in range(40):
        drawn = draw_problem(rng, rng.randint(3, 12))
        answer = drawn.answer if i % 5 else str((int(drawn.answer) + 1) % 10)
        output = drawn.solution if i not in (7, 8) else "I do not know ."
        rows.append({"problem": drawn.problem, "answer": answer, "output": output})
    return write(tmp_path_factory.mktemp("recorded") / "outputs.jsonl", rows)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, model_folder: str, recorded: str
) -> tuple[Path, dict[str, Any]]:
    """Folder and report of the job on all recorded outputs."""
    folder = tmp_path_factory.mktemp("whole")
    report = run_filter(job(folder, model_folder, recorded)).report
    assert report is not None
    return folder, report


def job(folder: Path, model: str, recorded: str | None, **other: Any) -> FilterConfig:
    options = {"outputs": recorded, "max_new_tokens": 150, "buckets": BUCKETS, **other}
    return FilterConfig(output_dir=str(folder), model=model, **options)


def test_recorded_outputs(whole: tuple[Path, dict[str, Any]], recorded: str) -> None:
    folder, report = whole
    rows = read_log(Path(recorded))
    tokenizer = build_tokenizer()
    lengths = [len(tokenizer(r["output"], add_special_tokens=False).input_ids) + 1 for r in rows]
    solved = [i for i in range(40) if i % 5 and i not in (7, 8) and lengths[i] <= 150]
    statuses = ("correct", "wrong", "truncated", "unparsable")
    wrong = sum(n <= 150 for n in lengths[::5])
    truncated = sum(n > 150 for n in lengths)
    assert [report[name] for name in statuses] == [len(solved), wrong, truncated, 2]
    assert report["loaded"] == 40 == sum(report[name] for name in statuses)
    assert truncated > 0
    long_ones = [i for i in solved if 64 < lengths[i] <= 128]
    first, second = report["buckets"]
    assert (first["available"], first["taken"]) == (sum(lengths[i] <= 64 for i in solved), 4)
    assert (second["available"], second["taken"]) == (len(long_ones), len(long_ones))
    assert report["outside_buckets"] == sum(lengths[i] > 128 for i in solved)
    assert any("64-128 is short: 50 wanted" in note for note in report["notes"])

    curriculum = read_log(folder / "curriculum.jsonl")
    assert len(curriculum) == report["selected"] == 4 + len(long_ones)
    by_problem = {r["problem"]: (r, n) for r, n in zip(rows, lengths, strict=True)}
    for row in curriculum:
        source, length = by_problem[row["problem"]]
        assert (row["output"], row["answer"]) == (source["output"], source["answer"])
        assert row["output_tokens"] == length
        assert row["model"] is None  # recorded outputs may come from any
    assert Counter(r["bucket"] for r in curriculum) == {"0-64": 4, "64-128": len(long_ones)}
    table = pyarrow.parquet.read_table(folder / "curriculum.parquet")
    assert table.to_pylist() == curriculum
    markdown = (folder / "report.md").read_text()
    assert f"| 64 < n <= 128 | 50 | {len(long_ones)} | {len(long_ones)} | 0 |" in markdown


def test_rebucketing_decodes_nothing(tmp_path: Path, model_folder: str, recorded: str) -> None:
    run_filter(job(tmp_path, model_folder, recorded))
    shard = next((tmp_path / "shards").glob("*.jsonl"))
    before = shard.read_bytes()
    other = job(tmp_path, model_folder, recorded, buckets=("0-64:3", "64-128:2"), seed=1)
    report = run_filter(other).report
    assert report is not None
    assert report["selected"] == 5
    assert shard.read_bytes() == before
    with pytest.raises(ValueError, match=r"max_new_tokens.*150.*160"):
        run_filter(job(tmp_path, model_folder, recorded, max_new_tokens=160))
    with pytest.raises(ValueError, match=r"problems.*'40 .*'10 "):
        run_filter(job(tmp_path, model_folder, recorded, limit=10))


def test_shards_merge_to_the_same_files(
    tmp_path: Path, model_folder: str, recorded: str, whole: tuple[Path, dict[str, Any]]
) -> None:
    def shard(name: str) -> filter_job.FilterResult:
        return run_filter(job(tmp_path, model_folder, recorded, shard=name))

    assert shard("2/3").open_shards == {0: 14, 1: 13}
    file = tmp_path / "shards" / "shard-2-of-3.jsonl"
    file.write_bytes(file.read_bytes()[:-20])  # as a kill leaves it
    assert shard("0/2").open_shards == {1: 14}  # another number of shards goes on from these
    assert not (tmp_path / "report.json").exists()
    merged = shard("0/1").report
    assert merged is not None
    lines = [line for path in tmp_path.glob("shards/*.jsonl") for line in path.open()]
    assert len([line for line in lines if line.endswith("}\n")]) == 40  # nothing was done twice
    folder, report = whole
    for name in CURRICULUM:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    volatile = {"config", "seconds", "finished", "command"}
    assert all(merged[name] == report[name] for name in report.keys() - volatile)


def test_a_model_that_solves_nothing_ends_well(tmp_path: Path, model_folder: str) -> None:
    rows = [{"problem": "find x ? " * n, "answer": "5"} for n in (1, 2, 3, 200)]
    rows.append({"problem": "b ?", "answer": ""})
    problems = write(tmp_path / "problems.jsonl", rows)
    sizes = {"max_new_tokens": 16, "batch_size": 2, "buckets": ("0-8:2",)}
    report = run_filter(job(tmp_path / "out", model_folder, None, input=problems, **sizes)).report
    assert report is not None
    assert (report["skipped"], report["no_answer"], report["correct"]) == (1, 1, 0)
    assert report["truncated"] + report["unparsable"] + report["wrong"] == 3
    assert report["notes"][0].startswith("None of the 5 problems was solved: the curriculum is")
    table = pyarrow.parquet.read_table(tmp_path / "out" / "curriculum.parquet")
    assert (table.num_rows, tuple(table.column_names)) == (0, COLUMNS)


@pytest.mark.parametrize(("mark", "solved"), [("#### ", 3), ("Answer 3*24, that is ", 0)])
def test_answers_in_the_form_of_gsm8k_are_read_and_others_are_hinted_at(
    tmp_path: Path, model_folder: str, mark: str, solved: int
) -> None:
    rows = []
    for n in (1, 2, 3):
        answer = f"24 each.\n{mark}72"
        rows.append({"problem": "p ? " * n, "answer": answer, "output": r"\boxed{72}"})
    outputs = write(tmp_path / "outputs.jsonl", rows)
    report = run_filter(job(tmp_path / "out", model_folder, outputs)).report
    assert report is not None
    assert report["correct"] == solved
    hints = [note for note in report["notes"] if "holds the answer alone" in note]
    assert len(hints) == (0 if solved else 1)
    assert solved or "that is 72" in hints[0]


def test_repeated_problems_take_their_outputs_in_order(tmp_path: Path, model_folder: str) -> None:
    rows = [{"problem": "p", "answer": "1", "text": rf"\boxed{{{i}}}"} for i in (1, 2)]
    outputs = write(tmp_path / "outputs.jsonl", rows)
    problems = write(tmp_path / "problems.jsonl", 3 * [{"problem": "p", "answer": "1"}])
    config = job(tmp_path / "out", model_folder, outputs, input=problems, outputs_field="text")
    report = run_filter(config).report
    assert report is not None
    assert (report["correct"], report["wrong"], report["missing"]) == (1, 1, 1)
    (row,) = read_curriculum(tmp_path / "out" / "curriculum.jsonl")
    assert row["template"] is None


def test_jobs_that_cannot_be_done(tmp_path: Path, model_folder: str, recorded: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": 5000}, r"max_new_tokens 5000.*128"),
        ({"shard": "0/4"}, "0/4.*3 problems"),
        ({"outputs": recorded}, r"outputs\.jsonl"),  # of other problems
    ]
    for options, message in cases:
        config = job(tmp_path / "out", model_folder, None, input="tiny", num_problems=3, **options)
        with pytest.raises(ValueError, match=message):
            run_filter(config)
    assert not list(tmp_path.rglob("*"))


def test_defaults_and_yaml(tmp_path: Path) -> None:
    paper = FilterConfig().resolved()
    assert paper.model == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert paper.input == "agentica-org/DeepScaleR-Preview-Dataset"
    assert (paper.max_length, paper.max_new_tokens) == (8192, 7168)
    assert paper.buckets == ("0-2000:600", "2000-4000:600", "4000-6000:1000", "6000-8000:800")
    tiny = FilterConfig(model="tiny", max_length=99).resolved()
    assert (tiny.input, tiny.max_length, tiny.max_new_tokens) == ("tiny", 99, 440)
    listed = tmp_path / "listed.yaml"
    listed.write_text("model: tiny\nbuckets:\n  - 0-5:1\n  - 5-9:2\n")
    assert parse(FilterConfig, arguments=["--config", str(listed)]).buckets == ("0-5:1", "5-9:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size"),
        (["--kv-gib", "0"], "kv-gib.* 0"),
        (["--buckets", "5"], "bucket '5'"),
        (["--engine", "sglang"], "--engine 'sglang'"),
        (["--template", "some"], "unknown prompt template 'some'"),
        (["--outputs-field", "text"], "--outputs-field is a field of --outputs, which is missing"),
        *[(["--shard", bad], "shard") for bad in ("4/4", "1", "a/b", "0/0", "")],
        pytest.param(
            ["--engine", "vllm"],
            r"vLLM is not installed: pip install 'rlkv\[vllm\]'",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed"),
        ),
    ],
)
def test_impossible_settings_are_named(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(FilterConfig, arguments=options)


def test_processes_divide_a_shard() -> None:
    assert parse_shard("3/4") == (3, 4)
    for shard, parts in (("0/2", ["0/6", "2/6", "4/6"]), ("1/2", ["1/6", "3/6", "5/6"])):
        config = FilterConfig(shard=shard)
        assert [config.of_process(rank, 3).shard for rank in range(3)] == parts


# --- engines


@pytest.fixture(params=[True, False], ids=["vllm", "no-vllm"])
def has_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    pretend_vllm(monkeypatch, CPU_BUILD if request.param else None)
    return request.param


def sized(monkeypatch: pytest.MonkeyPatch, gib: int | None, **options: Any) -> FilterConfig:
    """The paper's job on a GPU with so much memory."""
    free = None if gib is None else gib * GIB
    monkeypatch.setattr(filter_job, "free_memory", lambda device: free)
    config = FilterConfig(dtype="bfloat16", **options).resolved()
    return sized_and_announced(config, 40_315)


def test_the_engine_is_what_is_installed(
    has_vllm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FilterConfig().resolved().engine == ("vllm" if has_vllm else "hf")
    for options in ({"engine": "hf"}, {"device": "cpu"}, {"model": "tiny"}):
        assert FilterConfig(**options).resolved().engine == "hf"
    config = sized(monkeypatch, None)
    assert (config.batch_size, config.kv_gib) == (16, 4.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("40,315 problems through " + ("vLLM" if has_vllm else "transformers"))
    assert ("pip install" in line) is not has_vllm
    assert "days" in line
    assert "assumed" in line


def test_rows_and_memory_fit_the_gpu(
    has_vllm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sized(monkeypatch, 80)
    assert config.kv_gib == (pytest.approx(72 - 15 - 6, abs=0.1) if has_vllm else 4)
    # rows of half a GiB on average; of 1 GiB, and a copy
    assert config.batch_size == (102 if has_vllm else 25)
    given = sized(monkeypatch, 80, batch_size=3, kv_gib=2)
    assert (given.batch_size, given.kv_gib) == (3, 2)
    assert sized(monkeypatch, None, device="cpu").batch_size == 16
    small = sized(monkeypatch, 16)
    assert (small.engine, small.batch_size) == ("hf", 1)
    if has_vllm:
        assert "7.6 GiB" in capsys.readouterr().out  # a row of 1 GiB, and 6.6 too little


def test_a_cpu_is_not_sized_by_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    config = FilterConfig(dtype="bfloat16", device="cpu", engine="hf").resolved()
    assert sized_and_announced(config, 1).batch_size == 16


def test_a_job_is_not_continued_with_other_weights(model_folder: str, tmp_path: Path) -> None:
    options = {"model": str(tmp_path / "model"), "input": "tiny", "output_dir": str(tmp_path / "o")}
    config = FilterConfig(**options, num_problems=2, max_new_tokens=8, engine="hf", device="cpu")
    shutil.copytree(model_folder, tmp_path / "model")
    run_filter(config)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"rlkv")
    with pytest.raises(ValueError, match="model_files was"):
        run_filter(config)


class Recorded(RolloutEngine):
    """Gives one completion to every prompt."""

    max_positions = 100

    def __init__(self, tokenizer: Any, completion: Completion) -> None:
        self.tokenizer = tokenizer
        self.completion = completion

    def stream(self, prompts: list[str], *_: Any) -> Iterator[tuple[int, Completion]]:
        for index in range(len(prompts)):
            yield index, self.completion


@pytest.mark.parametrize(("reason", "status"), [("stop", ""), ("length", "truncated")])
def test_finders_read_the_special_tokens_of_an_output(
    reason: FinishReason, status: str, tmp_path: Path
) -> None:
    """gpt-oss's channels are special tokens."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>"]})
    ids = tokenizer("3 + 4 <|channel|> 7", add_special_tokens=False).input_ids
    end = [tokenizer.eos_token_id] if reason == "stop" else []
    engine = Recorded(tokenizer, Completion([*ids, *end], "3 + 4 7", reason))
    (row,) = decode_outputs(engine, {3: "3 + 4"}, 50, 50)
    tokens = len(ids) + len(end)
    assert row == {"index": 3, "status": status, "output_tokens": tokens, "output": row["output"]}
    path = write(tmp_path / "c.jsonl", [{"problem": "p", "answer": "7", "output": row["output"]}])
    (trace,) = read_traces(path, tokenizer, "plain")
    assert [trace.ids[at] for at in trace.answers] == [*ids, tokenizer.eos_token_id]


def test_an_output_that_ends_within_thoughts_is_judged_as_in_training() -> None:
    """The prompt opens the thoughts; a box in the middle of them is no answer."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    statuses = []
    boxed = "Therefore, the final answer is: $\\boxed{ 7 }$. I hope it is correct"
    for said in (boxed, f"a b </think> {boxed}"):
        ids = tokenizer(said, add_special_tokens=False).input_ids
        engine = Recorded(tokenizer, Completion([*ids, tokenizer.eos_token_id], said, "stop"))
        rows = list(decode_outputs(engine, {0: "3 + 4 <think>"}, 50, 50))
        with closing(Verifier(1)) as verifier:
            judge(rows, [Problem("p", "7")], verifier)
        assert rows[0].keys() == {"index", "status", "output", "output_tokens"}
        statuses.append(rows[0]["status"])
    assert statuses == ["unparsable", "correct"]


# --- the command


def test_the_program(
    tmp_path: Path,
    model_folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", model_folder, "--input", "tiny", "--num-problems", "6"]
    options += ["--max-length", "120", "--output-dir", "o/out"]
    eight = ["--max-new-tokens", "8", "--shard"]
    assert run_program(PROGRAM, *options, *eight, "0/2") == 0
    assert "Shard 0/2 is complete. Not complete yet: 1/2 (3 problems)" in capsys.readouterr().out
    assert run_program(PROGRAM, *options, *eight, "1/2") == 0
    out = capsys.readouterr().out
    assert "None of the 6 problems was solved" in out
    assert "Curriculum and report: o/out" in out
    report = json.loads(Path("o/out/report.json").read_text())
    assert report["versions"]["torch"]
    assert report["config"]["output_dir"] == "o/out"
    assert str(tmp_path) not in Path("o/out/report.md").read_text().replace(model_folder, "")
    monkeypatch.setattr(filter_job, "library_facts", lambda: library_facts() | {"torch": "0"})
    assert run_program(PROGRAM, *options, *eight, "0/1") == 2
    assert "(libraries.torch): libraries.torch was" in capsys.readouterr().err
    assert run_program(PROGRAM, *options, "--max-new-tokens", "9") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "max_new_tokens was 8 and is now 9" in line


def test_the_filter_writes_where_the_training_looks(tmp_path: Path) -> None:
    for model in PUBLISHED:
        config = (CONFIGS / f"{short_name(model)}.yaml").read_text()
        assert FilterConfig(model=model).resolved().output_dir == str(curriculum_folder(model))
        assert f"curriculum: {curriculum_folder(model)}/curriculum.parquet" in config
    run_filter(FilterConfig(model="tiny", num_problems=4, output_dir=str(tmp_path)))
    for name in CURRICULUM:
        assert other_models(tmp_path / name, "tiny") == []
        if read_curriculum(tmp_path / name):
            assert other_models(tmp_path / name, "smol") == ["tiny"]
