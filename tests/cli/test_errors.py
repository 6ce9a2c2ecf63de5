"""How commands run: what other libraries print is silent, warnings of this package are one line each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlkv.cli.errors import QUIET, VERBOSE, help_text, run_app
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


def exit_code(app: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        run_app(app)  # type: ignore[arg-type]
    return int(stopped.value.code or 0)


def raising(error: BaseException) -> object:
    def program() -> None:
        raise error

    return program


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("two\n  lines"), 2, "error: two lines\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.jsonl"),
            2,
            "error: a.jsonl: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_run_app_maps_errors_to_exit_codes(
    error: BaseException,
    code: int,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])
    assert exit_code(raising(error)) == code
    if text is not None:
        assert capsys.readouterr().err == text


def test_run_app_leaves_bugs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (RuntimeError("bug"), OSError("no file is named"), KeyError("x")):
        with pytest.raises(type(bug)):
            run_app(raising(bug))  # type: ignore[arg-type]
    monkeypatch.setenv("RLKV_TRACEBACK", "1")
    with pytest.raises(ValueError, match="seen"):
        run_app(raising(ValueError("seen")))  # type: ignore[arg-type]


def test_run_app_ends_with_0_or_the_programs_own_code() -> None:
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: sys.exit(7)) == 7
