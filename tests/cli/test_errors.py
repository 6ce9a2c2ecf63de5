"""How commands run: what other libraries print is silent, warnings of this package are one line
each.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkv.cli.app import QUIET, VERBOSE, run_app
from tests.helpers.paths import ROOT

NOISE = """
import logging, sys, warnings
from rlkv.cli.app import run_app

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


def test_verbose_shows_everything_and_is_not_an_argument_of_the_program() -> None:
    lines, out = run(["a", "--verbose"])  # which sets VERBOSE
    assert out == "['a']\n"
    for text in (
        "a bar",
        "a warning of a logger",
        "their warning",
        "our warning",
        "error: our error",
    ):
        assert any(text in line for line in lines), text


TRAIN = [
    "--config",
    "tiny",
    "--max_steps",
    "1",
    "--prompts_per_step",
    "2",
    "--per_device_train_batch_size",
    "8",
]
PROGRAMS = {
    "filter": "data_prep/filter_deepscaler.py",
    "train": "train/grpo_gates.py",
    "distill": "train/distill_gates.py",
}
COMMANDS = {
    "filter": (
        ["--config", "filter_tiny", "--num-problems", "2", "--output-dir", "out"],
        ["filter"],
    ),
    "train": (
        [*TRAIN, "--max_completion_length", "40", "--output_dir", "out", "--use_cpu", "true"],
        [],
    ),
    "distill": (["--config", "distill_tiny", "--steps", "1", "--output_dir", "out"], ["distil"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_on_the_tiny_model_print_their_own_lines(name: str, tmp_path: Path) -> None:
    """In an empty folder, as after ``pip install``: packaged configs, the built-in model and its
    task are enough.
    """
    options, bars = COMMANDS[name]
    command = [sys.executable, str(ROOT / PROGRAMS[name]), *options]
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()] == bars
    assert (tmp_path / "out").is_dir()
    foreign = ("WARNING", "it/s", "Loading weights")
    assert not any(text in done.stdout for text in foreign), done.stdout


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
        (OSError(28, "No space left on device"), 2, "error: the output: No space left on device\n"),
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


def test_verbose_can_be_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for verbose in (True, False):
        (monkeypatch.setenv(VERBOSE, "1") if verbose else monkeypatch.delenv(VERBOSE))
        assert (
            exit_code(
                lambda verbose=verbose: sys.exit(verbose != (logging.root.manager.disable == 0))
            )
            == 0
        )


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


def test_a_reader_that_stops_early_is_no_error() -> None:
    """As in ``rlkv-infer --help | head``: no traceback, the exit code of a program that SIGPIPE
    ends.
    """
    code = (
        "from rlkv.cli.app import run_app; run_app(lambda: [print('x' * 1000) for _ in "
        "range(10_000)])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141


PRINTS = "from rlkv.cli.app import run_app; run_app(lambda: print('\\u221a\\ud800' * {times}))"


@pytest.mark.parametrize("times", [1, 9999])
def test_a_full_disk_below_stdout_is_one_sentence(times: int) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", PRINTS.format(times=times)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: the output: No space left on device\n")


@pytest.mark.parametrize("utf8", ["0", "1"])
def test_a_locale_without_the_letters_is_no_error(utf8: str) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
    command = [sys.executable, "-c", PRINTS.format(times=1)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=False)
    letters = "√" if utf8 == "1" else "\\u221a"
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{letters}\\ud800\n", b"")


def test_another_broken_pipe_is_an_error() -> None:
    code = "import os; from rlkv.cli.app import run_app; read, write = os.pipe(); os.close(read)"
    code += "; run_app(lambda: os.write(write, b'x'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr
