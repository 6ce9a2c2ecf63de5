"""rlkv-infer end to end: prompts, chats, files, eviction, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cache import CacheSettings
from rlkv.cli.app import parse
from rlkv.cli.infer import DIM, NORMAL, ThinkingStream, main
from rlkv.eviction import TOVA
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import Chat, InferenceEngine
from rlkv.inference.session import InferConfig, InferSession
from rlkv.models.builtin import TINY_FOLDER
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage
from rlkv.tiny import problems
from rlkv.utils.files import read_log, write_jsonl
from rlkv.utils.store import recorded_of
from tests.helpers.families import make_family
from tests.helpers.gates import random_gates
from tests.helpers.infer import infer
from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.helpers.programs import exit_code

ENTRY = 2 * 16 * 4  # bytes of a token in one of the 12 KV heads


@pytest.fixture(scope="module")
def gates_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gates of a random model, which is in the same folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "gates.pt"
    sizes = {"sink": 2, "window": 8, "deploy_sink": 2, "deploy_window": 6}
    random_gates(model, str(folder), **sizes).save(path)
    return path


def test_the_gates_say_which_template(gates_file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.pt"
    replace(HeadGates.load(gates_file), training={"template": "plain"}).save(plain)
    expected = ((plain, None, "plain"), (plain, "boxed", "boxed"), (gates_file, None, "rlkv"))
    for gates, asked, template in expected:
        config = InferConfig(gates=str(gates), prompt="a=1 . find a ?", template=asked)
        assert InferSession.open(config).template == template


Ask = Callable[..., tuple[str, str]]
PROMPT = ("--prompt", "a=7 . b=2 . find b ?", "--max-new-tokens", 30)


@pytest.fixture
def ask(gates_file: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command with the gates, or with those that an option names; what it prints."""

    def run(*options: object) -> tuple[str, str]:
        gates = () if "--gates" in options else ("--gates", gates_file)
        infer(*gates, *options)
        return capsys.readouterr()

    return run


def in_use(err: str) -> tuple[int, int]:
    """Bytes of KV in use, and of the full cache, that the command reports."""
    held, full = re.search(r"full cache would hold: ([\d,]+) / ([\d,]+)", err).groups()
    return int(held.replace(",", "")), int(full.replace(",", ""))


def test_the_prompt_is_kept_if_the_gates_or_the_command_line_say_so(
    ask: Ask, gates_file: Path, tmp_path: Path
) -> None:
    protecting = ("--gates", tmp_path / "gates.pt")
    replace(HeadGates.load(gates_file), deploy_protect_prompt=True).save(tmp_path / "gates.pt")
    options = [("--protect-prompt",), protecting, (*protecting, "--no-protect-prompt")]
    for flags, first in zip(options, (11, 11, 2), strict=True):  # of the prompt, or sinks
        held, full = in_use(ask(*flags, *PROMPT)[1])
        tokens = full // (12 * ENTRY)
        assert held == 6 * (tokens + first + 6) * ENTRY


def test_a_prompt_is_not_a_path() -> None:
    for arguments in (["--prompt", "~/x: what is it?"], ["--prompt=~/x: what is it?"]):
        config = parse(InferConfig, arguments=["--gates", "tiny", *arguments])
        assert config.prompt == "~/x: what is it?"


def test_a_model_that_cannot_be_served_is_refused_with_a_policy_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_family("deepseek_v2").save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    words = ("--model", tmp_path, "--eviction", "rkv", "--budget", 64, *PROMPT)
    assert exit_code(main, "rlkv-infer", *words) == 2
    assert "latent attention" in capsys.readouterr().err


# --- files


@pytest.fixture
def files(tmp_path: Path) -> tuple[object, ...]:
    """Options to answer ten problems."""
    drawn = problems(10, seed=0)
    rows = [{"problem": row["problem"], "answer": row["answer"]} for row in drawn]
    write_jsonl(tmp_path / "in.jsonl", rows)
    paths = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    return (*paths, "--batch-size", 3, "--max-new-tokens", 12)


