"""Names of methods: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rlkv.evaluation.evaluate import named_gates, parse_method
from rlkv.eviction import H2O, RKV, RPC
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.models import make_tiny_model

CONFIG = make_tiny_model("llama").config
ALPHA = torch.linspace(0, 1, 12).view(3, 4)
GATES = {
    "rlkv": HeadGates(ALPHA, model=ModelShape.from_config(CONFIG)),
    "duo": HeadGates(1 - ALPHA),
}


@pytest.mark.parametrize(
    ("name", "ranking", "sparsity", "policy"),
    [
        ("full", None, None, None),
        ("rlkv@0.5", "rlkv", 0.5, None),
        ("random-heads@0.25", "random-heads", 0.25, None),
        ("rkv@256", None, None, RKV(budget=256)),
        ("rkv@ratio=0.5", None, None, RKV(ratio=0.5)),
        (
            "rkv@256:variant=published:buffer=64",
            None,
            None,
            RKV(budget=256, variant="published", buffer=64),
        ),
        ("rpc@", None, None, RPC()),
        ("rpc", None, None, RPC()),
        ("rlkv@0.5+h2o@128", "rlkv", 0.5, H2O(budget=128)),
        ("h2o@128+duo@0.4", "duo", 0.4, H2O(budget=128)),
    ],
)
def test_names(name, ranking, sparsity, policy) -> None:
    method = parse_method(name, ["rlkv", "duo"])
    assert (method.name, method.ranking, method.sparsity, method.policy) == (
        name,
        ranking,
        sparsity,
        policy,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is not understood"),
        ("foo@0.5", "of full, rlkv, random-heads, .*sink_window"),
        ("rlkv", "'rlkv'.*rlkv@0.5"),
        ("rlkv@x", "'rlkv@x'"),
        ("rlkv@1.5", "sparsity 1.5"),
        ("rkv@2.5", "'rkv@2.5'"),
        ("rkv@ratio=2", "ratio is 2.0"),
        ("rkv@256:variant", "name=value"),
        ("rkv@256:size=3", "no option size"),
        ("rkv@4", "budget is 4"),
        ("rlkv@0.5+rlkv@0.4", "is not understood"),
        ("rkv@64+h2o@64", "is not understood"),
    ],
)
def test_what_is_no_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(name, ["rlkv"])


def test_allocations() -> None:
    def full(name: str) -> torch.Tensor:
        return parse_method(name, list(GATES)).allocation(CONFIG, GATES, seed=3).full

    assert full("full").all()
    assert not full("rkv@64").any()
    assert full("rlkv@0.5").flatten().tolist() == [False] * 6 + [True] * 6
    assert full("duo@0.5+rkv@64").flatten().tolist() == [True] * 6 + [False] * 6
    assert full("random-heads@0.5").sum() == 6
    assert torch.equal(full("random-heads@0.5"), full("random-heads@0.5"))
    other = {"rlkv": HeadGates(torch.ones(2, 4))}
    with pytest.raises(ValueError, match="2"):
        parse_method("rlkv@0.5", ["rlkv"]).allocation(CONFIG, other, seed=0)


def test_a_whole_file_may_have_an_equals_sign(tmp_path: Path) -> None:
    file = tmp_path / "lr=0.1" / "gates.tsv"
    file.parent.mkdir()
    HeadGates(torch.rand(2, 3, generator=torch.Generator().manual_seed(0))).save(file)
    assert list(named_gates([str(file)])) == ["gates"]
    assert list(named_gates([f"a b={file}", str(file)])) == ["a b", "gates"]


@pytest.mark.parametrize("name", ["", " ", "a/b", "a+b", "a@0.5", "a,b", "a:b"])
def test_names_that_methods_and_folders_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--gates: {name!r}")):
        named_gates([f"{name}=gates.tsv"])
