"""How far rlkv-infer's answers go by default, and how their thinking is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rlkv.cli.infer import DIM, NORMAL, ThinkingStream
from rlkv.inference.session import InferConfig, InferSession
from rlkv.models.builtin import TINY_FOLDER
from tests.helpers.infer import infer

PROBLEM = "a=7 . b=2 . c = b + a . find c ?"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with an end token that it does not write: its answers go on up to a limit."""
    folder = tmp_path_factory.mktemp("endless")
    for file in TINY_FOLDER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            path.write_text(
                json.dumps(
                    json.loads(path.read_text())
                    | {"eos_token_id": 0, "max_position_embeddings": 700}
                )
            )
    return folder


def tokens(err: str) -> list[int]:
    return [int(line.split()[0]) for line in err.splitlines() if " tokens, " in line]


def test_a_chat_goes_on_to_the_models_limit(
    endless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROBLEM}\n/reset\n{PROBLEM}\n{PROBLEM}\n"))
    infer("--gates", "tiny", "--model", endless)
    err = capsys.readouterr().err
    first, again, second_turn = tokens(err)
    assert first == again > 512 > second_turn > 0  # which has the room that the first turn leaves
    assert f"cut at {first} tokens" in err


def test_a_limit_that_was_asked_for_holds(
    endless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROBLEM}\n"))
    infer("--gates", "tiny", "--model", endless, "--max-new-tokens", 20)
    assert tokens(capsys.readouterr().err) == [20]


def test_answers_in_a_file_have_the_papers_limit() -> None:
    chat, file = (
        InferConfig(gates="tiny"),
        InferConfig(gates="tiny", input=Path("in"), output=Path("out")),
    )
    assert chat.longest_answer(131_072, 72) == 131_000
    assert file.longest_answer(131_072, 72) == 8192
    assert file.longest_answer(1024, 24) == 1000
    assert InferConfig(gates="tiny", backend="vllm", prompt="x").longest_answer(131_072, 72) == 8192
    assert InferConfig(gates="tiny", max_new_tokens=5).longest_answer(131_072, 72) == 5
    session = InferSession.open(InferConfig(model="tiny", prompt=PROBLEM))
    assert session.sampling.max_new_tokens == 1024 - len(
        session.engine.encode(session.render(PROBLEM))
    )


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
