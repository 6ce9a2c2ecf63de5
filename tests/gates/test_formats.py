"""What goes into a file comes out of it; other and damaged files are refused in one sentence."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file

from rlkv.gates import formats
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.gates import make_gates
from tests.helpers.paths import PUBLISHED_GATES

KEY = "base_model.model.model.layers.{}.self_attn.rlkv_gate"


def make_hybrid() -> HeadGates:
    """Gates of a model whose layers 1 and 3 alone have full attention, with 6 and 4 heads."""
    heads = (0, 6, 0, 4)
    gates = make_gates()
    others = torch.arange(6) >= torch.tensor(heads)[:, None]
    for matrix in (gates.alpha, gates.mean_alpha):
        matrix[others] = 1
    return replace(gates, heads=heads)


def write_odd(path: Path, gates: HeadGates, **changed: Any) -> None:
    """Write a .pt file of ``gates`` in which some fields are others."""
    gates.save(path)
    torch.save(torch.load(path, weights_only=True) | changed, path)


def refused(path: Path, message: str) -> str:
    """Check that a file is refused in one line, and return it."""
    with pytest.raises(ValueError, match=message) as raised:
        HeadGates.load(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("make", [make_gates, make_hybrid])
@pytest.mark.parametrize(
    "name", ["gates.pt", "gates.safetensors", "adapter", "with/parents/gates.pt", "Model-3.1/"]
)
def test_save_then_load_is_exact(tmp_path: Path, name: str, make: Callable[[], HeadGates]) -> None:
    gates = make()
    gates.save(f"{tmp_path}/{name}")
    loaded = HeadGates.load(tmp_path / name)
    assert loaded == gates
    assert loaded.heads == gates.heads
    assert loaded.alpha.dtype == torch.float32
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_a_config_next_to_a_tsv_names_model_and_sizes(tmp_path: Path) -> None:
    make_gates().save(tmp_path / "gates.tsv")
    config = {"model_name": "models/some", "sink_size": 7, "recent_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config | {"deploy_sink_size": None}))
    loaded = HeadGates.load(tmp_path / "gates.tsv")
    assert loaded.model == ModelShape("models/some", "", 4, 6, 0, 0)
    assert (loaded.sink, loaded.window, loaded.deploy_sink, loaded.deploy_window) == (7, 9, 16, 64)
    for damaged in ("{", "[]"):
        (tmp_path / "config.json").write_text(damaged)
        refused(tmp_path / "gates.tsv", r"config\.json")


def test_files_of_before_are_read_and_newer_ones_ask_for_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_gates().save(tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    del content["deploy_protect_prompt"]
    torch.save(content, tmp_path / "old.pt")
    assert HeadGates.load(tmp_path / "old.pt") == make_gates(deploy_protect_prompt=False)
    assert content["version"] == 1  # what older versions of rlkv read
    assert "heads" not in content
    for name in ("gates.pt", "gates.safetensors", "adapter"):
        with monkeypatch.context() as patched:
            patched.setattr(formats, "VERSION", 3)
            make_hybrid().save(tmp_path / name)
        refused(tmp_path / name, "version 3")


@pytest.mark.parametrize("heads", [[0, 6], [0, 7, 0, 4], [0, 6, -1, 4], ["x"] * 4, 5, [0, 0, 0, 4]])
def test_numbers_of_gates_that_do_not_fit_are_refused(tmp_path: Path, heads: Any) -> None:
    write_odd(tmp_path / "odd.pt", make_hybrid(), heads=heads)
    refused(tmp_path / "odd.pt", r"odd\.pt.*heads")
    make_hybrid().save(tmp_path / "odd")
    weights = tmp_path / "odd" / formats.ADAPTER_WEIGHTS
    tensors, header = formats._read_safetensors(weights)
    formats._write_safetensors(weights, tensors, header | {"heads": heads})
    refused(tmp_path / "odd", "odd.*(header says|number of layers is 2)")


def test_gates_in_no_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a gate in one of them"):
        HeadGates(torch.ones(2, 3), heads=(0, 0))
    make_hybrid().save(tmp_path / "adapter")
    weights = tmp_path / "adapter" / formats.ADAPTER_WEIGHTS
    _, header = formats._read_safetensors(weights)
    formats._write_safetensors(weights, {}, header | {"heads": [0] * 4})
    assert refused(tmp_path / "adapter", "in 0 tensors").startswith(str(weights))


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "NaN"), (0.3, "there is no gate")])
def test_a_number_where_there_is_no_gate_is_refused(
    tmp_path: Path, value: float, message: str
) -> None:
    alpha = make_hybrid().alpha
    alpha[0, 2] = value
    write_odd(tmp_path / "odd.pt", make_hybrid(), alpha=alpha)
    refused(tmp_path / "odd.pt", rf"odd\.pt.*{message}")


def test_what_an_adapter_names_and_what_it_holds(tmp_path: Path) -> None:
    rows = {KEY.format(layer) + ".alpha": torch.rand(2) for layer in (1, 3)}
    targets = {"num_layers": 5, "target_modules": ["model.layers.1.a", "model.layers.3.a"]}
    folder = peft_folder(tmp_path / "adapter", rows, **targets)
    gates = HeadGates.load(folder)
    assert gates.heads == (0, 2, 0, 2, 0)
    assert torch.equal(gates.alpha[3], rows[KEY.format(3) + ".alpha"])
    assert bool((gates.alpha[[0, 2, 4]] == 1).all())
    nan = rows | {KEY.format(1) + ".alpha": torch.tensor([0.5, float("nan")])}
    for tensors, changed, message in (
        (nan, {}, "NaN"),
        (rows | {KEY.format(2) + ".alpha": torch.ones(2)}, {}, "each of the layers 1, 3"),
        (rows, {"target_modules": ["model.layers.1.a"]}, "each of the layers 1"),
        (rows, {"num_layers": 3}, "number of layers is 3"),
        (rows, {"num_layers": 10**12}, "number of layers is 10"),
        (rows, {"target_modules": None}, "every layer from 0"),
    ):
        refused(peft_folder(tmp_path / "odd", tensors, **(targets | changed)), message)


def test_unknown_suffixes_and_hub_addresses_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.ptt'"):
        make_gates().save(tmp_path / "gates.ptt")
    with pytest.raises(ValueError, match="hf://owner/name"):
        make_gates().save("hf://owner/name")
    assert not list(tmp_path.iterdir())


# Damaged and other files


@pytest.mark.parametrize("suffix", formats.SUFFIXES)
def test_truncated_and_damaged_files(tmp_path: Path, suffix: str) -> None:
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"gates{suffix}"
    make_gates().save(whole)
    content = whole.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.7, 0.99):
        path.write_bytes(content[: int(share * len(content))])
        assert refused(path, "expected").startswith(str(path))
    rng, found = random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 5, 50])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                HeadGates.load(path)
            except ValueError:  # and no other error
                found += 1
    assert found > 20  # most damage hits structure or numbers, not only padding


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    torch.save(Payload(), "archive.pt")
    for name in ("plain.pt", "archive.pt"):
        refused(tmp_path / name, "HeadGates")
    assert not Path("executed").exists()


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    texts = {
        "words.tsv": "layer\thead\n",
        "ragged.tsv": "0.5\t0.5\n0.5\n",
        "cut.tsv": "0.5\t0.5\n0.25\t0.2",
        "blank.tsv": "\n\n",
        "nan.tsv": "0.5\tnan\n0.5\t0.5\n",
        "gates.bin": "x",
        "two/a.tsv": "0.5\n",
        "two/b.tsv": "0.5\n",
    }
    for name in ("empty", "two"):
        (tmp_path / name).mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for name, message in {
        "other.pt": "not a gates file",
        "other.safetensors": "not a gates file",
        "words.tsv": "'layer'",
        "ragged.tsv": "columns changed from 2 to 1 at row 2",
        "cut.tsv": "may be truncated",
        "blank.tsv": "no rows",
        "nan.tsv": "alpha.*layer 0, head 1",
        "gates.bin": "'.bin'",
        "absent.pt": "no such file",
        "empty": "found no gates",
        "two": "found 2 .tsv files",
    }.items():
        said = refused(tmp_path / name, message)
        assert said.startswith(str(tmp_path / name))
        assert "expected" in said


HUGE = 10**30
COUNTS = [HUGE, 10**12, -1, 2.5, "4", None, True, float("nan")]
ODD: dict[str, list[Any]] = {
    "training": [5, "x", [1], None, {"template": 5}, {"template": ["x"]}],
    "model": [5, "x", [1], {}, {"model_id": "m"}],
    "model_id": [5, None, ["x"], "\ud800", {"a": 1}],
    "num_query_heads": [HUGE, -1, 2.5, "4", None, True],
    "sink": COUNTS,
    "deploy_window": COUNTS,
    "deploy_protect_prompt": ["yes", 1],
    "version": [HUGE, "1", float("nan"), -1, 0, True],
    "alpha": [
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(1).expand(10**7, 10**7),
        torch.zeros(2, 3).fill_(float("inf")),
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_and_absent_fields_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    path, odd = tmp_path / "gates.pt", tmp_path / "odd.pt"
    make_gates().save(path)
    for value in ODD[name]:
        content = torch.load(path, weights_only=True)
        place = content["model"] if name in content["model"] else content
        place[name] = value
        torch.save(content, odd)
        refused(odd, rf"odd\.pt.*(?i:{name[:5]})")
    if name in (*formats._FIELDS, "alpha"):
        content.pop(name)
        torch.save(content, odd)
        refused(odd, rf"odd\.pt.*{name}")


def test_headers_and_configs_that_are_nested_too_deeply(tmp_path: Path) -> None:
    tensors = {"alpha": torch.zeros(2, 3), "rank": torch.zeros(2, 3)}
    save_file(tensors, tmp_path / "gates.safetensors", {formats.HEADER_KEY: "[" * 99999})
    make_gates().save(tmp_path / "adapter")
    (tmp_path / "adapter" / formats.ADAPTER_CONFIG).write_text("[" * 99999)
    for name in ("gates.safetensors", "adapter"):
        refused(tmp_path / name, f"{name}.*nested too deeply")


# PEFT folders, the hub, published files


def peft_folder(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {"base_model_name_or_path": "owner/base", "sink": 4, "window": 16} | settings
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("suffix", [".alpha", ".alpha.default", ""])
def test_a_folder_written_by_peft_alone(tmp_path: Path, suffix: str) -> None:
    tensors = {KEY.format(i) + suffix: torch.full((3,), i / 16) for i in range(12)}
    loaded = HeadGates.load(peft_folder(tmp_path / "a", tensors))
    # by layer number, not by name
    assert loaded.alpha.tolist() == [[i / 16] * 3 for i in range(12)]
    assert loaded.model == ModelShape("owner/base", "", 12, 3, 0, 0)
    assert (loaded.sink, loaded.window) == (4, 16)


def test_other_adapters_are_refused(tmp_path: Path) -> None:
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    two = torch.ones(2)
    for tensors, message in (
        ({lora: two}, "no adapter of KV head"),
        ({KEY.format(1): two}, "{1: 2}"),
        ({KEY.format(0): two, KEY.format(1): torch.ones(3)}, "{0: 2, 1: 3}"),
        ({KEY.format(0): two, KEY.format(0) + ".b": two.clone()}, "{0: 2} in 2 tensors"),
    ):
        refused(peft_folder(tmp_path / "a", tensors), message)
    folder = peft_folder(tmp_path / "b", {KEY.format(0): two})
    weights = folder / "adapter_model.safetensors"
    refused(weights, r"adapter_model\.safetensors.*PEFT")
    weights.unlink()
    refused(folder, r"expected adapter_model\.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(folder, r"adapter_config\.json.*sink")


def test_hub_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gates().save(tmp_path / "snapshot" / "gates.safetensors")
    asked = []

    def download(repo_id: str, revision: str | None = None, allow_patterns: object = None) -> str:
        asked.append((repo_id, revision))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    addresses = ["hf://owner/name", "owner/name", "hf://owner/name@v1.0", "owner/name@refs/pr/1"]
    for address in addresses:
        assert HeadGates.load(address) == make_gates()
    assert asked == [("owner/name", r) for r in (None, None, "v1.0", "refs/pr/1")]
    make_gates(sink=5).save("owner/local/")
    assert HeadGates.load("owner/local").sink == 5  # a local path wins
    assert len(asked) == 4
    with pytest.raises(ValueError, match="hf://name:"):
        HeadGates.load("hf://name")


@pytest.mark.parametrize("address", ["hf://owner/name", "owner/name"])
def test_an_unreachable_hub_is_one_sentence(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot connect\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setitem(
        sys.modules, "httpx", None
    )  # newer versions of the hub's library go without
    with pytest.raises(ValueError, match=rf"^{address}: .*\(cannot connect\)"):
        HeadGates.load(address)


@pytest.mark.parametrize("method", ["rlkv", "duo_attn"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("Llama-3.1-8B-R1", (32, 8)), ("Qwen-2.5-7B-R1", (28, 4)), ("Qwen-3-4B-Thinking", (36, 8))],
)
def test_published_gates_load_without_a_warning(
    method: str, name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    folder = PUBLISHED_GATES / method / name
    (table,) = folder.glob("*.tsv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gates = HeadGates.load(folder)
        assert gates == HeadGates.load(table)
    assert gates.alpha.shape == shape
    assert (gates.sink, gates.window) == (128, 256)
    assert (gates.model is not None) == (folder / "config.json").exists()
    gates.save(tmp_path / "gates.tsv")
    if (method, name) == ("duo_attn", "Qwen-2.5-7B-R1"):
        # no value to clip: the layout is the published one
        assert (tmp_path / "gates.tsv").read_bytes() == table.read_bytes()
    assert torch.equal(HeadGates.load(tmp_path / "gates.tsv").alpha, gates.alpha)
