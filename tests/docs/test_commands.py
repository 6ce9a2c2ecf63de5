"""Every code block of README and docs runs here, or says why it cannot.

A comment before each block of bash or Python says which: ``<!-- test: run -->``, ``gpu``, ``hub``,
``long``, or the file whose run covers it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<how>\S+) -->\n)?^```(?P<language>bash|python)\n(?P<code>.*?)^```$",
    re.M | re.S,
)
ELSEWHERE = {"gpu", "hub", "long"}
ALONE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
OPTIONS = json.loads((ROOT / "tests" / "golden" / "options.json").read_text())
FOR_A_SHELL = frozenset("|<>&;$`")


class Block(NamedTuple):
    how: str | None
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [Block(m["how"], m["language"], m["code"]) for m in BLOCK.finditer(page.read_text())]


def lines_of(code: str) -> list[tuple[str, list[str]]]:
    """Every command and its words, comments and continued lines aside."""
    lines = code.replace("\\\n", " ").splitlines()
    return [(line, words) for line in lines if (words := shlex.split(line, comments=True))]


def run_script(words: list[str]) -> str:
    """Run a console script in this process, which has torch and transformers loaded.

    What failed, else nothing.
    """
    assert not FOR_A_SHELL & set("".join(words)), f"only a shell runs {shlex.join(words)}"
    scripts = entry_points(group="console_scripts", name=words[0])
    if not scripts:
        pytest.skip(f"{words[0]} is not installed: make venv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        # was read when the hub's client was imported
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        for name, value in {**ALONE, "ACCELERATE_USE_CPU": "true"}.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            scripts[words[0]].load()()
    return f"exit code {ended.value.code}: {shlex.join(words)}" if ended.value.code else ""


def run_process(command: list[str]) -> str:
    """Run a command; what failed, else nothing."""
    done = subprocess.run(
        command, env={**os.environ, **ALONE}, capture_output=True, text=True, timeout=500
    )
    shown = (
        f"exit code {done.returncode}: {command[-1]}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    )
    return shown if done.returncode else ""


def options_of(command: str) -> dict[str, str]:
    """The options of a program, which ``tests/golden`` compares with the program's own."""
    found = OPTIONS[command]
    return options_of(found.removeprefix("as ")) if isinstance(found, str) else found


def ids(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_says_how_it_is_tested(page: Path) -> None:
    for how, _, code in blocks(page):
        if how is None:
            assert code.startswith("pip install"), (
                f"{page.name} has a block without a test comment:\n{code}"
            )
        else:
            assert how == "run" or how in ELSEWHERE or (ROOT / how).is_file(), (
                f"{page.name}: unknown comment {how}"
            )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_name_programs_and_options_that_exist(page: Path) -> None:
    for _, language, code in blocks(page):
        for _, words in lines_of(code) if language == "bash" else []:
            while words and not (words[0].startswith("rlkv-") or words[0].endswith(".py")):
                words = words[1:]
            if not words:
                continue
            both = " ".join(words[:2])
            command = both if both in OPTIONS else words[0]
            assert command in OPTIONS, f"{page.name}: {command} is no program of ours"
            known = {"--help", "--config", *options_of(command)}
            for word in words:
                option = word.partition("=")[0].replace("--no-", "--")
                is_known = option in known or not option.startswith("--")
                assert is_known, f"{page.name}: {command} has no {option}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.how == "run" for b in blocks(page))], ids=ids
)
def test_blocks_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for how, language, code in blocks(page):
        if how != "run":
            continue
        if language == "python":
            assert not run_process([sys.executable, "-c", code])
            continue
        for line, words in lines_of(code):
            is_ours = words[0].startswith("rlkv-")
            assert not (run_script(words) if is_ours else run_process(["bash", "-c", line]))
