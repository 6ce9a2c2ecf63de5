"""Files that are not gates files, or damaged ones, are refused in one sentence: file, found and
expected.
"""

from __future__ import annotations

import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlkv.gates import formats as adapter
from rlkv.gates.head_gates import HeadGates
from tests.helpers.gates import make_gates


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
    for write in (
        lambda: path.write_bytes(pickle.dumps(Payload(), protocol=2)),
        lambda: torch.save(Payload(), path),
    ):
        write()
        with pytest.raises(ValueError, match="HeadGates"):
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
        "words.tsv": "line 1.*'layer'",
        "ragged.tsv": "line 2.*KV heads",
        "cut.tsv": "may be truncated",
        "blank.tsv": "no rows",
        "gates.bin": "'.bin'",
        "absent.pt": "absent.pt",
        "empty": "found no gates",
        "two": "found 2 .tsv files",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=message) as raised:
            HeadGates.load(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
        assert "expected" in str(raised.value)


@pytest.mark.parametrize("name", ["gates.pt", "gates.safetensors", "adapter"])
def test_a_newer_version_asks_for_an_upgrade(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "VERSION", 2)
        make_gates().save(tmp_path / name)
    with pytest.raises(ValueError, match="version 2"):
        HeadGates.load(tmp_path / name)


def test_absent_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "gates.pt"
    make_gates().save(path)
    whole = torch.load(path, weights_only=True)
    for key in ("alpha", "rank", "sink", "training", "model"):
        torch.save({k: v for k, v in whole.items() if k != key}, path)
        with pytest.raises(ValueError, match=f"gates.pt.*{key}"):
            HeadGates.load(path)
    torch.save({**whole, "model": {"model_id": "m"}}, path)
    with pytest.raises(ValueError, match="ModelShape"):
        HeadGates.load(path)


HUGE = 10**30
ODD = {
    "training": [5, "x", [1], None, {"template": 5}, {"template": ["x"]}],
    "model": [5, "x", [1], {}],
    "model_id": [5, None, ["x"], "\ud800", {"a": 1}],
    "num_query_heads": [HUGE, -1, 2.5, "4", None, True],
    **{
        name: [HUGE, 10**12, -1, 2.5, "4", None, True, float("nan")]
        for name in ("sink", "deploy_sink", "deploy_window")
    },
    "deploy_protect_prompt": ["yes", 1],
    "version": [HUGE, "1", float("nan")],
    "alpha": [
        torch.zeros(2, 3).to_sparse(),
        torch.zeros(2, 3, dtype=torch.complex64),
        torch.zeros(1).expand(10**7, 10**7),
        torch.zeros(2, 3).fill_(float("inf")),
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ODD.items() for value in values]
)
def test_odd_fields_are_refused_in_one_sentence(tmp_path: Path, name: str, value: object) -> None:
    make_gates().save(tmp_path / "gates.pt")
    content = torch.load(tmp_path / "gates.pt", weights_only=True)
    place = content["model"] if name in content["model"] else content
    place[name] = value
    torch.save(content, tmp_path / "gates.pt")
    with pytest.raises(ValueError, match=rf"gates\.pt.*{name.removeprefix('num_')}") as raised:
        HeadGates.load(tmp_path / "gates.pt")
    assert "\n" not in str(raised.value)


def test_headers_and_configs_that_are_nested_too_deeply(tmp_path: Path) -> None:
    tensors = {"alpha": torch.zeros(2, 3), "rank": torch.zeros(2, 3)}
    save_file(tensors, tmp_path / "gates.safetensors", {adapter.HEADER_KEY: "[" * 99999})
    make_gates().save(tmp_path / "adapter")
    (tmp_path / "adapter" / adapter.ADAPTER_CONFIG).write_text("[" * 99999)
    for name in ("gates.safetensors", "adapter"):
        with pytest.raises(ValueError, match=f"{name}.*nested too deeply"):
            HeadGates.load(tmp_path / name)


def test_nan_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gates.tsv"
    path.write_text("0.5\tnan\n0.5\t0.5\n")
    with pytest.raises(ValueError, match=r"gates.tsv: alpha.*layer 0, head 1") as raised:
        HeadGates.load(path)
    assert str(raised.value).startswith(str(path))
    path.write_text("0.5\t1.5\n")
    with pytest.warns(UserWarning, match=r"gates.tsv: 1 of 2 values"):
        HeadGates.load(path)


def test_unknown_suffixes_and_hub_addresses_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.ptt'"):
        make_gates().save(tmp_path / "gates.ptt")
    with pytest.raises(ValueError, match="hf://owner/name"):
        make_gates().save("hf://owner/name")
    assert not list(tmp_path.iterdir())
    make_gates().save(f"{tmp_path}/Model-3.1-8B/")
    assert HeadGates.load(tmp_path / "Model-3.1-8B") == make_gates()
