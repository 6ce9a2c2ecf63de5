"""HeadGates: what goes into a file comes out of it, and what alpha and rank may be."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkv.gates.head_gates import ROUNDING, HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.gates import make_gates
from tests.helpers.models import make_tiny_model


@pytest.mark.parametrize(
    "name", ["gates.pt", "gates.safetensors", "adapter", "with/parents/gates.pt"]
)
def test_save_then_load_is_exact(tmp_path: Path, name: str) -> None:
    gates = make_gates()
    gates.save(tmp_path / name)
    loaded = HeadGates.load(tmp_path / name)
    assert loaded == gates
    assert loaded.alpha.dtype == torch.float32
    assert (loaded.deploy_sink, loaded.deploy_window, loaded.deploy_protect_prompt) == (2, 8, True)
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_files_from_before_the_protected_prompt_are_read(tmp_path: Path) -> None:
    make_gates().save(tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    del content["deploy_protect_prompt"]
    torch.save(content, tmp_path / "old.pt")
    assert HeadGates.load(tmp_path / "old.pt") == make_gates(deploy_protect_prompt=False)


def test_equality_sees_every_field(tmp_path: Path) -> None:
    gates = make_gates()
    other = gates.alpha.clone()
    other[3, 5] = 1 - other[3, 5]
    changes = [
        {"alpha": other},
        {"mean_alpha": other},
        {"model": None},
        {"sink": 5},
        {"window": 17},
        {"deploy_sink": 3},
        {"deploy_window": 9},
        {"deploy_protect_prompt": False},
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
    assert torch.equal(loaded.mean_alpha, gates.alpha)
    assert loaded.model is None
    assert [p.name for p in tmp_path.iterdir()] == ["gates.tsv"]


def test_a_config_next_to_a_tsv_names_model_and_sizes(tmp_path: Path) -> None:
    make_gates().save(tmp_path / "gates.tsv")
    config = {
        "model_name": "models/some",
        "sink_size": 7,
        "recent_size": 9,
        "deploy_sink_size": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = HeadGates.load(tmp_path / "gates.tsv")
    assert loaded.model == ModelShape("models/some", "", 4, 6, 0, 0)
    assert (loaded.sink, loaded.window, loaded.deploy_sink, loaded.deploy_window) == (7, 9, 16, 64)
    (tmp_path / "config.json").write_text("{")
    with pytest.warns(UserWarning, match="JSON"):
        assert HeadGates.load(tmp_path / "gates.tsv").model is None


def test_rank_defaults_to_a_copy_of_alpha() -> None:
    gates = HeadGates(torch.tensor([[0.25, 0.5]]))
    assert torch.equal(gates.mean_alpha, gates.alpha)
    assert gates.mean_alpha.data_ptr() != gates.alpha.data_ptr()
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
    with pytest.raises(ValueError, match=r"training.*JSON"):
        make_gates(training={"tensor": torch.zeros(1)})


def test_same_gates_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        make_gates().save(tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_a_failed_save_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.warns(UserWarning, match=r"2 of 4.*alpha.*0\.5"):
        gates = HeadGates(torch.tensor([[-0.5, 0.5], [-0.01, 1.25]]))
    assert gates.alpha.tolist() == [[0, 0.5], [0, 1]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["alpha", "mean_alpha"])
def test_values_that_are_no_numbers_are_refused(value: float, name: str) -> None:
    values = torch.full((4, 6), 0.5)
    values[2, 1] = values[3, 0] = value
    with pytest.raises(ValueError, match=f"gates: {name}.*layer 2, head 1"):
        make_gates(**{name: values})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": torch.rand(5)}, r"alpha.*\[5\].*num_kv_heads"),
        ({"alpha": torch.rand(0, 6)}, r"alpha has shape \[0, 6\]"),
        ({"mean_alpha": torch.rand(6, 4)}, r"mean_alpha.*\[6, 4\].*\[4, 6\]"),
        (
            {"alpha": torch.rand(5, 6), "mean_alpha": None},
            r"alpha.*5 layers.*4 x 6.*owner/model",
        ),
        ({"sink": -1}, "sink is -1"),
        ({"window": 0}, "window is 0"),
        ({"deploy_window": 1.5}, "deploy_window is 1.5"),
        ({"deploy_protect_prompt": "no"}, "deploy_protect_prompt is 'no'"),
    ],
)
def test_wrong_fields_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_gates(**change)


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
        with pytest.raises(ValueError, match=r"^g.pt: .*own/name.*3 layers x 4 KV heads"):
            HeadGates(torch.rand(3, 4), model=replace(shape, **change), source="g.pt").check_model(
                config
            )
    with pytest.raises(ValueError, match=r"gates: .*4 layers x 2 KV heads"):
        HeadGates(torch.rand(4, 2)).check_model(config)
    HeadGates(torch.rand(3, 4)).check_model(config)  # a .tsv states layers and heads only
