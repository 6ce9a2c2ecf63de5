"""What holds for every policy: counts, forced entries, padding, dtypes, pieces; the registry."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.eviction import (
    POLICIES,
    RKV,
    TOVA,
    EvictionPolicy,
    SinkWindow,
    base,
    make_policy,
    parse_options,
    register,
)
from tests.helpers.naive_eviction import OldestKey, random_entries
from tests.helpers.paths import ROOT

BUDGET = 24
# options that leave room for a choice in the budget; {} for policies that are not named
VARIANTS: Mapping[str, list[dict[str, Any]]] = {
    "sink_window": [{"sink": 4}],
    "rkv": [{}, {"variant": "published"}, {"recent_similar": 3, "sink": 3, "kernel": 6}],
    "snapkv": [{}, {"variant": "published", "observation": 4, "kernel": 3}],
    "rpc": [{"R": 10}, {"R": 6, "aggregation": "group", "sink": 2, "protect_prompt": False}],
    "h2o": [{}, {"sink": 5}],
    "tova": [{}, {"sink": 2, "observation": 4}],
    "random": [{"seed": 7, "sink": 2, "protect_prompt": False}],
}
CASES = [
    make_policy(name, budget=BUDGET, **options)
    for name in POLICIES
    for options in VARIANTS.get(name, [{}])
]
every_policy = pytest.mark.parametrize("policy", CASES, ids=lambda policy: policy.name)


@every_policy
@pytest.mark.parametrize(("n", "group_size"), [(63, 1), (500, 2), (63, 4)])
def test_a_batch_keeps_what_its_rows_keep_alone(
    policy: EvictionPolicy, n: int, group_size: int
) -> None:
    """Exactly the budget, in order, with sinks and recent entries; padding is never read."""
    padding = torch.tensor([0, 1, 20, n - BUDGET - 3])
    keys, queries = random_entries(4, n, group_size, policy.observation, seed=n)
    valid = torch.arange(n) >= padding[:, None]
    keys[~valid[:, None].expand(keys.shape[:3])] = torch.nan
    scores = policy.scores(keys, queries, valid)
    assert scores.shape == (4, 3, n)
    assert scores.dtype == torch.float32
    assert scores[valid[:, None].expand_as(scores)].isfinite().all()
    kept = policy.select(keys, queries, BUDGET, valid)
    assert kept.shape == (4, 3, BUDGET)
    assert (kept.diff(dim=-1) > 0).all()
    recent = int(policy.recent(torch.tensor([BUDGET]))[0])
    for row, first in enumerate(padding.tolist()):
        forced = set(range(first, first + policy.sink)) | set(range(n - recent, n))
        assert all(forced <= set(head) for head in kept[row].tolist())
        alone = policy.select(keys[row : row + 1, :, first:], queries[row : row + 1], BUDGET)
        assert torch.equal(kept[row], alone[0] + first)


@every_policy
def test_rows_shorter_than_the_budget_are_kept_whole(policy: EvictionPolicy) -> None:
    keys, queries = random_entries(3, 40, 2, policy.observation, seed=8)
    valid = torch.arange(40) >= torch.tensor([0, 33, 39])[:, None]
    kept = policy.select(keys, queries, BUDGET, valid)
    assert (kept[0] >= 0).all()
    for row, first in ((1, 33), (2, 39)):
        expected = torch.tensor([-1] * (BUDGET - (40 - first)) + list(range(first, 40)))
        assert (kept[row] == expected).all()
    everything = policy.select(keys[:1], queries[:1], 45)
    assert (everything == torch.tensor([-1] * 5 + list(range(40)))).all()


@every_policy
def test_bfloat16_is_scored_in_float32(policy: EvictionPolicy) -> None:
    keys, queries = (x.bfloat16() for x in random_entries(2, 100, 2, policy.observation, seed=9))
    kept = policy.select(keys, queries, BUDGET)
    assert torch.equal(kept, policy.select(keys.float(), queries.float(), BUDGET))


@every_policy
def test_pieces_change_nothing(policy: EvictionPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    many = 63 if policy.accumulates else policy.observation
    keys, queries = random_entries(2, 63, 2, many, seed=10)
    valid = torch.arange(63) >= torch.tensor([0, 9])[:, None]
    whole = policy.select(keys, queries, BUDGET, valid)
    for floats in (200, 1500):
        monkeypatch.setattr(base, "FLOATS", floats)
        assert torch.equal(policy.select(keys, queries, BUDGET, valid), whole)


def test_select_refuses_what_does_not_fit() -> None:
    keys, queries = random_entries(2, 60, 2, 8, seed=4)
    policy, valid = RKV(budget=24), torch.ones(2, 59, dtype=torch.bool)
    for arguments, message in (
        ((keys, queries, 4), "budget is 4"),
        ((keys, queries[:, :4], 24), r"\[2, 4, 8, 16\]"),
        ((keys[0], queries, 24), r"keys must be \[B, H, N, D\]"),
        ((keys, queries, 24, valid), r"valid.*\[2, 59\]"),
        ((keys[:, :, :5], queries, 24), "8 queries.*5"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.select(*arguments)


def test_sinks_are_kept_once() -> None:
    for make in (RKV, SinkWindow):
        with pytest.raises(ValueError, match="sink is 4: it must be 0 with protect_prompt"):
            make(budget=64, sink=4, protect_prompt=True)
    with pytest.raises(ValueError, match="buffer \\+ sink \\+ observation, 208"):
        RKV(ratio=0.5, sink=72, variant="rlkv_tables", compacted=136)


def test_options_are_read_from_words() -> None:
    texts = ["variant=published", "lam=0.2", "protect_prompt=True", "budget=64"]
    options = {"variant": "published", "lam": 0.2, "protect_prompt": True, "budget": 64}
    assert parse_options(texts) == options
    for wrong, message in ((["lam"], "name=value"), (["lam=1", "lam=2"], "lam is given twice")):
        with pytest.raises(ValueError, match=message):
            parse_options(wrong)


# The registry


def test_all_policies_are_there_by_name() -> None:
    assert set(POLICIES) >= {"sink_window", "rkv", "rpc", "snapkv", "h2o", "tova", "random"}
    assert all(POLICIES[name].name == name for name in POLICIES)
    assert make_policy("rkv", budget=64, lam=0.2) == RKV(budget=64, lam=0.2)
    assert TOVA(budget=9).describe()["name"] == "tova"
    with pytest.raises(TypeError):
        POLICIES["mine"] = RKV  # type: ignore[index]
    with pytest.raises(ValueError, match="'rkv'"):
        register(type("Mine", (OldestKey,), {"name": "rkv"}))


# the one file; its one line is the decorator (in the package: and the import in
# rlkv/eviction/__init__.py)
NEW_POLICY = '''
from dataclasses import dataclass

from rlkv.eviction import EvictionPolicy, register


@register
@dataclass(frozen=True)
class FirstElement(EvictionPolicy):
    """Keep the keys with the largest first element."""

    def scores(self, keys, queries, valid):
        return keys[..., 0].float().masked_fill(~valid[:, None], 0)
'''


@pytest.mark.slow
def test_a_new_policy_is_one_file_and_one_line(tmp_path: Path) -> None:
    """It goes through all tests that hold for any policy."""
    (tmp_path / "first_element.py").write_text(NEW_POLICY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "first_element", "-k", "firstelement and not new_policy"]
    command += ["tests/eviction", "tests/cache"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 10
