"""HeadGates: what goes into a file comes out of it, and what is no gates file says so."""

from __future__ import annotations

import json
import os
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_model
from safetensors.torch import load_file, save_file

from rlkv import gates_header
from rlkv.gates import ROUNDING, HeadGates
from rlkv.models import ModelShape

PUBLISHED = Path(__file__).parents[1].parent / "shared" / "gates"
SHAPE = ModelShape("owner/model", "llama", 4, 6, 12, 32)


def make_gates(**changes: object) -> HeadGates:
    generator = torch.Generator().manual_seed(0)
    values = {
        "alpha": torch.rand(4, 6, generator=generator),
        "rank": torch.rand(4, 6, generator=generator),
        "model": SHAPE,
        "sink": 4,
        "window": 16,
        "deploy_sink": 2,
        "deploy_window": 8,
        "training": {"steps": 60, "beta": 2.5e-3, "curve": [0.1, 1 / 3], "note": None, "nested": {"é": True}},
    }
    return HeadGates(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gates.pt", "gates.safetensors", "adapter", "with/parents/gates.pt"])
def test_save_then_load_is_exact(tmp_path: Path, name: str) -> None:
    gates = make_gates()
    gates.save(tmp_path / name)
    loaded = HeadGates.load(tmp_path / name)
    assert loaded == gates
    assert loaded.alpha.dtype == torch.float32
    assert (loaded.deploy_sink, loaded.deploy_window) == (2, 8)
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_equality_sees_every_field(tmp_path: Path) -> None:
    gates = make_gates()
    other = gates.alpha.clone()
    other[3, 5] = 1 - other[3, 5]
    changes = [
        {"alpha": other},
        {"rank": other},
        {"model": None},
        {"sink": 5},
        {"window": 17},
        {"deploy_sink": 3},
        {"deploy_window": 9},
        {"training": {}},
    ]
    for change in changes:
        assert make_gates(**change) != gates, change
    assert replace(gates, source="elsewhere") == gates


def test_tsv_keeps_alpha_exactly_and_nothing_else(tmp_path: Path) -> None:
    gates = make_gates()
    gates.save(tmp_path / "gates.tsv")
    loaded = HeadGates.load(tmp_path / "gates.tsv")
    assert torch.equal(loaded.alpha, gates.alpha)
    assert torch.equal(loaded.rank, gates.alpha)
    assert loaded.model is None
    assert [p.name for p in tmp_path.iterdir()] == ["gates.tsv"]


def test_a_config_beside_a_tsv_names_model_and_sizes(tmp_path: Path) -> None:
    make_gates().save(tmp_path / "gates.tsv")
    config = {"model_name": "models/some", "sink_size": 7, "recent_size": 9, "deploy_sink_size": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = HeadGates.load(tmp_path / "gates.tsv")
    assert loaded.model == ModelShape("models/some", "", 4, 6, 0, 0)
    assert (loaded.sink, loaded.window, loaded.deploy_sink, loaded.deploy_window) == (7, 9, 16, 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.warns(UserWarning, match="not readable as JSON"):
        assert HeadGates.load(tmp_path / "gates.tsv").model is None


def test_rank_defaults_to_a_copy_of_alpha() -> None:
    gates = HeadGates(torch.tensor([[0.25, 0.5]]))
    assert torch.equal(gates.rank, gates.alpha)
    assert gates.rank.data_ptr() != gates.alpha.data_ptr()
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (128, 256, 16, 64)


def test_gates_are_a_float32_copy_without_gradient() -> None:
    parameter = torch.nn.Parameter(torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    gates = HeadGates(parameter)
    assert gates.alpha.dtype == torch.float32
    assert not gates.alpha.requires_grad
    source = torch.full((2, 3), 0.5)
    gates = HeadGates(source)
    source.zero_()
    assert gates.alpha.min() == 0.5


def test_a_summary_is_the_same_before_and_after_a_file() -> None:
    gates = make_gates(training={"pair": (1, 2), 3: "three"})
    assert gates.training == {"pair": [1, 2], "3": "three"}
    with pytest.raises(ValueError, match="training summary cannot be written as JSON"):
        make_gates(training={"tensor": torch.zeros(1)})


def test_same_gates_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        make_gates().save(tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_failed_save_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gates.pt"
    make_gates().save(path)
    before = path.read_bytes()

    def fail(content: object, file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        make_gates(sink=5).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["gates.pt"]


# Values


def test_rounding_is_clipped_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gates = HeadGates(torch.tensor([[-ROUNDING * 0.99, 0.5, 1 + ROUNDING * 0.99]]))
    assert gates.alpha.tolist() == [[0, 0.5, 1]]


def test_values_far_outside_are_clipped_with_a_count() -> None:
    with pytest.warns(UserWarning, match=r"gates: 2 of 4 values of alpha lay outside \[0, 1\], by up to 0.5"):
        gates = HeadGates(torch.tensor([[-0.5, 0.5], [-0.01, 1.25]]))
    assert gates.alpha.tolist() == [[0, 0.5], [0, 1]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["alpha", "rank"])
def test_values_that_are_no_numbers_are_refused(value: float, name: str) -> None:
    values = torch.full((4, 6), 0.5)
    values[2, 1] = values[3, 0] = value
    with pytest.raises(
        ValueError, match=f"{name} holds 2 values that are NaN or infinite .the first at layer 2, head 1"
    ):
        make_gates(**{name: values})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": torch.rand(5)}, r"alpha has shape \[5\], expected \[num_layers, num_kv_heads\]"),
        ({"alpha": torch.rand(0, 6)}, r"alpha has shape \[0, 6\]"),
        ({"rank": torch.rand(6, 4)}, r"rank has shape \[6, 4\], expected alpha's \[4, 6\]"),
        ({"alpha": torch.rand(5, 6), "rank": None}, r"alpha is 5 layers x 6 KV heads, expected 4 x 6 of owner/model"),
        ({"sink": -1}, "sink is -1, expected a whole number of tokens >= 0"),
        ({"window": 0}, "window is 0, expected a whole number of tokens >= 1"),
        ({"deploy_window": 1.5}, "deploy_window is 1.5"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gates(**change)


# Files that are none


def corrupt(tmp_path: Path, suffix: str, edit: Callable[[bytes], bytes]) -> Path:
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"gates{suffix}"
    make_gates().save(whole)
    path.write_bytes(edit(whole.read_bytes()))
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".tsv"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_truncated_files_say_so(tmp_path: Path, suffix: str, share: float) -> None:
    path = corrupt(tmp_path, suffix, lambda whole: whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match="gates") as raised:
        HeadGates.load(path)
    message = str(raised.value)
    assert message.startswith(str(path))
    assert "expected" in message
    assert "\n" not in message


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".tsv"])
def test_damaged_files_load_or_raise_value_errors(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(0)

    def damage(whole: bytes) -> bytes:
        content = bytearray(whole)
        for _ in range(rng.choice([1, 5, 50])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content)

    refused = 0
    for _ in range(60):
        path = corrupt(tmp_path, suffix, damage)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                HeadGates.load(path)
            except ValueError:
                refused += 1
    assert refused > 20  # most damage hits structure or numbers, not only padding


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "gates.pt"
    for write in (lambda: path.write_bytes(pickle.dumps(Payload(), protocol=2)), lambda: torch.save(Payload(), path)):
        write()
        with pytest.raises(ValueError, match="expected gates as HeadGates"):
            HeadGates.load(path)
    assert not (tmp_path / "executed").exists()


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "words.tsv").write_text("layer\thead\n")
    (tmp_path / "ragged.tsv").write_text("0.5\t0.5\n0.5\n")
    (tmp_path / "cut.tsv").write_text("0.5\t0.5\n0.25\t0.2")
    (tmp_path / "blank.tsv").write_text("\n\n")
    (tmp_path / "gates.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in "ab":
        (tmp_path / "two" / f"{name}.tsv").write_text("0.5\n")
    expected = {
        "other.pt": "not a gates file",
        "other.safetensors": "not a gates file",
        "words.tsv": "line 1: could not convert string to float: 'layer'",
        "ragged.tsv": "line 2: found 1 KV heads, expected 2",
        "cut.tsv": "may be truncated",
        "blank.tsv": "no rows",
        "gates.bin": "unknown gates format '.bin'",
        "absent.pt": "no such file or folder",
        "empty": "found nothing of the kind",
        "two": "found 2 .tsv files",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=message) as raised:
            HeadGates.load(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
        assert "expected" in str(raised.value)


@pytest.mark.parametrize("name", ["gates.pt", "gates.safetensors", "adapter"])
def test_a_newer_version_asks_for_an_upgrade(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(gates_header, "VERSION", 2)
        make_gates().save(tmp_path / name)
    with pytest.raises(ValueError, match=r"gates format version 2, expected at most 1: upgrade rlkv"):
        HeadGates.load(tmp_path / name)


def test_absent_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gates.pt"
    make_gates().save(path)
    whole = torch.load(path, weights_only=True)
    for key in ("alpha", "rank", "sink", "training", "model"):
        torch.save({k: v for k, v in whole.items() if k != key}, path)
        with pytest.raises(ValueError, match=f"damaged gates file.*{key}"):
            HeadGates.load(path)
    torch.save({**whole, "model": {"model_id": "m"}}, path)
    with pytest.raises(ValueError, match="damaged gates file"):
        HeadGates.load(path)


def test_nan_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gates.tsv"
    path.write_text("0.5\tnan\n0.5\t0.5\n")
    with pytest.raises(ValueError, match="alpha holds 1 values that are NaN") as raised:
        HeadGates.load(path)
    assert str(raised.value).startswith(str(path))
    path.write_text("0.5\t1.5\n")
    with pytest.warns(UserWarning, match=r"gates.tsv: 1 of 2 values"):
        HeadGates.load(path)


def test_unknown_suffixes_and_hub_addresses_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown gates format '.ptt', expected .pt, .safetensors, .tsv"):
        make_gates().save(tmp_path / "gates.ptt")
    with pytest.raises(ValueError, match="expected no hub address"):
        make_gates().save("hf://owner/name")
    assert not list(tmp_path.iterdir())
    make_gates().save(f"{tmp_path}/Model-3.1-8B/")
    assert HeadGates.load(tmp_path / "Model-3.1-8B") == make_gates()


# PEFT folders


def peft_folder(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {"base_model_name_or_path": "owner/base", "sink": 4, "window": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def test_a_folder_written_by_peft_alone(tmp_path: Path) -> None:
    keys = [f"base_model.model.model.layers.{i}.self_attn.rlkv_gate.alpha" for i in range(12)]
    folder = peft_folder(tmp_path / "a", {key: torch.full((3,), i / 16) for i, key in enumerate(keys)})
    loaded = HeadGates.load(folder)
    assert loaded.alpha.tolist() == [[i / 16] * 3 for i in range(12)]  # by layer number, not by name
    assert loaded.model == ModelShape("owner/base", "", 12, 3, 0, 0)
    assert (loaded.sink, loaded.window) == (4, 16)


@pytest.mark.parametrize("key", ["self_attn.rlkv_gate.alpha.default", "self_attn.rlkv_gate", "attn.rlkv_gate"])
def test_key_variants(tmp_path: Path, key: str) -> None:
    folder = peft_folder(tmp_path / "a", {f"base_model.model.model.layers.0.{key}": torch.tensor([0.25, 0.5])})
    assert HeadGates.load(folder).alpha.tolist() == [[0.25, 0.5]]


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    gate = "base_model.model.model.layers.{}.self_attn.rlkv_gate"
    cases = [
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2)}, "no adapter of KV head"),
        ({gate.format(1): torch.ones(2)}, "for every layer from 0 without gaps"),
        ({gate.format(0): torch.ones(2), gate.format(1): torch.ones(3)}, "as many for every layer"),
        ({gate.format(0): torch.ones(2), gate.format(0) + ".b": torch.ones(2)}, "two tensors hold gates of layer 0"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            HeadGates.load(peft_folder(tmp_path / "a", tensors))
    folder = peft_folder(tmp_path / "b", {gate.format(0): torch.ones(2)})
    with pytest.raises(ValueError, match="pass the folder that holds it"):
        HeadGates.load(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"expected adapter_model.safetensors beside it"):
        HeadGates.load(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="expected sink and window"):
        HeadGates.load(folder)


def test_saved_folders_hold_one_tensor_per_layer(tmp_path: Path) -> None:
    gates = make_gates()
    gates.save(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.{}.self_attn.rlkv_gate.alpha"
    assert set(tensors) == {key.format(i) for i in range(4)}
    assert torch.equal(tensors[key.format(2)], gates.alpha[2])


# The hub


def test_hub_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    make_gates().save(tmp_path / "snapshot" / "gates.safetensors")
    asked = []

    def download(repo_id: str, revision: str | None = None, allow_patterns: object = None) -> str:
        asked.append((repo_id, revision))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    for address in ("hf://owner/name", "owner/name", "hf://owner/name@v1.0", "owner/name@refs/pr/1"):
        assert HeadGates.load(address) == make_gates()
    assert asked == [("owner/name", r) for r in (None, None, "v1.0", "refs/pr/1")]
    make_gates(sink=5).save("owner/local/")
    assert HeadGates.load("owner/local").sink == 5  # a local path wins
    assert len(asked) == 4
    with pytest.raises(ValueError, match="not a hub address, expected hf://owner/name"):
        HeadGates.load("hf://name")


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot connect\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"^hf://owner/name: the hub did not give it \(cannot connect\)"):
        HeadGates.load("hf://owner/name")
    with pytest.raises(ValueError, match=r"^owner/name: no such local file or folder, and the hub did not"):
        HeadGates.load("owner/name")


# Models


def test_check_model_accepts_the_model_and_refuses_others(family: str) -> None:
    config = make_tiny_model(family).config
    shape = ModelShape.from_config(config, "own/name")
    gates = HeadGates(torch.rand(3, 4), model=shape, source="g.pt")
    gates.check_model(config)
    for change in (
        {"model_type": "mistral"},
        {"num_query_heads": 16},
        {"head_dim": 8},
    ):
        with pytest.raises(ValueError, match=r"^g.pt: these gates are for own/name: .*3 layers x 4 KV heads"):
            HeadGates(torch.rand(3, 4), model=replace(shape, **change), source="g.pt").check_model(config)
    with pytest.raises(ValueError, match=r"other layers, KV heads\)"):
        HeadGates(torch.rand(4, 2)).check_model(config)
    HeadGates(torch.rand(3, 4)).check_model(config)  # a .tsv states layers and heads only


# Published files


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published gates (../shared/gates) are not here")
@pytest.mark.parametrize("method", ["rlkv", "duo_attn"])
@pytest.mark.parametrize(
    ("name", "shape"), [("Llama-3.1-8B-R1", (32, 8)), ("Qwen-2.5-7B-R1", (28, 4)), ("Qwen-3-4B-Thinking", (36, 8))]
)
def test_published_gates_load_without_a_warning(method: str, name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    folder = PUBLISHED / method / name
    (table,) = folder.glob("*.tsv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gates = HeadGates.load(folder)
        assert gates == HeadGates.load(table)
    assert gates.alpha.shape == shape
    assert gates.alpha.min() >= 0
    assert gates.alpha.max() <= 1
    assert (gates.sink, gates.window) == (128, 256)
    assert (gates.model is not None) == (folder / "config.json").exists()
    gates.save(tmp_path / "gates.tsv")
    if method == "duo_attn" and name == "Qwen-2.5-7B-R1":  # no value to clip: the layout is the published one
        assert (tmp_path / "gates.tsv").read_bytes() == table.read_bytes()
    assert torch.equal(HeadGates.load(tmp_path / "gates.tsv").alpha, gates.alpha)