def test_batch_with_answers(ask: Ask, files: tuple[object, ...], tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    given = read_log(tmp_path / "in.jsonl")
    del given[0]["answer"]
    given[1]["answer"] = None
    given[2]["answer"] = " "
    given[3]["answer"] = True
    write_jsonl(tmp_path / "in.jsonl", given)
    err = ask(*files, "--sparsity", 0, "--compare-full")[1]
    rows = read_log(tmp_path / "out.jsonl")
    assert [row["index"] for row in rows] == list(range(10))
    assert [row["problem"] for row in rows] == [row["problem"] for row in given]
    assert all(row["output"] == row["output_full"] for row in rows)
    assert all(row["output_tokens"] <= 12 for row in rows)
    assert ["correct" in row for row in rows] == [False] * 4 + [True] * 6
    graded = r"accuracy \d\.\d{4} over 6 problems, 4 more have no answer"
    assert re.search(f"compressed  {graded}", err)
    assert re.search(f"full cache  {graded}", err)


def test_a_box_in_thoughts_that_the_prompt_opened_is_no_answer(
    ask: Ask, files: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = read_log(tmp_path / "in.jsonl")
    ends = ["", "</think> no", "</think> so \\boxed{{{answer}}}"]
    texts = []
    for row, end in zip(given, ends * 4, strict=False):
        texts.append("\\boxed{{{answer}}}, or?".format(**row) + end.format(**row))

    def batch(*_: Any, numbers: range, **others: Any) -> tuple[list[Completion], Usage]:
        return [Completion([5], texts[number], "stop") for number in numbers], NO_USAGE

    monkeypatch.setattr(InferSession, "render", lambda self, problem: f"{problem}<think>\n")
    monkeypatch.setattr(InferenceEngine, "batch", batch)
    ask(*files)
    rows = read_log(tmp_path / "out.jsonl")
    assert [row["correct"] for row in rows] == [number % 3 == 2 for number in range(10)]


def test_interrupted_runs_end_with_the_same_file(
    ask: Ask, files: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    ask(*files, "--temperature", 1)
    expected = output.read_bytes()
    decoded: list[str] = []
    original = InferenceEngine.batch

    def counting(self: InferenceEngine, prompts: list[str], *others: Any, **more: Any) -> Any:
        decoded.extend(prompts)
        return original(self, prompts, *others, **more)

    monkeypatch.setattr(InferenceEngine, "batch", counting)
    line_ends = [i + 1 for i, byte in enumerate(expected) if byte == ord("\n")]
    # torn in the first line, inside a batch, at the end of a batch, and complete
    cuts = {10: 10, line_ends[3] + 5: 7, line_ends[5]: 4, len(expected): 0}
    for cut, left in cuts.items():
        output.write_bytes(expected[:cut])
        decoded.clear()
        ask(*files, "--temperature", 1)
        assert output.read_bytes() == expected
        assert len(decoded) == left
    assert len(recorded_of(output)) == 1, "of one machine, whenever it went on"


def test_other_settings_are_refused_by_name(
    ask: Ask, files: tuple[object, ...], gates_file: Path, tmp_path: Path
) -> None:
    ask(*files)
    before = (tmp_path / "out.jsonl").read_bytes()
    for changed, message in (
        (("--sparsity", 0.25), "sparsity.*0.5.*0.25"),
        (("--seed", 4), r"\(seed\).* 0\b.* 4\b"),
        (("--eviction", "tova", "--budget", 40), r"\(eviction\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ask(*files, *changed)
    weights = gates_file.with_name("model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + struct.pack("f", 7))
    with pytest.raises(ValueError, match="model_files was"):
        ask(*files)
    weights.write_bytes(content)
    problems_file = tmp_path / "in.jsonl"
    problems_file.write_text(problems_file.read_text().replace("find", "find find", 1))
    with pytest.raises(ValueError, match="input was"):
        ask(*files)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_problems_from_a_pipe_are_told_apart(
    ask: Ask, files: tuple[object, ...], tmp_path: Path
) -> None:
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)

    def answer(line: bytes) -> None:
        reading, writing = os.pipe()
        os.write(writing, line)
        os.close(writing)
        try:
            ask("--input", f"/dev/fd/{reading}", *files[2:])
        finally:
            os.close(reading)

    answer(lines[0])
    answer(lines[0])
    with pytest.raises(ValueError, match="input was"):
        answer(lines[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "in.jsonl .*field 'problem'"),
        ('{"question": "x"}\n', "line 1.*'problem'"),
        ('{"problem": "a\\ud800b"}\n', "line 1.*surrogate"),
        ('{"problem": "a", "answer": [1]}\n', "line 1.*'answer'.*list"),
        ('{"problem": "a", "b": ' + "[" * 99999 + "\n", "line 1.*nested too deeply"),
    ],
)
def test_unreadable_problems(
    ask: Ask, files: tuple[object, ...], tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        ask(*files)


EVICTING = "--model tiny --prompt x --eviction rkv --budget 64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gates nowhere/gates.pt", "nowhere/gates.pt"),
        ("", "--gates is missing"),
        ("--gates GATES --prompt x --input y", "pass one or the other"),
        ("--gates GATES --input y", "belong together"),
        ("--gates GATES --compare-full", "--compare-full needs"),
        ("--gates GATES --sparsity 2", "sparsity 2"),
        ("--gates UNNAMED --prompt x", "unnamed.pt does not name its model: pass --model"),
        ("--gates GATES --window 0", "window is 0"),
        ("--gates GATES --eviction rkv --budget 64 --protect-prompt", "do not apply"),
        (
            "--gates GATES --eviction h2o --budget 64 --evict-from full --sparsity 1 "
            "--input IN --output OUT",
            "none is full",
        ),
        ("--gates GATES --prefill some", "unknown prefill 'some'"),
        ("--gates GATES --template some", "unknown prompt template 'some'"),
        ("--gates GATES --model ./absent", "absent"),
        ("--gates GATES --dtype int1", "unknown dtype 'int1'"),
        ("--gates GATES --prompt x --max-new-tokens 9999", "max_new_tokens"),
        ("--gates GATES --prompt x --temperature -1", "temperature"),
        ("--gates GATES --prompt x --window 1000000000", "the model has 512 positions"),
        ("--gates GATES --prompt a\udcff", "--prompt holds bytes that are not UTF-8"),
        ("--gates GATES --prompt x --device meta", "'meta'"),
        ("--gates GATES --input IN --output /dev/null", "/dev/null is a device"),
        ("--gates GATES --input IN --output IN", "left as it is"),
        ("--gates GATES --input absent.jsonl --output OUT", "absent.jsonl"),
        ("--gates GATES --prompt x --top-p 0.9", "--temperature 0 draws nothing"),
        ("--gates GATES --prompt x --batch-size 0", "--batch-size must be at least 1"),
        (f"{EVICTING} --sparsity 0.5", "--sparsity and --scope need --gates"),
        (f"{EVICTING} --scope layer", "--sparsity and --scope need --gates"),
        (f"{EVICTING} --sink 4", "--sink, --window and --protect-prompt do not apply"),
        (f"{EVICTING} --evict-from full", "--evict-from full needs --gates"),
        (f"{EVICTING} --eviction-option budget=5", "budget is given"),
        (f"{EVICTING} --eviction-option kernel=3.0", "kernel is 3.0"),
        ("--model tiny --prompt x --eviction rpc --eviction-option c=NaN", "c is nan"),
        ("--model tiny --prompt x --eviction rpc --budget 64 --eviction-option P=512", "rpc: P"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    gates_file: Path,
    tmp_path: Path,
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "in.jsonl").write_text('{"problem": "a=7 . find a ?"}\n' * 2)
    unnamed = tmp_path / "unnamed.pt"
    gates = HeadGates.load(gates_file)
    assert gates.model
    replace(gates, model=replace(gates.model, model_id="")).save(unnamed)
    before = sorted(tmp_path.iterdir())
    paths = {"OUT": str(tmp_path / "out.jsonl"), "IN": str(tmp_path / "in.jsonl")}
    paths |= {"GATES": str(gates_file), "UNNAMED": str(unnamed)}
    words = [paths.get(word, word) for word in arguments.split()]
    assert exit_code(main, "rlkv-infer", *words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"
    lines = re.split(r"[\r\n]+", err.strip())
    assert [line.startswith("error: ") for line in lines if "Loading weights" not in line] == [True]


def test_answers_without_math_verify_are_refused_before_a_batch(
    gates_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = tmp_path / "in.jsonl"
    problems.write_text('{"problem": "a=7 . find a ?", "answer": "7"}\n')
    monkeypatch.setitem(sys.modules, "math_verify", None)
    config = InferConfig(gates=str(gates_file), input=problems, output=tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match=r"needs the package math-verify.*rlkv\[eval\]"):
        InferSession.open(config)
    problems.write_text('{"problem": "a=7 . find a ?"}\n')
    InferSession.open(config)


# --- eviction

PROBLEM = "a=7 . b=2 . c = b + a . d = c - b . e = d + a . f = e - c . g = f + a . find g ?"


def test_a_chat_evicts_from_turn_to_turn() -> None:
    model, tokenizer = tiny.load()
    allocation = HeadAllocation(torch.zeros(4, 6, dtype=torch.bool))
    settings = CacheSettings(eviction=TOVA(budget=20, buffer=4))
    engine = InferenceEngine(model, tokenizer, allocation, settings)
    chat = Chat(engine, SamplingParams(max_new_tokens=40))
    for _ in range(3):
        reply = chat.say(PROBLEM)
        assert 20 <= int(reply.cache.state.row_counts.held[0]) < 24
        assert reply.usage.kv_bytes == reply.cache.used_nbytes() < reply.usage.kv_bytes_full
    assert reply.cache.get_seq_length() > 150
    assert chat.restarted == 0


# --- how far answers go, and how thinking is shown

SHORT = "a=7 . b=2 . c = b + a . find c ?"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with an end token that it does not write: answers go on to a limit."""
    folder = tmp_path_factory.mktemp("endless")
    for file in TINY_FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    numbers = {"eos_token_id": 0, "max_position_embeddings": 600}
    for name, changed in (
        ("config.json", numbers),
        ("generation_config.json", numbers),
        ("tokenizer_config.json", {"eos_token": "<pad>"}),
    ):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return folder


def test_a_chat_goes_on_to_the_models_limit(
    ask: Ask, endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SHORT}\n/reset\n{SHORT}\n{SHORT}\n"))
    err = ask("--gates", "tiny", "--model", endless)[1]
    found = [int(line.split()[0]) for line in err.splitlines() if " tokens, " in line]
    first, again, second_turn = found
    assert first == again > 512 > second_turn > 0  # which has the room that the first turn leaves
    assert f"cut at {first} tokens" in err


@pytest.mark.parametrize(
    ("options", "positions", "prompt", "expected"),
    [
        ({}, 131_072, 72, 131_000),  # a chat
        ({"input": Path("in"), "output": Path("out")}, 131_072, 72, 8192),
        ({"input": Path("in"), "output": Path("out")}, 1024, 24, 1000),
        ({"backend": "vllm", "prompt": "x"}, 131_072, 72, 8192),
        ({"max_new_tokens": 5}, 131_072, 72, 5),
    ],
)
def test_answers_in_a_file_have_the_papers_limit(
    options: dict[str, Any], positions: int, prompt: int, expected: int
) -> None:
    assert InferConfig(gates="tiny", **options).longest_answer(positions, prompt) == expected


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("prompt", "pieces", "shown"),
    [
        (
            "<user>x",
            ["<think>\nhm ", "so</think>\n\n", "7"],
            f"{DIM}<think>\nhm so</think>{NORMAL}\n\n7{NORMAL}",
        ),
        ("<user>x<think>\n", ["hm ", "so</think>7"], f"{DIM}hm so</think>{NORMAL}7{NORMAL}"),
        ("<user>x", ["7 ", "8"], f"7 8{NORMAL}"),
        ("x<think>", ["hm"], f"{DIM}hm{NORMAL}"),  # stopped while it thought
    ],
)
def test_thinking_is_dim_on_a_terminal_only(
    prompt: str, pieces: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output, expected in ((Terminal(), shown), (io.StringIO(), "".join(pieces))):
        monkeypatch.setattr("sys.stdout", output)
        stream = ThinkingStream(prompt)
        for number, piece in enumerate(pieces):
            before = len(output.getvalue())
            stream(piece)
            assert piece[:2] in output.getvalue()[before:], number  # at once
        stream.close()
        assert output.getvalue() == expected


# --- vLLM


# what it does not serve is said before anything is loaded

SERVED: dict[str, Any] = {"backend": "vllm", "gates": "gates.pt", "prompt": "x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, "--prompt"),
        ({"compare_full": True}, "--compare-full"),
        ({"device": "cpu"}, "--device"),
        ({"prefill": "published"}, "--prefill published"),
        ({"temperature": 0.005}, "temperatures from 0.01 to 2, not 0.005"),
        ({"gates": None, "eviction": "rkv", "budget": 64}, "--gates"),
        ({"eviction": "rkv", "budget": 64, "evict_from": "full"}, "--evict-from full"),
        ({"evict_from": "full"}, "--evict-from full needs --eviction"),
    ],
)
def test_what_does_not_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferConfig(**{**SERVED, **change}).check()


@pytest.mark.parametrize(
    ("options", "gates"),
    [
        ({"model": "tiny"}, "tiny"),
        ({"model": "tiny", "eviction": "rkv", "budget": 64}, None),
        ({"model": "tiny", "gates": "own.pt"}, "own.pt"),
        ({"model": "other"}, None),
    ],
)
def test_the_built_in_model_has_gates_of_its_own(
    options: dict[str, Any], gates: str | None
) -> None:
    assert InferConfig(**options).gates_source == gates
