"""The command-line parser, and how commands end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
from tyro.conf import Positional

from rlkv.cli.app import QUIET, parse, read_config, run_app
from rlkv.data.filter import FilterConfig
from tests.helpers.paths import ROOT
from tests.helpers.programs import exit_code


@dataclass(frozen=True, kw_only=True)
class Config:
    """Do something."""

    output_dir: Path
    """where it goes"""
    model: str = "tiny"
    """hub id, folder or tiny"""
    sparsities: tuple[float, ...] = (0.5,)
    limit: int | None = None
    keep: int | None = 2
    fresh: bool = False
    protect: bool | None = None
    engine: Literal["hf", "vllm"] = "hf"
    part: Literal[1, 2] | None = None

    def check(self) -> None:
        if not all(0 <= s <= 1 for s in self.sparsities):
            raise ValueError("--sparsities must lie in [0, 1]")


def read(*arguments: str) -> Config:
    return parse(Config, arguments=["--output-dir", "a", *arguments])


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    text = "model: big\nsparsities: [0.2, 0.4]\nfresh: true\nlimit: null\noutput-dir: a\n"
    file = write(tmp_path, text)
    found = parse(Config, arguments=["--config", file, "--sparsities", "0.6"])
    assert found == Config(model="big", output_dir=Path("a"), sparsities=(0.6,), fresh=True)
    arguments = [f"--config={file}", "--no-fresh", "--output_dir=b"]
    assert parse(Config, arguments=arguments).output_dir == Path("b")
    assert not parse(Config, arguments=arguments).fresh


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ([], (False, None)),
        (["--fresh", "--protect"], (True, True)),
        (["--no-fresh", "--no-protect", "--model", "x"], (False, False)),
    ],
)
def test_options_that_are_on_or_off(arguments: list[str], values: tuple[bool, bool | None]) -> None:
    found = read(*arguments)
    assert (found.fresh, found.protect) == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "jax"], "--engine 'jax'.*hf, vllm"),
        (["--engine=jax"], "--engine 'jax'.*hf, vllm"),
        (["--limit", "x"], "--limit needs a whole number, got 'x'"),
        (["--fresh=true"], "--fresh is on or off: write --fresh or --no-fresh"),
        (["--fresh", "yes"], "--fresh is on or off: write --fresh or --no-fresh"),
        (["--protect", "False"], "--protect is on or off: write --protect or --no-protect"),
        (["--sparsities", "0.1", "--sparsities", "0.2"], "--sparsities is given twice"),
        (["--sparsities", "2"], "must lie in"),
        (["--sparsities", "0.1", "x"], "--sparsities needs a number, got 'x'"),
        (["--part", "4"], "unknown --part '4': choose one of 1, 2"),
        (["--model", "a", "b"], "'b' is no option, and the value of none"),
        (["--model", "--fresh"], "--model needs a value: write --model=VALUE"),
        (["--model="], "--model has an empty value"),
        (["--limt", "3"], "unknown option --limt: did you mean --limit"),
        (["--no-limit", "3"], "--no-limit: --limit takes a value"),
        (["--config", "absent"], "--config needs a file or a packaged name"),
        (["--config"], "--config needs a file"),
        (["--config", "tiny", "--config=smol"], "--config is given twice"),
    ],
)
def test_what_an_option_does_not_take_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x\n", "unknown keys modle"),
        ("- a\n", "list"),
        ("a: " + "[" * 5000, "not readable as YAML"),
        ("a: [", "YAML"),
        ("sparsities: [2]\n", "sparsities"),
        ("engine: jax\n", "--engine 'jax'.*hf, vllm"),
        ("model: true\n", "--model needs a value"),
        ("limit: false\n", "--no-limit: --limit takes a value"),
        ("limit: 1\nlimit: 2\n", "not readable as YAML: limit is given twice"),
        ("output-dir: a\noutput_dir: b\n", "output_dir is given twice"),
        ("base: ../first\n", "base: "),
        ("base: ''\n", "base: "),
        ("base: absent\n", "absent.yaml is not in"),
        ("base: config\n", "config.yaml is a base of itself"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("--config", write(tmp_path, text))


def test_a_value_may_look_like_an_option(tmp_path: Path) -> None:
    assert read("--config", write(tmp_path, "model: --fresh\n")).model == "--fresh"
    assert read("--config", write(tmp_path, "model: -x y\n")).model == "-x y"
    assert read("--model", "-1", "--part", "None").model == "-1"


def test_nothing_may_be_a_value(tmp_path: Path) -> None:
    text = "limit: null\nprotect: null\nmodel: null\nkeep: null\n"
    assert read("--keep", "None").keep is None
    found = read("--config", write(tmp_path, text))
    assert (found.limit, found.protect, found.model, found.keep) == (None, None, "tiny", None)


def test_a_home_folder_that_no_shell_replaces(tmp_path: Path) -> None:
    for arguments in (["--model=~/x"], ["--model", "~/x"]):
        assert read(*arguments).model == f"{Path.home()}/x"
    assert read("--model=~x").model == "~x"
    assert read("--config", write(tmp_path, "model: ~/x\n")).model == f"{Path.home()}/x"
    assert read("--config", write(tmp_path, "model: a~/x\n")).model == "a~/x"


def test_a_value_may_be_named_like_an_option(tmp_path: Path) -> None:
    file = write(tmp_path, "limit: 3\nfresh: true\n")
    for model in ("limit", "fresh=a"):
        found = read("--config", file, "--model", model)
        assert (found.limit, found.fresh) == (3, True)


def test_a_list_may_end_the_line() -> None:
    assert read("--sparsities=0.1", "0.2", "0.3").sparsities == (0.1, 0.2, 0.3)
    assert read("--sparsities", "0.1", "0.2", "--fresh").sparsities == (0.1, 0.2)


@dataclass(frozen=True)
class Words:
    path: Positional[str]
    histogram: bool = False
    shares: tuple[float, ...] = ()


@pytest.mark.parametrize("arguments", ["--histogram a", "a --histogram"])
def test_a_word_may_follow_what_is_on_or_off(arguments: str) -> None:
    assert parse(Words, arguments=arguments.split()) == Words("a", histogram=True)
    with pytest.raises(ValueError, match="--histogram is on or off"):
        parse(Words, arguments=["--histogram", "True", "a"])
    assert parse(Words, arguments=["--shares", "0.1", "a"]) == Words("a", shares=(0.1,))


def test_an_option_that_is_needed_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Config, arguments=[])
    assert ended.value.code == 2
    assert "--output-dir" in capsys.readouterr().err


def test_a_file_adds_to_its_base_and_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("max-steps: 9\ntau: 0.5\nwandb: online\n")
    second = write(tmp_path, "base: first\nmax_steps: 3\nwandb:\nseed: 1\n")
    assert read_config(Path(second)) == {"max_steps": 3, "tau": 0.5, "wandb": None, "seed": 1}


def test_help_names_options_and_packaged_configs_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(FilterConfig, "Says what it does.", ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    packaged = "packaged: filter_qwen_coder, filter_smol, filter_tiny)"
    for part in ("Says what it does.", "--output-dir", packaged):
        assert part in out


# --- how commands end

NOISE = """
import logging, sys, warnings
from rlkv.cli.app import run_app

