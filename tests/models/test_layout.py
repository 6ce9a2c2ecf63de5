"""Which layers of a model carry gates, from its config alone and against its modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from rlkv import HeadAllocation, HeadGates
from rlkv.gates.allocation import is_decided
from rlkv.models import layout
from rlkv.models.layout import Layout, ranges
from rlkv.models.shape import ModelShape
from tests.helpers import families
from tests.helpers.families import FAMILIES, make_config, make_family

LETTERS = {
    layout.FULL: "f",
    layout.FULL_AND_LINEAR: "h",
    layout.SLIDING: "s",
    layout.SLIDING_AND_LINEAR: "s",
    layout.CHUNKED: "c",
    layout.LINEAR: "l",
    layout.LATENT: "m",
    layout.SHARED: "r",
    layout.NONE: "-",
}
# transformers' configs call them full, and their attention is refused as a whole
IN_OWN_CODE = {"gpt_neo", "reformer", "recurrent_gemma"}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - IN_OWN_CODE))
def test_layers_of_every_family(family: str) -> None:
    line = FAMILIES[family]
    if (line.model_type or family) not in CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    if "l" * len(line.kinds) == line.kinds:
        with pytest.raises(ValueError, match="no attention heads"):
            Layout.from_config(make_config(family))
        return
    found = Layout.from_config(make_config(family))
    letters = "".join(LETTERS.get(layer.kind, "x") for layer in found.layers)
    assert letters.startswith(line.kinds)
    gated = [number for number, letter in enumerate(letters) if letter in "fh"]
    assert found.gated == [number for number, count in enumerate(found.heads) if count] == gated
    if "x" in letters:
        with pytest.raises(ValueError, match=r"layers of kind \w+"):
            found.check()


def test_sizes_are_those_of_the_layers_with_gates() -> None:
    """In Gemma 4 they differ from those of sliding layers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    heads |= {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=6, **heads)
    found = Layout.from_config(config)
    sizes = [(layer.kv_heads, layer.head_dim) for layer in found.layers]
    assert sizes == [(2, 8)] * 5 + [(1, 16)]
    assert found.heads == (0, 0, 0, 0, 0, 1)
    shape = ModelShape.from_config(config)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (6, 1, 16)


def test_a_model_of_one_layer() -> None:
    assert Layout.from_config(make_config("llama", num_hidden_layers=1)).heads == (2,)


def test_query_heads_are_those_of_the_layers_with_gates() -> None:
    """In Step 3.7 they differ from those of sliding layers."""
    if "step3p7" not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know step3p7")
    text = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = CONFIG_MAPPING["step3p7"](text_config=text | {"num_sliding_attention_heads": 4})
    assert [layer.query_heads for layer in Layout.from_config(config).layers] == [4, 8]
    assert ModelShape.from_config(config).num_query_heads == 8


def test_modules_are_found_by_the_numbers_of_their_layers() -> None:
    model = make_family("nemotron_h")
    found = Layout.from_config(model.config)
    assert [(name, module.layer_idx) for name, module in found.modules(model)] == [
        ("model.layers.2.mixer", 2)
    ]
    assert found.describe() == (
        "linear attention in layers 0; no attention in layers 1, 3; full attention in layers 2"
    )
    model.model.layers[3].mixer = model.model.layers[2].mixer
    model.model.layers[0].mixer.num_key_value_groups = 1
    model.model.layers[0].mixer.layer_idx = 2
    with pytest.raises(ValueError, match="do not belong to one layer each"):
        found.modules(model)


def test_a_model_that_is_cut_to_its_first_layers() -> None:
    config = make_config("olmo3")
    config.num_hidden_layers = 2
    found = Layout.from_config(config)
    assert found.describe() == "sliding-window attention in layers 0-1"
    config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"has 5 layers but names the kinds of 4 \(layer_types\)"):
        Layout.from_config(config)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert ranges([]) == ""


GATES: dict[str, Any] = {
    "of another layout": ((2, 0, 2, 0), r"layers 0, 2 \(2 KV heads\).* in 1, 3 \(2 KV heads\)"),
    "of a dense model": (None, r"layers 0-3 \(2 KV heads\).* in 1, 3"),
    "of fewer heads": ((0, 2, 0, 1), r"layers 1, 3 \(1 or 2 KV heads\)"),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_of_other_layers_are_refused(name: str) -> None:
    heads, sentence = GATES[name]
    own = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = CONFIG_MAPPING["olmo3"](**own, hidden_size=32, layer_types=kinds)
    HeadGates(torch.ones(4, 2), heads=(0, 2, 0, 2)).check_model(config)
    with pytest.raises(ValueError, match=sentence) as raised:
        HeadGates(torch.ones(4, 2), heads=heads).check_model(config)
    assert "\n" not in str(raised.value)


def test_sparsity_counts_heads_that_can_be_compressed() -> None:
    alpha = torch.ones(6, 4)
    alpha[5] = torch.tensor([0.1, 0.4, 0.2, 0.3])
    alpha[2, :2] = torch.tensor([0.05, 0.9])
    gates = HeadGates(alpha, heads=(0, 0, 2, 0, 0, 4))
    for sparsity, expected in ((0.0, []), (0.5, [(2, 0), (5, 0), (5, 2)]), (1.0, None)):
        chosen = HeadAllocation.from_gates(gates, sparsity)
        assert chosen.sparsity == sparsity
        assert chosen.num_full + chosen.num_compressible == 6
        if expected is not None:
            assert (~chosen.full).nonzero().tolist() == [list(place) for place in expected]
        else:
            assert torch.equal(chosen.full, ~gates.gated)
            assert is_decided(gates, chosen.full)
    by_layer = HeadAllocation.from_gates(gates, 0.5, scope="layer")
    assert (~by_layer.full).sum(1).tolist() == [0, 0, 1, 0, 0, 2]
    with pytest.raises(ValueError, match="layer 0, head 1, which has no gate"):
        HeadAllocation.from_order([(0, 1)], 6, 4, 0.5, gates.heads)
    with pytest.raises(ValueError, match="without full attention"):
        HeadAllocation(torch.zeros(6, 4) > 0, gates.heads)


def test_the_page_of_models_shows_the_table() -> None:
    """It is written by ``python -m tests.helpers.families``."""
    assert families.PAGE.read_text().endswith("\n\n" + families.table())
