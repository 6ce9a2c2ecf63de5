"""rlkv-infer end to end, on a random model that was saved with the built-in tokenizer."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkv.cli.infer import main
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.session import InferConfig, InferSession
from rlkv.models.shape import ModelShape
from rlkv.tiny import problems
from rlkv.utils.store import open_store
from tests.helpers import warm
from tests.helpers.infer import infer
from tests.helpers.models import build_tokenizer, make_tiny_model

ENTRY = 2 * 16 * 4  # bytes of a token in one of the 12 KV heads


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    ids = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    model = make_tiny_model("llama", vocab_size=len(tokenizer), **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gates_file(saved_model: Path) -> Path:
    model = make_tiny_model("llama")
    alpha = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    path = saved_model / "gates.pt"
    shape = ModelShape.from_config(model.config, model_id=str(saved_model))
    HeadGates(alpha=alpha, model=shape, sink=2, window=8, deploy_sink=2, deploy_window=6).save(path)
    return path


def test_the_gates_say_which_template(gates_file: Path, tmp_path: Path) -> None:
    gates = HeadGates.load(gates_file)
    trained = replace(gates, training={"template": "plain"})
    trained.save(tmp_path / "plain.pt")
    for options, template in (({}, "plain"), ({"template": "boxed"}, "boxed")):
        config = InferConfig(gates=str(tmp_path / "plain.pt"), prompt="a=1 . find a ?", **options)
        assert InferSession.open(config).template == template
    assert (
        InferSession.open(InferConfig(gates=str(gates_file), prompt="a=1 . find a ?")).template
        == "rlkv"
    )


@pytest.fixture
def problems_file(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    drawn = problems(10, seed=0)
    path.write_text(
        "".join(json.dumps({"problem": p["problem"], "answer": p["answer"]}) + "\n" for p in drawn)
    )
    return path


def in_use(err: str) -> tuple[int, int]:
    """Bytes of KV in use, and of the full cache, that the command reports."""
    held, full = re.search(r"full cache would hold: ([\d,]+) / ([\d,]+)", err).groups()
    return int(held.replace(",", "")), int(full.replace(",", ""))


def test_one_prompt(gates_file: Path, capsys: pytest.CaptureFixture) -> None:
    infer(
        "--gates",
        gates_file,
        "--sparsity",
        0.5,
        "--prompt",
        "a=7 . b=2 . find b ?",
        "--max-new-tokens",
        30,
    )
    out, err = capsys.readouterr()
    assert len(out.split()) > 5
    assert "<pad>" not in out
    tokens = int(re.search(r"^(\d+) tokens", err, re.MULTILINE)[1])
    held, full = in_use(err)
    assert held < full
    assert held % ENTRY == full % (12 * ENTRY) == 0
    prompt_tokens = 11  # <bos> <user> instruction a=7 . b=2 . find b ? <assistant>
    assert full // (12 * ENTRY) == prompt_tokens + tokens - 1
    assert "tokens/s" in err
    assert "heads: 6 full, 6 compressible" in err


def test_the_prompt_is_kept_if_the_gates_or_the_command_line_say_so(
    gates_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    protecting = tmp_path / "gates.pt"
    replace(HeadGates.load(gates_file), deploy_protect_prompt=True).save(protecting)
    options = [(gates_file, "--protect-prompt"), (protecting,), (protecting, "--no-protect-prompt")]
    for (gates, *flags), first in zip(options, (11, 11, 2), strict=True):  # of the prompt, or sinks
        infer("--gates", gates, *flags, "--prompt", "a=7 . b=2 . find b ?", "--max-new-tokens", 30)
        held, full = in_use(capsys.readouterr().err)
        tokens = full // (12 * ENTRY)
        assert held == 6 * (tokens + first + 6) * ENTRY


def test_a_short_text_takes_no_more_than_the_full_cache(
    gates_file: Path, capsys: pytest.CaptureFixture
) -> None:
    infer(
        "--gates", gates_file, "--window", 200, "--prompt", "a=7 . find a ?", "--max-new-tokens", 2
    )
    held, full = in_use(capsys.readouterr().err)
    assert held == full > 0, "empty entries and headroom are not in use"


def test_compare_full_at_sparsity_zero_gives_the_same_text_twice(
    gates_file: Path, capsys: pytest.CaptureFixture
) -> None:
    infer(
        "--gates",
        gates_file,
        "--sparsity",
        0,
        "--prompt",
        "a=7 . find a ?",
        "--compare-full",
        "--max-new-tokens",
        20,
    )
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.strip()]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "the same tokens" in err


def test_sampling_follows_the_seed(gates_file: Path, capsys: pytest.CaptureFixture) -> None:
    texts = []
    for seed in (1, 1, 2):
        sampled = ("--temperature", 1, "--seed", seed, "--max-new-tokens", 20)
        infer("--gates", gates_file, "--prompt", "a=7 . find a ?", *sampled)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_chat_goes_on_with_its_cache(
    gates_file: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("a=7 . find a ?\n\nb=1 . find b ?\n/reset\na=7 . find a ?\n")
    )
    infer("--gates", gates_file, "--max-new-tokens", 20, "--prefill", "local")
    out, err = capsys.readouterr()
    turns = [line for line in out.splitlines() if line.strip()]
    assert len(turns) == 3
    assert turns[0] == turns[2]
    bytes_full = [int(n.replace(",", "")) for n in re.findall(r"/ ([\d,]+) \(", err)]
    assert bytes_full[1] > bytes_full[0] == bytes_full[2]
    assert "read again" not in err


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch_arguments(
    gates_file: Path, problems_file: Path, output: Path, *more: object, tokens: int = 12
) -> list[str]:
    arguments = [
        "--gates",
        gates_file,
        "--input",
        problems_file,
        "--output",
        output,
        "--batch-size",
        3,
    ]
    return [str(a) for a in [*arguments, "--max-new-tokens", tokens, *more]]


def test_batch_with_answers(
    gates_file: Path, problems_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("math_verify")
    output = tmp_path / "out.jsonl"
    first, second, *others = read_lines(problems_file)
    ungraded = [{"problem": first["problem"]}, {**second, "answer": None}]
    problems_file.write_text("".join(json.dumps(row) + "\n" for row in [*ungraded, *others]))
    infer(*batch_arguments(gates_file, problems_file, output, "--sparsity", 0, "--compare-full"))
    rows = read_lines(output)
    given = read_lines(problems_file)
    assert [row["index"] for row in rows] == list(range(10))
    assert [row["problem"] for row in rows] == [row["problem"] for row in given]
    assert all(row["output"] == row["output_full"] for row in rows)
    assert all(row["output_tokens"] <= 12 for row in rows)
    assert ["correct" in row for row in rows] == [False] * 2 + [True] * 8
    err = capsys.readouterr().err
    graded = r"accuracy \d\.\d{4} over 8 problems, 2 more have no answer"
    assert re.search(f"compressed  {graded}", err)
    assert re.search(f"full cache  {graded}", err)


@pytest.mark.parametrize("temperature", [0, 1])
def test_interrupted_runs_end_with_the_same_file(
    gates_file: Path,
    problems_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    whole = tmp_path / "whole.jsonl"
    infer(*batch_arguments(gates_file, problems_file, whole, "--temperature", temperature))
    expected = whole.read_bytes()
    calls: list[int] = []
    original = InferenceEngine.batch

    def counting(
        self: InferenceEngine, prompts: list[str], *args: object, **kwargs: object
    ) -> object:
        calls.append(len(prompts))
        return original(self, prompts, *args, **kwargs)

    monkeypatch.setattr(InferenceEngine, "batch", counting)
    output = tmp_path / "out.jsonl"
    settings = tmp_path / "out.jsonl.settings.json"
    line_ends = [i + 1 for i, byte in enumerate(expected) if byte == ord("\n")]
    # torn in the first line, inside a batch, at the end of a batch, inside the last line, and
    # complete
    for cut in (10, line_ends[3] + 5, line_ends[5], len(expected) - 3, len(expected)):
        output.write_bytes(expected[:cut])
        settings.write_bytes((tmp_path / "whole.jsonl.settings.json").read_bytes())
        calls.clear()
        infer(*batch_arguments(gates_file, problems_file, output, "--temperature", temperature))
        assert output.read_bytes() == expected
        finished = sum(end <= cut for end in line_ends)
        assert sum(calls) == 10 - finished // 3 * 3 if finished < 10 else not calls


def test_killed_process_resumes(gates_file: Path, problems_file: Path, tmp_path: Path) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    infer(*batch_arguments(gates_file, problems_file, whole, tokens=300))
    arguments = batch_arguments(gates_file, problems_file, output, tokens=300)
    process = warm.start(["-m", "rlkv.cli.infer", *arguments])
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert 0 < len(output.read_bytes().splitlines()) <= 10
    infer(*arguments)
    assert output.read_bytes() == whole.read_bytes()


def test_other_settings_are_refused_by_name(
    gates_file: Path, problems_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    infer(*batch_arguments(gates_file, problems_file, output))
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"sparsity.*0.5.*0.25"):
        infer(*batch_arguments(gates_file, problems_file, output, "--sparsity", 0.25))
    with pytest.raises(ValueError, match=r"\(seed\).* 0\b.* 4\b"):
        infer(*batch_arguments(gates_file, problems_file, output, "--seed", 4))
    problems_file.write_text(problems_file.read_text().replace("find", "find find", 1))
    with pytest.raises(ValueError, match="input was"):
        infer(*batch_arguments(gates_file, problems_file, output))
    assert output.read_bytes() == before


def test_a_file_of_someone_else_is_never_touched(
    gates_file: Path, problems_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("my notes")
    monkeypatch.setattr(
        "rlkv.models.loading.load_model", lambda *_, **__: pytest.fail("refused late")
    )
    with pytest.raises(ValueError, match=r"out\.jsonl exists.*left as it is"):
        infer(*batch_arguments(gates_file, problems_file, output))
    assert output.read_text() == "my notes"


def test_two_writers(gates_file: Path, problems_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with (
        open_store(output, {}, ["index"]),
        pytest.raises(ValueError, match=r"out\.jsonl .*another process"),
    ):
        infer(*batch_arguments(gates_file, problems_file, output))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "in.jsonl .*field 'problem'"),
        ('{"problem": "x"}\n{"problem"\n', "line 2.*JSON"),
        ('{"question": "x"}\n', "line 1.*'problem'"),
        ('{"problem": "a\\ud800b"}\n', "line 1.*surrogate"),
        ('{"problem": "a", "answer": [1]}\n', "line 1.*'answer'.*list"),
        ('{"problem": "a", "b": ' + "[" * 99999 + "\n", "line 1.*nested too deeply"),
    ],
)
def test_unreadable_problems(gates_file: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        infer(*batch_arguments(gates_file, path, tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--gates is missing"),
        (["--gates", "nowhere/gates.pt"], "nowhere/gates.pt"),
        (["--gates", "GATES", "--prompt", "x", "--input", "y"], "pass one or the other"),
        (["--gates", "GATES", "--input", "y"], "belong together"),
        (["--gates", "GATES", "--prompt", " "], "--prompt is empty"),
        (["--gates", "GATES", "--compare-full"], "--compare-full needs"),
        (["--gates", "GATES", "--sparsity", "2"], "sparsity 2"),
        (["--gates", "GATES", "--window", "0"], "window is 0"),
        (
            ["--gates", "GATES", "--eviction", "rkv", "--budget", "64", "--protect-prompt"],
            "--protect-prompt",
        ),
        (["--gates", "GATES", "--prefill", "some"], "unknown prefill 'some'"),
        (["--gates", "GATES", "--template", "some"], "unknown prompt template 'some'"),
        (["--gates", "GATES", "--model", "./absent"], "absent"),
        (["--gates", "GATES", "--device", "abacus"], "unknown device 'abacus'"),
        (["--gates", "GATES", "--dtype", "int1"], "unknown dtype 'int1'"),
        (["--gates", "GATES", "--prompt", "x", "--max-new-tokens", "9999"], "max_new_tokens"),
        (["--gates", "GATES", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--gates", "GATES", "--prompt", "x", "--temperature", "1e-320"], "temperature"),
        (
            ["--gates", "GATES", "--prompt", "x", "--window", "1000000000"],
            "the model has 512 positions",
        ),
        (["--gates", "GATES", "--prompt", "x", "--sink", "9" * 31], "sink is 9999"),
        (["--gates", "GATES", "--prompt", "a\udcff"], "--prompt holds bytes that are no UTF-8"),
        (["--gates", "GATES", "--prompt", "x", "--device", "meta"], "'meta'"),
        (["--config", "DEEP"], "not readable as YAML"),
        (
            ["--model", "tiny", "--prompt", "x", "--eviction", "rkv", "--budget", "9" * 400],
            "rkv: budget",
        ),
        (["--gates", "GATES", "--input", "IN", "--output", "/dev/null"], "/dev/null is a device"),
        (["--gates", "GATES", "--input", "IN", "--output", "IN"], "left as it is"),
        (["--gates", "GATES", "--input", "IN", "--output", "IN/out.jsonl"], "is no folder"),
        (
            [
                "--gates",
                "GATES",
                "--input",
                "IN",
                "--output",
                "OUT",
                "--max-new-tokens",
                "1000000000",
            ],
            "512 positions",
        ),
        (["--gates", "GATES", "--input", "absent.jsonl", "--output", "OUT"], "absent.jsonl"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    gates_file: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000)
    (tmp_path / "in.jsonl").write_text('{"problem": "a=7 . find a ?"}\n' * 2)
    before = sorted(tmp_path.iterdir())
    names = {
        "OUT": "out.jsonl",
        "IN": "in.jsonl",
        "DEEP": "deep.yaml",
        "IN/out.jsonl": "in.jsonl/out.jsonl",
    }
    names = {name: str(tmp_path / file) for name, file in names.items()} | {
        "GATES": str(gates_file)
    }
    monkeypatch.setattr("sys.argv", ["rlkv-infer", *(names.get(a, a) for a in arguments)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    err = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"
    lines = re.split(r"[\r\n]+", err.strip())
    assert [line.startswith("error: ") for line in lines if "Loading weights" not in line] == [True]


def test_gates_of_the_built_in_model_are_read_once(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    gates = HeadGates(torch.rand(4, 6, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(HeadGates, "load", lambda path: asked.append(path) or gates)
    infer("--model", "tiny", "--prompt", "a=7 . find a ?", "--max-new-tokens", 5)
    assert asked == ["tiny"]
    assert "heads: 12 full, 12 compressible" in capsys.readouterr().err