def main():
    from transformers import AutoModelForCausalLM
    from rlkv.tiny import load
    from tqdm import tqdm
    print(sys.argv[1:])
    load()
    list(tqdm(range(3), desc="a bar"))
    for name in ("transformers", "DeepSpeed", "accelerate"):
        logging.getLogger(name).warning("a warning of a logger")
    theirs = compile("import warnings; warnings.warn('their warning')", "their.py", "exec")
    exec(theirs, {"__name__": "their"})
    warnings.warn("our warning\\nin two lines")
    raise ValueError("our error")

if __name__ == "__main__":
    run_app(main)
"""


def test_only_our_lines_are_printed_unless_verbose() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in QUIET}
    environment["PYTHONPATH"] = str(ROOT)
    for arguments in (["a"], ["a", "--verbose"]):
        command = [sys.executable, "-c", NOISE, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "['a']\n")
        if len(arguments) == 1:
            assert done.stderr == "warning: our warning in two lines\nerror: our error\n"
        for text in ("a bar", "a warning of a logger", "their warning"):
            assert (text in done.stderr) == ("--verbose" in arguments)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("two\n  lines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "No such file", "a.jsonl"), 2, "error: a.jsonl: No such file\n"),
        (OSError(28, "No space left on device"), 2, "error: the output: No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(7), 7, ""),
    ],
)
def test_errors_of_users_have_their_exit_codes(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Mock(side_effect=[error, None])
    assert exit_code(partial(run_app, program), "program") == code
    assert capsys.readouterr().err == text
    assert exit_code(partial(run_app, program), "program") == 0


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (RuntimeError("bug"), OSError("no file is named"), KeyError("x")):
        with pytest.raises(type(bug)):
            run_app(Mock(side_effect=bug))
    monkeypatch.setenv("RLKV_TRACEBACK", "1")
    with pytest.raises(ValueError, match="seen"):
        run_app(Mock(side_effect=ValueError("seen")))


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    program = f"from rlkv.cli.app import run_app; {code}"
    command = [sys.executable, "-c", program]
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


def test_a_reader_that_stops_early_is_not_an_error() -> None:
    """Ends as a program that SIGPIPE ends, as in ``rlkv-infer --help | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run("run_app(lambda: print('x' * 100_000))", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_an_error() -> None:
    code = "import os; read, write = os.pipe(); os.close(read)"
    done = run(f"{code}; run_app(lambda: os.write(write, b'x'))")
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


@pytest.mark.parametrize("times", [1, 9999])
def test_a_full_disk_below_stdout_is_one_sentence(times: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(f"run_app(lambda: print('x' * {times}))", stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: the output: No space left on device\n")


def test_a_locale_without_the_letters_is_not_an_error() -> None:
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run("run_app(lambda: print('\\u221a\\ud800'))", env={**os.environ, **variables})
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u221a\\ud800\n", "")
