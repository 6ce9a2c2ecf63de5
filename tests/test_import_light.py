"""What an import costs: heavy and optional packages load where they are needed, not before."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "trl",
    "vllm",
    "deepspeed",
    "wandb",
    "triton",
    "transformers",
    "peft",
    "datasets",
    "matplotlib",
)
OPTIONAL = ("trl", "vllm", "deepspeed", "wandb", "peft", "datasets")


def loaded_after(statement: str) -> set[str]:
    """Names among :data:`HEAVY` that a fresh interpreter has loaded after ``statement``."""
    code = f"import sys\n{statement}\nprint(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_loads_nothing_heavy() -> None:
    assert loaded_after("import rlkv; assert 'torch' not in sys.modules") == set()


@pytest.mark.parametrize(
    "statement",
    [
        "from rlkv import HeadGates",
        "from rlkv import HeadAllocation",
        "import rlkv.cli.gates, rlkv.gates.publish",
    ],
)
def test_gates_load_nothing_heavy(statement: str) -> None:
    assert (
        loaded_after(statement) - {"triton"} == set()
    )  # torch itself may load triton on a GPU machine


@pytest.mark.parametrize("name", ["HeadReallocationCache", "compress", "generate_lossless"])
def test_serving_needs_no_optional_package(name: str) -> None:
    # torch itself may load triton; our kernels wait for their first launch
    statement = f"from rlkv import {name}; assert 'rlkv.kernels.decode' not in sys.modules"
    assert loaded_after(statement) & set(OPTIONAL) == set()


def test_benchmarks_need_no_optional_package() -> None:
    assert loaded_after("import rlkv.cli.jobs") & set(OPTIONAL) == set()


def test_public_names() -> None:
    import rlkv

    for name in rlkv.__all__:
        assert getattr(rlkv, name) is not None
    with pytest.raises(AttributeError, match="'absent'"):
        _ = rlkv.absent


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_after("import matplotlib") == {"matplotlib"}
