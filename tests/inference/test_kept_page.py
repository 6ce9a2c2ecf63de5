"""The page of kept tokens, and rlkv-infer with eviction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlkv.inference.config import InferConfig
from rlkv.inference.kept_page import shade, token_texts
from tests.helpers.infer import infer

PROMPT = "a=7 . b=2 . c = b + a . d = c - b . e = d + a . find e ?"


class Characters:
    """A tokenizer of characters, the last of which takes two tokens."""

    def decode(self, ids: list[int]) -> str:
        text = "".join({0: "a", 1: " b", 2: "\u00e9", 9: ""}[i] for i in ids)
        return text


def test_token_texts_join_to_the_text() -> None:
    ids = [0, 1, 9, 2, 1, 1, 0, 2]
    assert "".join(token_texts(Characters(), ids)) == Characters().decode(ids)


class Bytes:
    """A tokenizer of UTF-8 bytes: a character of several bytes takes several tokens, as in byte-level BPE."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["e\u0301 = \u221a2 \u2192 \u03c0", "\U0001f600a\U0001f600", "plain"])
def test_characters_of_several_tokens_stay_whole(text: str) -> None:
    texts = token_texts(Bytes(), list(text.encode()))
    assert "".join(texts) == text
    assert [t for t in texts if t] == list(text)


def test_shades_run_from_light_to_dark() -> None:
    light = [sum(int(shade(share / 20)[i : i + 2], 16) for i in (1, 3, 5)) for share in range(1, 21)]
    assert light == sorted(light, reverse=True)
    assert shade(1.0) == "#7f0000"


def run(*arguments: object) -> None:
    infer(*arguments, "--model", "tiny", "--max-new-tokens", 60)


def test_page_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "kept.html"
    options = ("--eviction", "tova", "--budget", "20", "--eviction-option", "buffer=4")
    run("--prompt", PROMPT, *options, "--show-kept", page)
    assert "24 compressible (tova)" in capsys.readouterr().err
    text = page.read_text()
    assert not re.search(r"https?://|<script|<link|@import", text)
    counts = [int(n) for n in re.findall(r"held by (\d+) of 24 heads", text)]
    gone = len(re.findall(r": gone\"", text))
    tokens = int(re.search(r"holds after (\d+) tokens", text).group(1))
    assert len(counts) + gone == tokens
    assert max(counts) == 24
    assert gone > 0
    # 24 heads that hold 20 to 23 entries each
    assert 24 * 20 <= sum(counts) < 24 * 24
    assert text.count('class="answer"') + text.count('class="answer gone"') == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eviction", "rvk", "--budget", "64"], "'rvk'"),
        (["--eviction", "rkv", "--budget", "4"], "budget is 4"),
        (["--eviction", "rkv", "--budget", "-1"], "budget is -1"),
        (["--eviction", "rkv"], "either a budget"),
        (["--eviction", "rkv", "--ratio", "1.5"], "ratio is 1.5"),
        (["--eviction", "rkv", "--budget", "64", "--ratio", "0.5"], "both are given"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "variant"], "name=value"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "size=3"], "no option size"),
        (["--eviction", "rkv", "--budget", "64", "--sparsity", "0.5"], "--sparsity"),
        (["--eviction", "rkv", "--budget", "64", "--sink", "4"], "--sink"),
        (["--eviction", "sink_window", "--budget", "20", "--eviction-option", "window=30"], "window"),
        (["--budget", "64"], "--budget, --ratio and --eviction-option"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "budget=5"], "budget is given"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "lam=0.2", "lam=0.2"], "option lam"),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "lam=abc"], "lam is abc"),
        (
            ["--eviction", "rkv", "--budget", "64", "--eviction-option", "kernel=3.0"],
            "kernel is 3.0",
        ),
        (["--eviction", "rkv", "--budget", "64", "--eviction-option", "protect_prompt=2"], "protect_prompt is 2"),
        (["--eviction", "rpc", "--eviction-option", "P=100.5"], "P is 100.5"),
        (["--eviction", "rpc", "--eviction-option", "c=NaN"], "c is nan"),
        (["--eviction", "rpc", "--eviction-option", "R=[1]"], "R is [1]"),
        (["--eviction", "rpc", "--budget", "64", "--eviction-option", "P=512"], "rpc: P"),
        (["--eviction", "rpc", "--eviction-option", "buffer=3"], "buffer is 3"),
        (["--eviction", "sink_window", "--eviction-option", "window=abc"], "window is abc"),
        (["--eviction", "random", "--budget", "64", "--eviction-option", "seed=1.5"], "seed is 1.5"),
    ],
)
def test_bad_options_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):  # the entry point prints it and exits with 2
        run("--prompt", PROMPT, *arguments)


@pytest.mark.parametrize(("text", "value"), [("False", False), ("true", True)])
def test_truth_values_are_read_as_such(text: str, value: bool) -> None:
    policy = InferConfig(eviction="random", budget=64, eviction_option=(f"protect_prompt={text}",)).policy()
    assert policy is not None
    assert policy.protect_prompt is value


def test_show_kept_needs_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--show-kept.*--prompt"):
        run("--eviction", "rkv", "--budget", "64", "--show-kept", tmp_path / "kept.html")
