"""Options from dataclasses: defaults, YAML, command line, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rlkv.cli.app import parse
from rlkv.data.filter import FilterConfig
from rlkv.evaluation.evaluate import EvalConfig
from rlkv.inference.session import InferConfig
from rlkv.utils.configs import CONFIGS, take_config
from tests.helpers.paths import ROOT


@dataclass(frozen=True, kw_only=True)
class Base:
    model: str = "tiny"
    """hub id, folder or tiny"""


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """Do something."""

    output_dir: Path
    """where it goes"""
    sparsities: tuple[float, ...] = (0.5,)
    limit: int | None = None
    fresh: bool = False
    engine: Literal["hf", "vllm"] = "hf"

    def check(self) -> None:
        if not all(0 <= s <= 1 for s in self.sparsities):
            raise ValueError("--sparsities must lie in [0, 1]")


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_the_file_which_overrides_the_defaults(tmp_path: Path) -> None:
    file = write(
        tmp_path, "model: big\nsparsities: [0.2, 0.4]\nfresh: true\nlimit: null\noutput-dir: a\n"
    )
    found = parse(Config, arguments=["--config", file, "--sparsities", "0.6"])
    assert found == Config(model="big", output_dir=Path("a"), sparsities=(0.6,), fresh=True)
    assert parse(
        Config, arguments=[f"--config={file}", "--no-fresh", "--output_dir=b"]
    ).output_dir == Path("b")
    assert not parse(Config, arguments=[f"--config={file}", "--no-fresh"]).fresh


@pytest.mark.parametrize(
    ("text", "match"),
    [
        *[("modle: x\n", "modle"), ("- a\n", "list"), ("a: [", "YAML")],
        ("sparsities: [2]\noutput_dir: a\n", "sparsities"),
        ("engine: jax\n", "--engine 'jax'.*hf, vllm"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse(Config, arguments=["--config", write(tmp_path, text)])


@pytest.mark.parametrize("arguments", [["--engine", "jax"], ["--engine=jax"]])
def test_a_value_that_is_not_a_choice_is_refused_in_one_sentence(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--engine 'jax'.*hf, vllm"):
        parse(Config, arguments=["--output-dir", "a", *arguments])
    assert parse(Config, arguments=["--output-dir", "a", "--engine", "vllm"]).engine == "vllm"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--protect-prompt"], True),
        (["--no-protect-prompt"], False),
        (["--protect-prompt", "False"], False),
        (["--protect-prompt", "--dtype", "float32"], True),
    ],
)
def test_a_truth_value_that_need_not_be_given(
    tmp_path: Path, arguments: list[str], value: bool | None
) -> None:
    assert (
        parse(
            InferConfig, arguments=["--model", "tiny", "--prompt", "x", *arguments]
        ).protect_prompt
        is value
    )
    file = write(tmp_path, "protect_prompt: true\n")
    assert parse(
        InferConfig, arguments=["--config", file, "--model", "tiny", *arguments]
    ).protect_prompt is (value is not False)


def test_an_option_given_twice_would_lose_its_first_value() -> None:
    with pytest.raises(ValueError, match="--sparsities"):
        parse(Config, arguments=["--output-dir", "a", "--sparsities", "0.1", "--sparsities", "0.2"])


@pytest.mark.parametrize(
    "arguments", [["--output-dir", "a", "--foo"], ["--output-dir", "a", "--limit", "x"], []]
)
def test_unknown_options_wrong_types_and_absent_ones_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Config, arguments=arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_help_names_options_and_packaged_configs_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(FilterConfig, "Says what it does.", ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for part in (
        "Says what it does.",
        "--output-dir",
        "where shards, curriculum",
        "hub id, local",
        "packaged: filter_smol, filter_tiny)",
    ):
        assert part in out


def test_packaged_configs_are_those_of_the_repository() -> None:
    file, others = take_config(["--seed", "1", "--config", "llama8b", "--tau", "0"])
    assert file is not None
    assert file.read_text() == (ROOT / "configs" / "llama8b.yaml").read_text()
    assert others == ["--seed", "1", "--tau", "0"]
    assert {path.name for path in CONFIGS.iterdir()} == {
        path.name for path in (ROOT / "configs").iterdir()
    }


@pytest.mark.parametrize("arguments", [["--config", "absent"], ["--config=absent"], ["--config"]])
def test_a_config_that_is_absent_is_refused_with_those_that_fit(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--config.*\(eval_llama8b, .*eval_tiny\)"):
        take_config(arguments, EvalConfig)
