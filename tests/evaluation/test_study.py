"""Options of rlkv-study; budgets at matched bytes, never above the target and never far below."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.cache.accounting import EntrySize
from rlkv.evaluation.study import (
    ByteTarget,
    StudyConfig,
    default_extra,
    kv_share,
    policy_templates,
    top_heads,
)
from rlkv.eviction import H2O, RKV, RPC, TOVA, RandomEviction, SinkWindow
from rlkv.gates.head_gates import HeadGates
from tests.helpers.study_program import run, write_inputs

SIZE = EntrySize(head_dim=16, group_size=2, itemsize=4)
LENGTHS = [(20, 200), (35, 410), (50, 333)]
NONE_FULL = torch.zeros(2, 4, dtype=torch.bool)
HALF_FULL = torch.tensor([[True, True, False, False]] * 2)
CACHE = CacheSettings(sink=4, window=16)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--analyses sweep speed", "'speed'"),
        ("--ablation --analyses ablations", "add --ablation"),
        ("--sparsities 0.4 1.5", "--sparsities 0.4 1.5"),
        ("--sparsities nan", "--sparsities nan"),
        ("--sizes 4+16 16", "--sizes '16'"),
        ("--sizes prompt+0", "--sizes 'prompt+0'"),
        ("--compare-at 0", "--compare-at 0"),
        ("--savings 1.0", "--savings 1"),
        ("--head-share 2.5", "--head-share is 2.5"),
        ("--batch-size 0", "--batch-size"),
        ("--top-heads 1.5", "--top-heads 1.5"),
        ("--top-heads 25", "--top-heads 25"),
        ("--top-heads 0", "--top-heads 0"),
        ("--gates x.pt", "--gates 'x.pt'"),
        ("--gates", "--gates needs"),
        ("--gates x=absent.pt", "absent.pt"),
        ("--gates x=2x3.pt", "2 layers x 3 KV heads"),
        ("--ablation mine=x.pt", "--ablation: the name 'mine'"),
        ("--policies rkv best", "eviction policy 'best'"),
        ("--published tiny", "--published 'tiny'"),
        ("--extra 2", "--extra is 2"),
        ("--repetition 5 6", "--repetition 5 6"),
        ("--tasks maths", "unknown task 'maths'"),
        ("--data absent.jsonl", "absent.jsonl"),
        ("--oracle absent.json", "--oracle absent.json"),
    ],
)
def test_bad_input_is_one_sentence(inputs: Path, tmp_path: Path, more: str, message: str) -> None:
    HeadGates(torch.rand(2, 3)).save(tmp_path / "2x3.pt")
    with pytest.raises(ValueError, match=re.escape(message)):
        run(inputs, tmp_path / "out", *more.replace("2x3", f"{tmp_path}/2x3").split())
    assert not (tmp_path / "out").exists()


def test_head_counts() -> None:
    assert top_heads((), 24) == (1, 2, 3, 4, 6, 8)
    assert top_heads((), 256) == (3, 5, 13, 26, 38, 51)
    assert top_heads((0.25, 3, 0.01), 24) == (1, 3, 6)


def config(**options) -> StudyConfig:
    return StudyConfig(gates=("a=b",), output_dir=Path("out"), **options)


@pytest.mark.parametrize(
    ("policies", "observation", "extra"),
    [(("rkv", "h2o"), None, 20), (("rkv", "rpc"), None, 32), (("rpc",), 4, 20)],
)
def test_what_policies_keep_always_fits(policies, observation, extra: int) -> None:
    given = config(policies=policies, observation=observation, prompt_variants=False)
    assert default_extra(given, CACHE) == extra
    assert set(policy_templates(replace(given, extra=extra), sink=4)) == set(policies)


def test_policies_come_with_the_other_treatment_of_the_prompt() -> None:
    found = policy_templates(config(policies=("rkv", "random"), extra=20), sink=4)
    kept = {name: policy.protect_prompt for name, policy in found.items()}
    assert kept == {
        "rkv": False,
        "rkv (prompt kept)": True,
        "random": True,
        "random (prompt evictable)": False,
    }


# --- the same bytes


@pytest.mark.parametrize(
    ("policy", "full", "fixed", "share"),
    [
        (SinkWindow(ratio=0.0, extra=20, buffer=16), NONE_FULL, False, 0.6),
        (RKV(ratio=0.0, extra=20, buffer=16, observation=4), HALF_FULL, False, 0.8),
        (RKV(ratio=0.0, extra=20, buffer=16, observation=4), NONE_FULL, True, 0.7),
        (RPC(ratio=0.0, extra=20, buffer=16, R=4), NONE_FULL, False, 0.8),
        (H2O(ratio=0.0, extra=20), HALF_FULL, True, 0.7),
        (TOVA(ratio=0.0, extra=20), NONE_FULL, False, 0.6),
        (RandomEviction(ratio=0.0, extra=20, buffer=16), HALF_FULL, False, 0.6),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_largest_ratio_that_fits(policy, full, fixed: bool, share: float) -> None:
    found = ByteTarget(share, SIZE, LENGTHS, CACHE).match_ratio(policy, full, fixed)
    assert found is not None
    assert replace(found, ratio=0.0) == policy
    held = kv_share(CacheSettings(eviction=found), full, SIZE, LENGTHS, fixed)
    assert share - 0.06 < held <= share  # a buffer of the shortest text is 8% of it
    larger = replace(found, ratio=found.ratio + 2**-14)
    assert kv_share(CacheSettings(eviction=larger), full, SIZE, LENGTHS, fixed) > share


@pytest.mark.parametrize(
    ("share", "policy", "full", "ratio"),
    [
        (0.3, RKV(ratio=0.0, extra=150, observation=4), NONE_FULL, None),
        (0.1, RandomEviction(ratio=0.0, extra=20), NONE_FULL, None),
        (0.3, TOVA(ratio=0.0, extra=20), HALF_FULL, None),  # full heads alone hold half
        (1.01, TOVA(ratio=0.0, extra=20), NONE_FULL, 1.0),  # with the observed query
    ],
)
def test_nothing_and_everything_may_fit(share: float, policy, full, ratio: float | None) -> None:
    found = ByteTarget(share, SIZE, LENGTHS, CACHE).match_ratio(policy, full)
    assert (None if found is None else found.ratio) == ratio


def test_heads_are_compressed_in_their_order_until_it_fits() -> None:
    order = ((1, 3), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 3))
    for share in (0.9, 0.6, 0.3):
        full = ByteTarget(share, SIZE, LENGTHS, CACHE).match_heads(order, (2, 4))
        assert full is not None
        assert kv_share(CACHE, full, SIZE, LENGTHS) <= share
        count = int((~full).sum())
        assert {tuple(head) for head in (~full).nonzero().tolist()} == set(order[:count])
        fewer = full.clone()
        fewer[order[count - 1]] = True
        assert kv_share(CACHE, fewer, SIZE, LENGTHS) > share
    assert ByteTarget(0.01, SIZE, LENGTHS, CACHE).match_heads(order, (2, 4)) is None
