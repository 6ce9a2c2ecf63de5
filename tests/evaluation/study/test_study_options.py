"""Options of rlkv-study: bad input, and what is made of good input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlkv.evaluation.analyses import top_heads
from rlkv.evaluation.study import StudyConfig
from tests.helpers.study_program import run, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--analyses", "sweep", "speed"], "'speed'"),
        (["--sparsities", "0.4", "1.5"], "--sparsities 0.4 1.5"),
        (["--sparsities", "nan"], "--sparsities nan"),
        (["--compare-at", "0"], "--compare-at 0"),
        (["--savings", "1.0"], "--savings 1"),
        (["--head-share", "2.5"], "--head-share is 2.5"),
        (["--batch-size", "0"], "--batch-size"),
        (["--top-heads", "1.5"], "--top-heads: 1.5"),
        (["--top-heads", "25"], "--top-heads 25"),
        (["--top-heads", "0"], "--top-heads: 0"),
        (["--gates", "oracle (measured)=x.pt"], "is taken"),
        (["--gates", "x.pt"], "--gates 'x.pt'"),
        (["--gates"], "--gates needs"),
        (["--ablation", "mine=x.pt"], "--ablation: the name 'mine'"),
        (["--gates", "x=absent.pt"], "absent.pt"),
        (["--policies", "rkv", "best"], "eviction policy 'best'"),
        (["--published", "tiny"], "--published 'tiny'"),
        (["--extra", "2"], "--extra is 2"),
        (["--repetition", "5", "6"], "--repetition 5 6"),
        (["--tasks", "maths"], "unknown task 'maths'"),
        (["--data", "absent.jsonl"], "absent.jsonl"),
        (["--oracle", "absent.json"], "--oracle absent.json"),
    ],
)
def test_bad_input_is_one_sentence(
    inputs: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(inputs, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_ablations_need_gates(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add --ablation"):
        run(inputs, tmp_path, "--ablation", "--analyses", "ablations")


def test_head_counts() -> None:
    assert top_heads((), 24) == (1, 2, 3, 4, 6, 8)
    assert top_heads((), 256) == (3, 5, 13, 26, 38, 51)
    assert top_heads((0.25, 3, 0.01), 24) == (1, 3, 6)


def test_sparsities_are_measured_as_given_and_shown_ascending(tmp_path: Path) -> None:
    config = StudyConfig(gates=("a=b",), output_dir=tmp_path, sparsities=(0.6, 0, 0.2, 0.6))
    assert config.levels("sparsities") == (0.6, 0.2)
    assert config.ascending("sparsities") == (0.2, 0.6)
