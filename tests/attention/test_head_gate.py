"""The PEFT method: what is trained, saved and loaded, several adapters, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from rlkv.attention.head_gate import (
    HeadGateConfig,
    gate_counts,
    gate_parameters,
    gates_matrix,
    set_gates,
)
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.families import make_config, make_family
from tests.helpers.gated import fill_gates
from tests.helpers.models import dispatched, make_tiny_model

IDS = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft asks the hub whether a folder is a repository too, half a minute without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def gated(family: str = "llama", base: Any = None, **settings: Any) -> PeftModel:
    config = HeadGateConfig(**{"sink": 2, "window": 8, **settings})
    return get_peft_model(make_tiny_model(family) if base is None else base, config)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# --- what is trained, saved and loaded


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_models_that_accelerate_dispatched_take_gates(is_offloaded: bool, tmp_path: Path) -> None:
    base = make_tiny_model("llama")
    place = tmp_path if is_offloaded else None
    models = [gated(base=of, init_value=0.5) for of in (base, dispatched(base, place))]
    assert torch.equal(logits(models[0]), logits(models[1]))


@pytest.mark.parametrize("family", ["gemma3", "nemotron_h"])
def test_adapters_that_name_other_modules_are_refused_and_put_on_by_layers(
    family: str, tmp_path: Path
) -> None:
    """Their attention is not at ``model.layers.N.self_attn``, which HeadGates.save writes."""
    base = make_family(family)
    model = gated(base=copy.deepcopy(base))
    fill_gates(model, "random")
    gates = HeadGates(gates_matrix(model), heads=gate_counts(model))
    gates.save(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"differ in the modules.*set_gates") as raised:
        PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    assert "\n" not in str(raised.value)
    other = gated(base=base)
    set_gates(other, HeadGates.load(tmp_path / "ours").alpha)
    assert torch.equal(gates_matrix(other), gates.alpha)


def test_gates_of_many_layers_are_loaded_where_peft_shortens_their_names(tmp_path: Path) -> None:
    """Linear layers have no ``self_attn``, so from 20 on peft writes that name alone."""
    config = make_config("lfm2")
    config.num_hidden_layers = 40
    config.layer_types = ["conv", "full_attention"] * 20
    base = AutoModelForCausalLM.from_config(config).eval()
    model = gated(base=copy.deepcopy(base))
    fill_gates(model, "random")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert named == ["self_attn"]
    gates = HeadGates.load(tmp_path)
    gates.check_model(config)
    assert torch.equal(gates.alpha, gates_matrix(model))


def test_saving_keeps_the_gates_and_their_sizes_only(family: str, tmp_path: Path) -> None:
    make_tiny_model(family).save_pretrained(tmp_path / "base")
    model = gated(base=AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 3
    assert all(name.endswith("self_attn.rlkv_gate.alpha.default") for name in names)
    assert torch.equal(gates_matrix(model), torch.ones(3, 4))
    fill_gates(model, "random")
    expected, matrix = logits(model), gates_matrix(model)
    model.save_pretrained(tmp_path / "gates")
    stored = load_file(tmp_path / "gates" / "adapter_model.safetensors")
    assert [tuple(tensor.shape) for tensor in stored.values()] == [(4,)] * 3
    config = json.loads((tmp_path / "gates" / "adapter_config.json").read_text())
    assert (config["sink"], config["window"], config["peft_type"]) == (2, 8, "HEAD_GATE")
    loaded = PeftModel.from_pretrained(make_tiny_model(family), tmp_path / "gates")
    assert torch.equal(gates_matrix(loaded), matrix)
    assert torch.equal(logits(loaded), expected)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    by_name = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "gates")
    assert torch.equal(logits(by_name.eval()), expected)
    model.get_base_model().config.save_pretrained(tmp_path / "again")
    before, again = (tmp_path / name / "config.json" for name in ("base", "again"))
    assert json.loads(before.read_text()) == json.loads(again.read_text())  # nothing of ours leaks


@pytest.mark.parametrize("head", [True, False])
def test_peft_and_transformers_load_what_gates_save(head: bool, tmp_path: Path) -> None:
    make_tiny_model("qwen3").save_pretrained(tmp_path / "base")
    model = gated(base=AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    fill_gates(model, "random")
    matrix = gates_matrix(model)
    shape = ModelShape.from_config(model.config, str(tmp_path / "base"))
    HeadGates(matrix, model=shape, sink=2, window=8).save(tmp_path / "gates")
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    auto = AutoModelForCausalLM if head else AutoModel
    for folder in (tmp_path / "gates", tmp_path / "peft"):
        by_adapter = auto.from_pretrained(tmp_path / "base")
        by_adapter.load_adapter(folder)
        for loaded in (auto.from_pretrained(folder), by_adapter):
            assert torch.equal(gates_matrix(loaded), matrix)
            if head:
                assert torch.equal(logits(loaded), logits(model))


def test_disabled_and_unloaded_models_are_the_untouched_one(family: str) -> None:
    base = make_tiny_model(family)
    expected = logits(base)
    model = gated(base=base)
    fill_gates(model, "random")
    with_gates = logits(model)
    assert (with_gates - expected).abs().max() > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), with_gates)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 3
    plain = model.unload()
    assert torch.equal(logits(plain), expected)
    assert plain.config._attn_implementation == "sdpa"
    assert not [name for name, _ in plain.named_parameters() if "rlkv" in name]
    assert "generate_batch" not in vars(plain)
    assert torch.equal(logits(gated(base=plain)), expected)


def test_several_adapters_have_gates_and_sizes_of_their_own() -> None:
    model = gated(init_value=0.0)
    first = logits(model)
    model.add_adapter("other", HeadGateConfig(sink=4, window=30, init_value=0.0))
    assert torch.equal(logits(model), first)
    model.set_adapter("other")
    assert torch.equal(logits(model), logits(gated(sink=4, window=30, init_value=0.0)))
    assert (logits(model) - first).abs().max() > 0.01
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="default, other"):
        logits(model)
    model.set_adapter("other")
    with pytest.warns(UserWarning, match="default"):
        model.delete_adapter("other")
    assert torch.equal(logits(model), first)
    assert not [name for name, _ in model.named_parameters() if "other" in name]
    with pytest.raises(ValueError, match=r"'default' is the only set.*unload"):
        model.delete_adapter("default")
    assert torch.equal(logits(model), first)


def test_a_copy_of_a_gated_model_works_on_its_own() -> None:
    model = gated()
    fill_gates(model, "random")
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    with torch.no_grad():
        gate_parameters(model)[0][1].zero_()
    assert not torch.equal(logits(twin), logits(model))


def test_gates_outside_of_0_to_1_are_clipped(tmp_path: Path) -> None:
    model = gated()
    gate_parameters(model)[1][1].data[2] = 3.0
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"outside of \[0, 1\], clipped"):
        loaded = PeftModel.from_pretrained(make_tiny_model("llama"), tmp_path)
    assert torch.equal(gates_matrix(loaded), torch.ones(3, 4))


def test_gates_of_another_shape_are_not_put_on() -> None:
    with pytest.raises(ValueError, match=r"the model has gates \[3, 4\], the matrix is \[9, 12\]"):
        set_gates(gated(), torch.zeros(9, 12))


def test_an_adapter_with_a_nan_is_refused(tmp_path: Path) -> None:
    model = gated()
    gate_parameters(model)[1][1].data[2] = float("nan")
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ValueError, match=r"layers\.1\..*NaN") as raised:
        PeftModel.from_pretrained(make_tiny_model("llama"), tmp_path)
    assert "\n" not in str(raised.value)


# --- what is refused


@pytest.mark.parametrize("other", [{"num_hidden_layers": 2}, {"num_key_value_heads": 2}])
def test_gates_of_another_shape_are_refused(other: dict[str, int], tmp_path: Path) -> None:
    gated().save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    HeadGates(torch.full((3, 4), 0.5)).save(tmp_path / "gates")
    for folder in (tmp_path / "peft", tmp_path / "gates"):
        with pytest.raises(ValueError, match=r"3 layers x 4 KV heads, but .* has \d x \d"):
            PeftModel.from_pretrained(make_tiny_model("llama", **other), folder)
        with pytest.raises(ValueError, match="3 layers x 4 KV heads"):
            make_tiny_model("llama", **other).load_adapter(folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sink": -1}, "sink"),
        ({"window": 0}, "window"),
        ({"window": 7.5}, "window is 7.5: it must be a whole number"),
        ({"init_value": 1.5}, "init_value"),
        ({"target_modules": ["layers.0.self_attn", "layers.7.self_attn"]}, "7.self_attn, which"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        gated(**settings)


def test_chosen_modules_get_gates_and_a_plain_model_has_none() -> None:
    one = gated(target_modules=["layers.0.self_attn"])
    assert [layer for layer, _ in gate_parameters(one)] == [0]
    with pytest.raises(ValueError, match="no gates"):
        gate_parameters(make_tiny_model("llama"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_trial_leaves_no_gates_on_the_model(error: type[BaseException]) -> None:
    def fail(*_: object) -> None:
        raise error("two tokens")

    model = make_tiny_model("llama")
    state = (list(dict(model.named_parameters())), model.config._attn_implementation)
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error, match="two tokens"):
        get_peft_model(model, HeadGateConfig())
    hook.remove()
    assert (list(dict(model.named_parameters())), model.config._attn_implementation) == state


def test_calls_that_bypass_the_gates_are_refused() -> None:
    model = gated()
    base: Any = model.get_base_model()
    packed = torch.cat([torch.arange(30), torch.arange(30)])[None].expand(2, -1)
    mask = torch.ones(2, 1, 60, 60, dtype=torch.bool).tril()
    calls = {
        "unload": [model.merge_and_unload, model.merge_adapter],
        "continuous batching": [
            lambda: base.generate_batch(IDS.tolist()),
            lambda: base.init_continuous_batching(),
        ],
        "static": [
            lambda: model.generate(input_ids=IDS, max_new_tokens=3, cache_implementation="static")
        ],
        "4D": [lambda: model(IDS, attention_mask=mask)],
        "packed": [lambda: base(IDS, position_ids=packed, use_cache=False)],
    }
    for named, refused in calls.items():
        for call in refused:
            with pytest.raises(ValueError, match=named):
                call()
    assert len(gate_parameters(model)) == 3
    base.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="changed to 'eager'"):
        logits(model)
    with model.disable_adapter():
        logits(model)
