"""Every code block of README and docs runs here, or says why it cannot: it needs a GPU, the hub, or long.

A comment before each block of bash or Python says which: ``<!-- test: run -->``, ``gpu``, ``hub``, ``long``, or the
file whose run covers it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- test: (?P<how>\S+) -->\n)?^```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.M | re.S)
ELSEWHERE = {"gpu", "hub", "long"}


class Block(NamedTuple):
    how: str | None
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [Block(m["how"], m["language"], m["code"]) for m in BLOCK.finditer(page.read_text())]


def commands(code: str) -> list[list[str]]:
    """The words of every command, comments and continued lines aside."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@cache
def help_of(script: str) -> str:
    done = subprocess.run([script_path(script), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def script_path(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed: make venv")
    return str(path)


def ids(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_block_says_how_it_is_tested(page: Path) -> None:
    for how, _, code in blocks(page):
        if how is None:
            assert code.startswith("pip install"), f"{page.name} has a block without a test comment:\n{code}"
        else:
            assert how == "run" or how in ELSEWHERE or (ROOT / how).is_file(), f"{page.name}: unknown comment {how}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_name_programs_and_options_that_exist(page: Path) -> None:
    for _, language, code in blocks(page):
        for words in commands(code) if language == "bash" else []:
            for program in (word for word in words if word.endswith(".py")):
                assert (ROOT / program).is_file(), f"{page.name}: {program}"
            script = next((word for word in words if word.startswith("rlkv-")), None)
            if script is None or (
                script == "rlkv-gates" or script == "rlkv-bench"
            ):  # subcommands have options of their own
                continue
            for option in (word.partition("=")[0] for word in words if word.startswith("--")):
                assert option == "--help" or option in help_of(script), f"{page.name}: {script} has no {option}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.how == "run" for b in blocks(page))], ids=ids)
def test_blocks_run_one_after_another(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script_path("rlkv-infer")
    for how, language, code in blocks(page):
        if how != "run":
            continue
        command = [sys.executable, "-c", code] if language == "python" else ["bash", "-e", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{page.name}:\n{code}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
