"""Families of models: each works exactly, or is refused in one sentence before any text is read."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

import rlkv
from rlkv import HeadAllocation
from rlkv.attention.head_gate import HeadGateConfig
from rlkv.eviction import RKV, RandomEviction
from rlkv.models.shape import ModelShape
from rlkv.rollout.graphed import graphed_step
from tests.helpers.equalities import CHECKS, Case, StockDiffers, unchanged
from tests.helpers.families import FAMILIES, Family, make_family
from tests.helpers.models import SOFTMAXES, make_tiny_model

peft = pytest.importorskip("peft")
IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(1))
SERVED = ("granite", "olmo2", "qwen2", "seed_oss")  # of those without a line: docs/models.md
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_and_serving(family: str) -> None:
    """Run every check of the matrix that the family's line does not refuse."""
    line = known(family)
    case = Case(family)
    if line.gates:
        gates_are_refused(case.model, line.gates)
    else:
        check(case, "gates 1", "gates 0", "padding", "saved")
    if line.serving:
        serving_is_refused(case.model, line.serving)
    elif line.gates:
        serving_works(case.model)
    else:
        check(case, "sparsity 0", "reallocated", "turns", "bytes")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(NAMES) - set(FAMILIES)))
def test_families_without_a_line(family: str) -> None:
    """All others of transformers: each works, or is refused in one sentence."""
    try:
        case = Case(family)
    except Exception as error:
        pytest.skip(f"no tiny {family} can be made ({error})")
    try:
        check(case, *CHECKS)
    except ValueError as error:
        assert family not in SERVED
        refused = re.escape(str(error))
        gates_are_refused(case.model, refused)


def known(family: str) -> Family:
    """Return a line of the table, if the installed transformers knows the family."""
    line = FAMILIES[family]
    if (line.model_type or family) not in NAMES:
        pytest.skip(f"this transformers does not know {family}")
    return line


def check(case: Case, *names: str) -> None:
    for name in names:
        try:
            CHECKS[name](case)
        except StockDiffers:
            assert name == "padding"


def gates_are_refused(model: Any, sentence: str) -> None:
    with unchanged(model), pytest.raises(ValueError, match=sentence) as raised:
        peft.get_peft_model(model, HeadGateConfig(sink=1, window=2))
    assert "\n" not in str(raised.value)


def serving_is_refused(model: Any, sentence: str) -> None:
    entered = False
    allocation = HeadAllocation(torch.ones(_heads(model)) > 0)
    with (
        unchanged(model),
        pytest.raises(ValueError, match=sentence) as raised,
        rlkv.compress(model, allocation),
    ):
        entered = True
    assert not entered
    assert "\n" not in str(raised.value)


def serving_works(model: Any) -> None:
    """Check an allocation by hand, for families whose heads cannot be gated."""
    expected = logits(model)
    text = model.generate(IDS, **GREEDY)
    for full, sizes in ((True, {}), (False, {"sink": 0, "window": 64})):
        allocation = HeadAllocation(torch.full(_heads(model), full))
        with rlkv.compress(model, allocation, prefill="local", **sizes):
            assert largest(logits(model) - expected) < 1e-4
            assert torch.equal(model.generate(IDS, **GREEDY), text)
    none_full = HeadAllocation(torch.zeros(_heads(model)) > 0)
    with rlkv.compress(model, none_full, sink=1, window=2, prefill="local"):
        assert largest(logits(model) - expected) > 1e-4


def _heads(model: Any) -> tuple[int, int]:
    try:
        shape = ModelShape.from_config(model.config)
    except ValueError:  # without attention
        return (2, 2)
    return (shape.num_layers, shape.num_kv_heads)


ALL_FULL = HeadAllocation(torch.ones(3, 4) > 0)


def test_weights_of_attention_are_refused() -> None:
    model = make_tiny_model("llama")
    asked = {"output_attentions": True}
    with rlkv.compress(model, ALL_FULL):
        with pytest.raises(ValueError, match="output_attent"):
            model(IDS, **asked)
        with pytest.raises(ValueError, match="output_attent"):
            model.generate(IDS, **GREEDY, **asked, return_dict_in_generate=True)
    eager = make_tiny_model("llama", attn_implementation="eager")
    eager.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attent"), rlkv.compress(eager, ALL_FULL):
        pass
    with pytest.raises(ValueError, match="output_attent"):
        peft.get_peft_model(eager, HeadGateConfig())
    gated = peft.get_peft_model(model, HeadGateConfig())
    with pytest.raises(ValueError, match="output_attent"):
        gated(IDS, **asked)


def test_packed_texts_and_models_without_a_head_are_refused() -> None:
    model = make_tiny_model("llama")
    packed = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
    positions = torch.arange(20).expand(2, -1)
    expected = model(IDS).logits
    with rlkv.compress(model, ALL_FULL):
        assert largest(model(IDS, position_ids=positions).logits - expected) < 1e-5
        for use_cache in (True, False):
            with pytest.raises(ValueError, match="start again"):
                model(IDS, position_ids=packed, use_cache=use_cache)
    with (
        pytest.raises(ValueError, match="AutoModelForCausalLM"),
        rlkv.compress(model.base_model, ALL_FULL),
    ):
        pass


