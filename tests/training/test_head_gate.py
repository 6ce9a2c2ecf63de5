"""The PEFT method: what is trained, saved and loaded, adapters side by side, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlkv.attention.head_gate import HeadGateConfig, gate_parameters, gates_matrix
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.models import make_tiny_model

IDS = torch.randint(3, 128, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peft asks the hub whether a folder is a repository too.

    Without a network it would retry for half a minute.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def randomize(model: PeftModel) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for _, gate in gate_parameters(model):
            gate.uniform_()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_only_gates_are_trainable(family: str) -> None:
    model = get_peft_model(make_tiny_model(family), HeadGateConfig(sink=2, window=8))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 3
    assert all(name.endswith("self_attn.rlkv_gate.alpha.default") for name in names)
    assert torch.equal(gates_matrix(model), torch.ones(3, 4))


def test_saving_keeps_the_gates_and_their_sizes_only(family: str, tmp_path: Path) -> None:
    make_tiny_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    model = get_peft_model(base, HeadGateConfig(sink=2, window=8))
    randomize(model)
    expected, matrix = logits(model), gates_matrix(model)
    model.save_pretrained(tmp_path / "gates")
    stored = load_file(tmp_path / "gates" / "adapter_model.safetensors")
    assert {tuple(tensor.shape) for tensor in stored.values()} == {(4,)}
    assert len(stored) == 3
    config = json.loads((tmp_path / "gates" / "adapter_config.json").read_text())
    assert (config["sink"], config["window"], config["peft_type"]) == (2, 8, "HEAD_GATE")
    loaded = PeftModel.from_pretrained(make_tiny_model(family), tmp_path / "gates")
    assert torch.equal(gates_matrix(loaded), matrix)
    assert torch.equal(logits(loaded), expected)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    by_name = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "gates")
    assert torch.equal(logits(by_name.eval()), expected)
    base_folder = json.loads((tmp_path / "base" / "config.json").read_text())
    model.get_base_model().config.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again == base_folder  # nothing of ours leaks into the model's config


def test_disabled_and_unloaded_models_are_the_untouched_one(family: str) -> None:
    base = make_tiny_model(family)
    expected = logits(base)
    model = get_peft_model(base, HeadGateConfig(sink=2, window=8))
    randomize(model)
    gated = logits(model)
    assert (gated - expected).abs().max() > 0.1
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), gated)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 3
    plain = model.unload()
    assert torch.equal(logits(plain), expected)
    assert plain.config._attn_implementation == "sdpa"
    assert not [name for name, _ in plain.named_parameters() if "rlkv" in name]
    assert torch.equal(logits(get_peft_model(plain, HeadGateConfig(sink=2, window=8))), expected)


def test_a_second_adapter_has_its_own_gates_and_sizes() -> None:
    model = get_peft_model(
        make_tiny_model("llama"), HeadGateConfig(sink=2, window=8, init_value=0.0)
    )
    first = logits(model)
    model.add_adapter("other", HeadGateConfig(sink=4, window=30, init_value=0.0))
    assert torch.equal(logits(model), first)
    model.set_adapter("other")
    alone = get_peft_model(
        make_tiny_model("llama"), HeadGateConfig(sink=4, window=30, init_value=0.0)
    )
    assert torch.equal(logits(model), logits(alone))
    assert (logits(model) - first).abs().max() > 0.01
    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), first)


@pytest.mark.parametrize("kind", ["peft", "gates"])
@pytest.mark.parametrize("head", [True, False])
def test_transformers_own_loading_reads_the_gates(kind: str, head: bool, tmp_path: Path) -> None:
    make_tiny_model("qwen3").save_pretrained(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), HeadGateConfig(sink=2, window=8)
    )
    randomize(model)
    matrix = gates_matrix(model)
    if kind == "peft":
        model.save_pretrained(tmp_path / "gates", save_embedding_layers=False)
    else:
        shape = ModelShape.from_config(model.config, str(tmp_path / "base"))
        HeadGates(matrix, model=shape, sink=2, window=8).save(tmp_path / "gates")
    auto = AutoModelForCausalLM if head else AutoModel
    by_folder = auto.from_pretrained(tmp_path / "gates")
    by_adapter = auto.from_pretrained(tmp_path / "base")
    by_adapter.load_adapter(tmp_path / "gates")
    for loaded in (by_folder, by_adapter):
        assert torch.equal(gates_matrix(loaded), matrix)
        if head:
            assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "other", [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"num_key_value_heads": 2}]
)
@pytest.mark.parametrize("kind", ["peft", "gates"])
def test_gates_of_another_shape_are_refused(
    kind: str, other: dict[str, int], tmp_path: Path
) -> None:
    if kind == "peft":
        model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
        model.save_pretrained(tmp_path, save_embedding_layers=False)
    else:
        HeadGates(torch.full((3, 4), 0.5)).save(tmp_path)
    with pytest.raises(ValueError, match=r"3 layers x 4 KV heads, but .* has \d x \d"):
        PeftModel.from_pretrained(make_tiny_model("llama", **other), tmp_path)
    with pytest.raises(ValueError, match="3 layers x 4 KV heads"):
        make_tiny_model("llama", **other).load_adapter(tmp_path)


def test_target_modules_that_are_not_there_are_refused() -> None:
    names = ["layers.0.self_attn", "layers.7.self_attn"]
    with pytest.raises(ValueError, match=r"layers\.7\.self_attn, which is not"):
        get_peft_model(make_tiny_model("llama"), HeadGateConfig(target_modules=names))
    one = get_peft_model(make_tiny_model("llama"), HeadGateConfig(target_modules=names[:1]))
    assert [layer for layer, _ in gate_parameters(one)] == [0]


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
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


def test_deleting_the_active_gates_leaves_the_others_and_the_last_ones_are_unloaded() -> None:
    model = get_peft_model(
        make_tiny_model("llama"), HeadGateConfig(sink=2, window=8, init_value=0.0)
    )
    first = logits(model)
    model.add_adapter("other", HeadGateConfig(sink=4, window=30))
    model.set_adapter("other")
    with pytest.warns(UserWarning, match="default"):
        model.delete_adapter("other")
    assert torch.equal(logits(model), first)
    assert not [name for name, _ in model.named_parameters() if "other" in name]
    with pytest.raises(ValueError, match=r"'default' is the only set.*unload"):
        model.delete_adapter("default")
    assert torch.equal(logits(model), first)


def test_two_active_adapters_are_refused() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    model.add_adapter("other", HeadGateConfig(sink=2, window=8))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="default, other"):
        logits(model)


def test_a_copy_of_a_gated_model_works_on_its_own() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    randomize(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model))
    with torch.no_grad():
        gate_parameters(model)[0][1].zero_()
    assert not torch.equal(logits(twin), logits(model))


def test_merging_is_refused() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="unload"):
            merge()
    assert len(gate_parameters(model)) == 3


def test_another_attention_implementation_is_refused() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    model.get_base_model().set_attn_implementation("eager")
    with pytest.raises(ValueError, match="changed to 'eager'"):
        logits(model)
    with model.disable_adapter():
        logits(model)


def test_a_static_cache_is_refused() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    with pytest.raises(ValueError, match="static"):
        model.generate(input_ids=IDS, max_new_tokens=3, cache_implementation="static")


def test_continuous_batching_is_refused_until_unloaded() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    base = model.get_base_model()
    assert hasattr(type(base), "generate_batch")
    for method in (base.generate_batch, base.init_continuous_batching):
        with pytest.raises(ValueError, match="continuous batching"):
            method(IDS.tolist())
    plain = model.unload()
    assert "generate_batch" not in vars(plain)


def test_prepared_and_packed_masks_are_refused() -> None:
    model = get_peft_model(make_tiny_model("llama"), HeadGateConfig(sink=2, window=8))
    with pytest.raises(ValueError, match="4D"):
        model(IDS, attention_mask=torch.ones(2, 1, 60, 60, dtype=torch.bool).tril())
    packed = torch.cat([torch.arange(30), torch.arange(30)])[None].expand(2, -1)
    with pytest.raises(ValueError, match="packed"):
        model.get_base_model()(IDS, position_ids=packed, use_cache=False)


def test_layers_with_a_sliding_window_are_left_alone() -> None:
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
        **settings,
    )
    mixed = Qwen2ForCausalLM(config).eval()
    expected = logits(mixed)
    model = get_peft_model(mixed, HeadGateConfig(sink=2, window=8))
    assert [layer for layer, _ in gate_parameters(model)] == [0, 1]
    assert torch.equal(gates_matrix(model), torch.ones(4, 4))
    assert (logits(model) - expected).abs().max() < 1e-5
    randomize(model)
    assert (logits(model) - expected).abs().max() > 1e-3
    assert torch.equal(gates_matrix(model)[2:], torch.ones(2, 4))
    all_sliding = MistralForCausalLM(
        MistralConfig(vocab_size=128, num_hidden_layers=2, sliding_window=8, **settings)
    )
    with pytest.raises(ValueError, match="mistral"):
        get_peft_model(all_sliding, HeadGateConfig(sink=2, window=8))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"sink": -1}, "sink"), ({"window": 0}, "window"), ({"init_value": 1.5}, "init_value")],
)
def test_bad_settings_are_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HeadGateConfig(**settings)


def test_asking_a_plain_model_for_gates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no gates"):
        gate_parameters(make_tiny_model("llama"))
