"""The filter job end to end on random tiny models and recorded outputs."""

import json
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from rlkv.cli.app import parse
from rlkv.data.curriculum import parse_buckets
from rlkv.data.filter import FilterConfig, parse_shard, run_filter
from rlkv.tiny import draw_problem
from rlkv.utils.files import read_log
from tests.helpers import warm
from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    make_tiny_model(
        "llama", vocab_size=len(tokenizer), max_position_embeddings=128
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 solved tiny problems of 3 to 12 definitions.

    Every 5th output wrong, two without an answer.
    """
    rng = random.Random(0)
    rows = []
    for i in range(40):
        drawn = draw_problem(rng, rng.randint(3, 12))
        answer = drawn.answer if i % 5 else str((int(drawn.answer) + 1) % 10)
        output = drawn.solution if i not in (7, 8) else "I do not know ."
        rows.append({"problem": drawn.problem, "answer": answer, "output": output})
    path = tmp_path_factory.mktemp("recorded") / "outputs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(tmp_path: Path, **overrides: object) -> FilterConfig:
    if "buckets" in overrides:
        overrides["buckets"] = tuple(str(overrides["buckets"]).split(","))
    return FilterConfig(output_dir=str(tmp_path / "out"), **overrides)


def test_recorded_outputs(tmp_path: Path, model_folder: str, recorded: str) -> None:
    settings = config(
        tmp_path,
        model=model_folder,
        outputs=recorded,
        max_new_tokens=150,
        buckets="0-64:4,64-128:50",
    )
    report = run_filter(settings).report
    assert report is not None
    rows = read_log(Path(recorded))
    tokenizer = build_tokenizer()
    lengths = [len(tokenizer(r["output"], add_special_tokens=False).input_ids) + 1 for r in rows]
    solved = [i for i in range(40) if i % 5 and i not in (7, 8) and lengths[i] <= 150]
    assert report["truncated"] == sum(n > 150 for n in lengths) > 0
    assert report["wrong"] == sum(n <= 150 for n in lengths[::5])
    assert report["unparsable"] == 2
    assert report["correct"] == len(solved)
    assert (
        report["loaded"]
        == 40
        == sum(report[k] for k in ("correct", "wrong", "truncated", "unparsable"))
    )
    long_ones = [i for i in solved if 64 < lengths[i] <= 128]
    first, second = report["buckets"]
    assert (first["available"], first["taken"]) == (sum(lengths[i] <= 64 for i in solved), 4)
    assert (second["available"], second["taken"]) == (len(long_ones), len(long_ones))
    assert report["outside_buckets"] == sum(lengths[i] > 128 for i in solved)
    assert any("64-128 is short: 50 wanted" in note for note in report["notes"])

    curriculum = read_log(tmp_path / "out" / "curriculum.jsonl")
    assert len(curriculum) == report["selected"] == 4 + len(long_ones)
    by_problem = {r["problem"]: (r, n) for r, n in zip(rows, lengths, strict=True)}
    for row in curriculum:
        source, length = by_problem[row["problem"]]
        assert row["output"] == source["output"]
        assert row["answer"] == source["answer"]
        assert row["output_tokens"] == length
        assert row["model"] is None  # recorded outputs may come from any
    assert Counter(r["bucket"] for r in curriculum) == {"0-64": 4, "64-128": len(long_ones)}
    assert (
        pyarrow.parquet.read_table(tmp_path / "out" / "curriculum.parquet").to_pylist()
        == curriculum
    )
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert f"| loaded | {report['loaded']} |" in markdown
    assert f"| 64 < n <= 128 | 50 | {len(long_ones)} | {len(long_ones)} | 0 |" in markdown


def test_rebucketing_decodes_nothing(tmp_path: Path, model_folder: str, recorded: str) -> None:
    run_filter(
        config(tmp_path, model=model_folder, outputs=recorded, max_new_tokens=150, buckets="0-64:2")
    )
    shard = next((tmp_path / "out" / "shards").glob("*.jsonl"))
    before = shard.read_bytes()
    report = run_filter(
        config(
            tmp_path,
            model=model_folder,
            outputs=recorded,
            max_new_tokens=150,
            buckets="0-64:3,64-128:2",
            seed=1,
        )
    ).report
    assert report is not None
    assert report["selected"] == 5
    assert shard.read_bytes() == before


def test_other_settings_are_refused(tmp_path: Path, model_folder: str, recorded: str) -> None:
    run_filter(config(tmp_path, model=model_folder, outputs=recorded, max_new_tokens=150))
    with pytest.raises(ValueError, match=r"max_new_tokens.*150.*160"):
        run_filter(config(tmp_path, model=model_folder, outputs=recorded, max_new_tokens=160))
    with pytest.raises(ValueError, match=r'problems.*"40 .*"10 '):
        run_filter(
            config(tmp_path, model=model_folder, outputs=recorded, max_new_tokens=150, limit=10)
        )


def test_shards_merge_to_the_same_files(tmp_path: Path, model_folder: str, recorded: str) -> None:
    options = {
        "model": model_folder,
        "outputs": recorded,
        "max_new_tokens": 150,
        "buckets": "0-64:4,64-128:50",
    }
    whole = run_filter(config(tmp_path / "whole", **options)).report
    first = run_filter(config(tmp_path / "split", **options, shard="2/3"))
    assert first.report is None
    assert first.open_shards == {0: 14, 1: 13}
    assert not (tmp_path / "split" / "out" / "report.json").exists()
    assert run_filter(config(tmp_path / "split", **options, shard="0/3")).open_shards == {1: 13}
    merged = run_filter(config(tmp_path / "split", **options, shard="1/3")).report
    assert whole is not None
    assert merged is not None
    for name in ("curriculum.jsonl", "curriculum.parquet"):
        assert (tmp_path / "whole/out" / name).read_bytes() == (
            tmp_path / "split/out" / name
        ).read_bytes()
    volatile = ("config", "seconds", "finished", "command")
    assert {k: v for k, v in merged.items() if k not in volatile} == {
        k: v for k, v in whole.items() if k not in volatile
    }


def test_processes_and_other_numbers_of_shards_make_the_same_files(
    tmp_path: Path, model_folder: str, recorded: str
) -> None:
    options = {
        "model": model_folder,
        "outputs": recorded,
        "max_new_tokens": 150,
        "buckets": "0-64:4,64-128:50",
    }
    run_filter(config(tmp_path / "whole", **options))
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [
        ROOT / "data_prep/filter_deepscaler.py",
        *arguments,
        "--output-dir",
        tmp_path / "ranks" / "out",
        "--shard",
        "1/2",
    ]
    ranks = warm.run_ranks(command, tmp_path / "streams")
    assert [code for code, _ in ranks] == [0, 0], "".join(text[-3000:] for _, text in ranks)
    folder = tmp_path / "ranks" / "out"
    assert sorted(path.name for path in folder.glob("shards/*.jsonl")) == [
        "shard-1-of-4.jsonl",
        "shard-3-of-4.jsonl",
    ]
    (folder / "shards" / "shard-3-of-4.jsonl").write_bytes(  # as a kill leaves it
        (folder / "shards" / "shard-3-of-4.jsonl").read_bytes()[:-20]
    )
    assert run_filter(config(tmp_path / "ranks", **options, shard="0/3")).open_shards == {
        1: 6,
        2: 7,
    }
    assert run_filter(config(tmp_path / "ranks", **options)).report is not None
    rows = [
        line for path in folder.glob("shards/*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len([line for line in rows if line.endswith("}")]) == 40  # nothing was done twice
    for name in ("curriculum.jsonl", "curriculum.parquet"):
        assert (tmp_path / "whole/out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_model_that_solves_nothing_ends_well(tmp_path: Path, model_folder: str) -> None:
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": "find x ? " * n, "answer": "5"} for n in (1, 2, 3, 200)] + [
        {"problem": "b ?", "answer": ""}
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(
        tmp_path,
        model=model_folder,
        input=str(problems),
        max_new_tokens=16,
        batch_size=2,
        buckets="0-8:2,8-16:2",
    )
    report = run_filter(settings).report
    assert report is not None
    assert report["skipped"] == 1
    assert report["no_answer"] == 1
    assert report["correct"] == 0
    assert report["truncated"] + report["unparsable"] + report["wrong"] == 3
    assert report["notes"] == [
        "None of the 5 problems was solved: the curriculum is empty and there is nothing to train "
        "on."
    ]
    assert read_log(tmp_path / "out" / "curriculum.jsonl") == []
    table = pyarrow.parquet.read_table(tmp_path / "out" / "curriculum.parquet")
    assert table.num_rows == 0
    assert table.column_names == [
        "problem",
        "answer",
        "output",
        "output_tokens",
        "bucket",
        "template",
        "model",
    ]


@pytest.mark.parametrize(("mark", "solved"), [("#### ", 3), ("Answer 3*24, that is ", 0)])
def test_answers_in_the_form_of_gsm8k_are_read_and_others_are_hinted_at(
    tmp_path: Path, model_folder: str, mark: str, solved: int
) -> None:
    path = tmp_path / "outputs.jsonl"
    rows = [
        {"problem": "p ? " * n, "answer": f"24 each.\n{mark}72", "output": r"\boxed{72}"}
        for n in (1, 2, 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(
        tmp_path, model=model_folder, outputs=str(path), max_new_tokens=50, buckets="0-64:1"
    )
    report = run_filter(settings).report
    assert report is not None
    assert report["correct"] == solved
    hints = [note for note in report["notes"] if "all are wrong" in note]
    assert len(hints) == (0 if solved else 1)
    assert solved or ("holds the answer alone" in hints[0] and "that is 72" in hints[0])


def test_repeated_problems_take_their_outputs_in_order(tmp_path: Path, model_folder: str) -> None:
    path = tmp_path / "outputs.jsonl"
    rows = [{"problem": "p", "answer": "1", "text": rf"\boxed{{{i}}}"} for i in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        "".join(json.dumps({"problem": "p", "answer": "1"}) + "\n" for _ in range(3))
    )
    settings = config(
        tmp_path,
        model=model_folder,
        input=str(problems),
        outputs=str(path),
        outputs_field="text",
        buckets="0-9:9",
    )
    report = run_filter(settings).report
    assert report is not None
    assert (report["correct"], report["wrong"], report["missing"]) == (1, 1, 1)


def test_outputs_of_other_problems_are_refused(
    tmp_path: Path, model_folder: str, recorded: str
) -> None:
    settings = config(tmp_path, model=model_folder, input="tiny", num_problems=3, outputs=recorded)
    with pytest.raises(ValueError, match=r"outputs\.jsonl"):
        run_filter(settings)


def test_no_room_for_prompts_names_the_numbers(tmp_path: Path, model_folder: str) -> None:
    with pytest.raises(ValueError, match=r"max_new_tokens 7168.*128"):
        run_filter(config(tmp_path, model=model_folder, input="tiny", num_problems=3))


def test_more_shards_than_problems(tmp_path: Path, model_folder: str) -> None:
    with pytest.raises(ValueError, match=r"0/4.*3 problems"):
        run_filter(config(tmp_path, model=model_folder, input="tiny", num_problems=3, shard="0/4"))


def test_presets() -> None:
    paper = FilterConfig().resolved()
    assert paper.model == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert paper.input == "agentica-org/DeepScaleR-Preview-Dataset"
    assert (paper.max_length, paper.max_new_tokens) == (8192, 7168)
    assert paper.buckets == ("0-2000:600", "2000-4000:600", "4000-6000:1000", "6000-8000:800")
    tiny = FilterConfig(model="tiny", max_length=99).resolved()
    assert (tiny.input, tiny.max_length, tiny.max_new_tokens) == ("tiny", 99, 440)


def test_yaml_and_options(tmp_path: Path) -> None:
    found = parse(FilterConfig, arguments=["--config", "filter_tiny", "--num-problems", "9"])
    assert (found.model, found.num_problems, found.max_new_tokens) == ("tiny", 9, 208)
    buckets = parse_buckets(",".join(found.buckets))
    assert len(buckets) >= 4
    assert (buckets[0].low, buckets[-1].high) == (20, 208)
    listed = tmp_path / "listed.yaml"
    listed.write_text("model: tiny\nbuckets:\n  - 0-5:1\n  - 5-9:2\n")
    assert parse(FilterConfig, arguments=["--config", str(listed)]).buckets == ("0-5:1", "5-9:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size"),
        (["--buckets", "5"], "bucket '5'"),
        (["--engine", "sglang"], "--engine 'sglang'"),
        *[(["--shard", bad], "shard") for bad in ("4/4", "1", "a/b", "0/0", "")],
    ],
)
def test_impossible_settings_are_named(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(FilterConfig, arguments=options)


def test_shard_numbers() -> None:
    assert parse_shard("0/1") == (0, 1)
    assert parse_shard("3/4") == (3, 4)
    with pytest.raises(ValueError, match="shard"):
        parse_shard("-1/4")
