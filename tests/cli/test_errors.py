"""How commands run: what other libraries print is silent, warnings of this package are one line each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlkv.cli.errors import QUIET, VERBOSE, help_text
from tests.helpers.paths import ROOT

NOISE = """
import logging, sys, warnings
from rlkv.cli.errors import run_app

def main():
    from transformers import AutoModelForCausalLM
    from rlkv.gates.head_gates import HeadGates
    from rlkv.tiny import load
    from tqdm import tqdm
    print(sys.argv[1:])
    load()
    list(tqdm(range(3), desc="a bar"))
    for name in ("transformers", "DeepSpeed", "accelerate"):
        logging.getLogger(name).warning("a warning of a logger")
    exec(compile("import warnings; warnings.warn('their warning')", "their.py", "exec"), {"__name__": "their"})
    warnings.warn("our warning\\nin two lines")
    raise ValueError("our error")

if __name__ == "__main__":
    run_app(main)
"""


def run(arguments: list[str], **environment: str) -> tuple[list[str], str]:
    """``(lines of stderr, stdout)`` of the noisy program, in an environment without our variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in QUIET}
    done = subprocess.run(
        [sys.executable, "-c", NOISE, *arguments],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines(), done.stdout


def test_only_our_lines_are_printed() -> None:
    assert run(["a"])[0] == ["warning: our warning in two lines", "error: our error"]


@pytest.mark.parametrize("by_option", [True, False])
def test_verbose_shows_everything_and_is_not_an_argument_of_the_program(by_option: bool) -> None:
    lines, out = run(["a", "--verbose"]) if by_option else run(["a"], **{VERBOSE: "1"})
    assert out == "['a']\n"
    for text in ("a bar", "a warning of a logger", "their warning", "our warning", "error: our error"):
        assert any(text in line for line in lines), text


def test_indented_paragraphs_keep_their_lines() -> None:
    text = help_text("What it does,\nin two lines.\n\n    a command \\\n        --option\n    another\n\nMore.\n")
    assert text == "What it does,\nin two lines.\n\n\b\n    a command \\\n        --option\n    another\n\nMore.\n"
    assert help_text(None) == ""
