"""What the plugin is asked to do, what it refuses, and heads dealt to ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.eviction import make_policy
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm.settings import deal_heads, parse_settings, read_request
from tests.helpers.models import make_tiny_model
from tests.helpers.paths import PUBLISHED_GATES

REQUEST: dict[str, Any] = {"gates": "gates.safetensors", "sparsity": 0.5}
NO_GATES = dict.fromkeys(REQUEST)
RKV = {"name": "rkv", "budget": 64}


def test_configuration_goes_before_the_environment() -> None:
    environment = {"RLKV_GATES": "other", "RLKV_SPARSITY": "0.25"}
    assert read_request({"rlkv": REQUEST}, environment) == REQUEST
    assert read_request({}, environment) == {"gates": "other", "sparsity": 0.25}
    assert read_request({"rlkv": None}, environment) is None
    assert read_request({"other": 1}, {"RLKV_GATES": ""}) is None


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({"rlkv": "gates"}, {}, "must be a mapping"),
        ({}, {"RLKV_GATES": "gates"}, r"^RLKV_SPARSITY is"),
        ({}, {"RLKV_SPARSITY": "0.5"}, r"^RLKV_GATES is"),
        ({}, {"RLKV_GATES": "gates", "RLKV_SPARSITY": "half"}, r"^RLKV_SPARSITY .*half"),
    ],
)
def test_half_a_request_is_an_error(
    config: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_request(config, environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 1.5}, r"^rlkv: sparsity .*1\.5"),
        ({"sparsity": "0.5"}, r"^rlkv: sparsity .*'0\.5'"),
        ({"sparsity": None}, r"^rlkv: sparsity .*None"),
        ({"gates": ""}, r"^rlkv: gates\b"),
        ({"sink": -1}, r"^rlkv: sink\b.*-1"),
        ({"window": 0}, r"^rlkv: window\b.*0"),
        ({"scope": "head"}, r"^rlkv: scope\b.*'head'"),
        ({"prefill": "none"}, r"^rlkv: prefill\b.*'none'"),
        ({"prefill": "published"}, r"^rlkv: prefill\b.*'published'"),
        ({"prefill": "full", "eviction": RKV}, r"^rlkv: prefill\b.*eviction"),
        ({"sparsty": 1}, "'sparsty'"),
        ({"eviction": "rkv"}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"budget": 9}}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"name": "rkw"}}, "'rkw'"),
        ({"eviction": {"name": "rkv", "budgets": 9}}, "budgets"),
        ({"eviction": {"name": "rkv", "budget": 3}}, "budget is 3"),
        ({"eviction": {"name": "h2o", "budget": 64}}, "'h2o'"),
        ({"eviction": {"name": "rkv", "ratio": 0.3}}, "ratio"),
        ({"eviction": {**RKV, "protect_prompt": True}}, "protect_prompt"),
        ({"eviction": RKV, "sink": 4}, "sink, window and protect_prompt"),
        ({"eviction": RKV, "protect_prompt": True}, "sink, window and protect_prompt"),
        ({"protect_prompt": "yes"}, r"^rlkv: protect_prompt\b.*'yes'"),
        ({"one_launch": False}, "^rlkv: unknown setting 'one_launch': choose from"),
        ({"full": ["01"], "sink": 4} | NO_GATES, "^rlkv: full comes without gates.* give both"),
        ({"full": ["01"], "gates": None}, "^rlkv: full says which.* and so does sparsity"),
        ({"full": [[0, 1]]} | NO_GATES, r"^rlkv: full is \[\[0, 1\]\]: it must be a list with"),
        ({"full": ["01", "0x"]} | NO_GATES, "^rlkv: full is .*0x"),
        ({"full": "01"} | NO_GATES, "^rlkv: full is '01'"),
        ({"full": []} | NO_GATES, "^rlkv: full is"),
        ({"reference_prompt": 0}, r"^rlkv: reference_prompt\b.*0"),
        ({"mode": "save"}, "mode is 'save': it must be memory or keep or lossless"),
        ({"mode": "lossless", "prefill": "full"}, "always reads prompts in full: leave prefill"),
        ({"mode": "keep", "aligned_windows": False}, "mode 'keep' reads whole blocks"),
        ({"mode": "keep", "keep_prompt_window": True}, "mode 'keep' keeps every block"),
        ({"mode": "keep", "eviction": RKV}, "do not apply with eviction"),
        ({"aligned_windows": 1.5}, "aligned_windows is 1.5"),
        ({"mode": "keep", "aligned_windows": 0}, "aligned_windows is 0: it must be"),
        ({"aligned_windows": True, "eviction": RKV}, "do not apply with eviction"),
        ({"keep_prompt_window": 1.5}, "keep_prompt_window is 1.5: it must be"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings({**REQUEST, **change})


@pytest.mark.parametrize("absent", ["gates", "sparsity"])
def test_missing_settings_are_named(absent: str) -> None:
    with pytest.raises(ValueError, match=f"^rlkv: {absent} is missing: both"):
        parse_settings({key: value for key, value in REQUEST.items() if key != absent})


def test_settings_are_read_back() -> None:
    settings = parse_settings({**REQUEST, "sink": 4, "scope": "layer"})
    assert parse_settings(settings.to_request()) == settings
    policy = make_policy("snapkv", budget=64, kernel=5)
    for eviction in ({"name": "snapkv", "budget": 64, "kernel": 5}, policy.describe()):
        evicting = parse_settings({**REQUEST, "eviction": eviction})
        assert parse_settings(evicting.to_request()).policy() == policy


def test_gates_that_ask_for_a_protected_prompt(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    gates = HeadGates(torch.rand(3, 4), deploy_protect_prompt=True)
    gates.save(tmp_path / "gates.pt")
    request = {"gates": str(tmp_path / "gates.pt"), "sparsity": 0.5}
    for asked, protects in ((None, True), (False, None), (True, True)):
        own = {"protect_prompt": asked, "reference_prompt": 90}
        resolved = parse_settings({**request, **own}).resolved(model.config)
        assert (resolved.sink, resolved.window, resolved.protect_prompt) == (16, 64, protects)
        assert resolved.reference(500) == (500, 90 if protects else 0)
        assert parse_settings(resolved.to_request()) == resolved
    eviction = {"name": "rkv", "budget": 64}
    evicting = parse_settings({**request, "eviction": eviction}).resolved(model.config)
    assert evicting.policy() == make_policy(**eviction)


# --- ranks of tensor parallelism

MODELS = ("Llama-3.1-8B-R1", "Qwen-2.5-7B-R1", "Qwen-3-4B-Thinking")
CASES = [(model, ranks) for model in MODELS for ranks in (1, 2, 4)]
CASES += [(MODELS[0], 8), (MODELS[2], 8)]
MOST_ADDED = {1: 0.0, 2: 0.024, 4: 0.08, 8: 0.092}  # of the bytes at 3,000 tokens: docs/serve.md


def entries(allocation: HeadAllocation) -> int:
    return 3000 * allocation.num_full + 80 * allocation.num_compressible


@pytest.mark.parametrize("sparsity", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize(("model", "ranks"), CASES, ids=str)
def test_ranks_have_equal_shares(model: str, sparsity: float, ranks: int) -> None:
    gates = HeadGates.load(PUBLISHED_GATES / "rlkv" / model)
    layers, heads = gates.alpha.shape
    asked = HeadAllocation.from_gates(gates, sparsity)
    full = asked.rounded_up(gates, ranks).full
    dealt = deal_heads(full, ranks)
    assert dealt.shape == (ranks, layers, heads // ranks)
    for layer in range(layers):
        assert sorted(dealt[:, layer].flatten().tolist()) == list(range(heads))
    kinds = torch.stack([full.gather(1, own) for own in dealt])
    assert kinds.sum((1, 2)).tolist() == [int(full.sum()) // ranks] * ranks
    # ranks wait for each other in every layer
    assert int((kinds.sum(2).amax(0) - kinds.sum(2).amin(0)).max()) <= 1
    if sparsity <= 0.8:
        more = entries(asked.rounded_up(gates, ranks)) / entries(asked) - 1
        assert more <= MOST_ADDED[ranks]
    added = [head for head in compression_order(gates)[::-1] if full[head] and not asked.full[head]]
    assert len(added) == -asked.num_full % ranks
    assert not (asked.full & ~full).any()
    left = [float(gates.alpha[head]) for head in compression_order(gates) if not full[head]]
    assert all(float(gates.alpha[head]) >= max(left, default=0.0) for head in added)


def test_an_allocation_that_is_not_even_is_refused() -> None:
    with pytest.raises(ValueError, match="7 full heads"):
        deal_heads(torch.arange(16).view(4, 4) < 7, 2)