@pytest.mark.parametrize(
    ("family", "eviction"),
    [("llama", None), ("gemma3_text", RKV(budget=6, buffer=2, observation=2))],
)
def test_copies_of_a_cache_branch_the_text_and_do_not_hold_the_model(
    family: str, eviction: Any
) -> None:
    model = make_tiny_model(family) if family == "llama" else make_family(family)
    none_full = HeadAllocation(torch.zeros(_heads(model)) > 0)
    with rlkv.compress(model, none_full, eviction=eviction) as session:
        first = model.generate(IDS, **GREEDY)
        cache = session.cache
        file = io.BytesIO()
        torch.save(cache, file)
        assert file.tell() < 500_000
        file.seek(0)
        branches = [torch.load(file, weights_only=False), copy.deepcopy(cache)]
        turn = {**GREEDY, "attention_mask": torch.ones(2, first.shape[1] + 20)}
        states = cache.used_nbytes()
        other = torch.cat([first, IDS + 1], dim=1)
        model.generate(other, past_key_values=copy.deepcopy(cache), **turn)
        assert cache.used_nbytes() == states  # not touched by the other branch
        more = torch.cat([first, IDS], dim=1)
        text = model.generate(more, past_key_values=cache, **turn)
        for branch in branches:
            assert torch.equal(model.generate(more, past_key_values=branch, **turn), text)


@pytest.mark.parametrize("length", [4, 20], ids=["within the window", "beyond the window"])
def test_texts_of_a_processor_without_images(length: int) -> None:
    """Gemma 3's processor marks the kind of each token, so its masks are not the plain ones."""
    model = make_family("gemma3")
    assert 4 < model.config.get_text_config().sliding_window < 20
    kinds = torch.zeros(2, length, dtype=torch.long)
    inputs = {"input_ids": IDS[:, :length], "attention_mask": torch.ones_like(kinds)}
    inputs["attention_mask"][1, :2] = 0
    inputs["token_type_ids"] = kinds
    expected = model.generate(**inputs, **GREEDY)
    with rlkv.compress(model, HeadAllocation(torch.ones(6, 2) > 0)):
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
        kinds[:, 1:3] = 1  # an image
        with pytest.raises(ValueError, match="or with images"):
            model.generate(**inputs, **GREEDY)
    gated = peft.get_peft_model(model, HeadGateConfig(sink=1, window=3)).eval()
    with pytest.raises(ValueError, match="no image or prefix masks"):
        gated.generate(**inputs, **GREEDY)
    kinds.zero_()
    assert torch.equal(gated.generate(**inputs, **GREEDY), expected)


def test_layers_whose_keys_others_read_stay_as_they_are() -> None:
    """Layer 3 is the last with full attention and keys of its own: layer 5 reads them."""
    model = make_family("gemma4_shared")
    assert model.config.num_kv_shared_layers == 2
    none_full = HeadAllocation(torch.tensor([1, 0, 1, 1, 1, 1])[:, None].expand(6, 2) > 0)
    with rlkv.compress(model, none_full, sink=1, window=2) as session:
        model.generate(IDS, **GREEDY)
        cache = session.cache
    assert cache is not None
    assert cache.layers[3].keys.shape[2] == 25  # all tokens that were read
    assert cache.used_nbytes() < cache.full_nbytes()
    assert not any(hasattr(module, "rlkv_unchanged") for module in model.modules())


@pytest.mark.parametrize("family", SOFTMAXES)
def test_policies_that_score_attention_of_another_softmax(family: str) -> None:
    """They are refused before any text, also where the model has been served without one."""
    model = make_tiny_model(family)
    with rlkv.compress(model, ALL_FULL):
        pass
    for _ in range(2):
        with (
            unchanged(model),
            pytest.raises(ValueError, match=r"^rkv scores tokens by their attention without"),
            rlkv.compress(model, eviction=RKV(budget=6, buffer=2, observation=2)),
        ):
            pass
    with rlkv.compress(model, eviction=RandomEviction(budget=64)):
        found = model.generate(IDS, **GREEDY)
    assert torch.equal(found, model.generate(IDS, **GREEDY))


def test_layers_with_linear_states_neither_join_rows_nor_are_recorded() -> None:
    model = make_family("falcon_h1")
    none_full = HeadAllocation(torch.zeros(_heads(model)) > 0)
    with rlkv.compress(model, none_full) as session, torch.no_grad():
        model(IDS)
        assert session.cache is not None
        assert not session.cache.can_join
        for layer in session.cache.layers:
            layer.by_kernel = True  # as it is on a GPU
        ids = IDS[:, :1]
        rows = torch.zeros(2, dtype=torch.int64)
        assert graphed_step(model, session.cache, ids, rows, rows == 0) is None


def test_a_model_is_tried_once() -> None:
    model = make_tiny_model("llama")
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        with rlkv.compress(model, ALL_FULL):
            pass
    assert len(calls) == 1
