"""What the plugin is asked to do, and what it refuses to understand; which versions it takes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.eviction import make_policy
from rlkv.gates.head_gates import HeadGates
from rlkv.vllm import plugin
from rlkv.vllm.plugin import check_installed, check_version
from rlkv.vllm.settings import parse_settings, read_request
from tests.helpers.installed import GPU_BUILD
from tests.helpers.models import make_tiny_model

REQUEST: dict[str, Any] = {"gates": "gates.safetensors", "sparsity": 0.5}


def test_nothing_asked_for_is_nothing() -> None:
    assert read_request({}, {}) is None
    assert read_request({"other": 1}, {"RLKV_GATES": ""}) is None


def test_configuration_goes_before_the_environment() -> None:
    environment = {"RLKV_GATES": "other", "RLKV_SPARSITY": "0.25"}
    assert read_request({"rlkv": REQUEST}, environment) == REQUEST
    assert read_request({}, environment) == {"gates": "other", "sparsity": 0.25}


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
        (
            {"prefill": "full", "eviction": {"name": "rkv", "budget": 64}},
            r"^rlkv: prefill\b.*eviction",
        ),
        ({"sparsty": 1}, "'sparsty'"),
        ({"eviction": "rkv"}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"budget": 9}}, r"^rlkv: eviction\b.*mapping"),
        ({"eviction": {"name": "rkw"}}, "'rkw'"),
        ({"eviction": {"name": "rkv", "budgets": 9}}, "budgets"),
        ({"eviction": {"name": "rkv", "budget": 3}}, "budget is 3"),
        ({"eviction": {"name": "h2o", "budget": 64}}, "'h2o'"),
        ({"eviction": {"name": "rkv", "ratio": 0.3}}, "ratio"),
        ({"eviction": {"name": "rkv", "budget": 64, "protect_prompt": True}}, "protect_prompt"),
        ({"eviction": {"name": "rkv", "budget": 64}, "sink": 4}, "sink, window and protect_prompt"),
        (
            {"eviction": {"name": "rkv", "budget": 64}, "protect_prompt": True},
            "sink, window and protect_prompt",
        ),
        ({"protect_prompt": "yes"}, r"^rlkv: protect_prompt\b.*'yes'"),
        ({"one_launch": False}, "^rlkv: unknown setting 'one_launch': choose from"),
        ({"reference_prompt": 0}, r"^rlkv: reference_prompt\b.*0"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings({**REQUEST, **change})


@pytest.mark.parametrize("absent", ["gates", "sparsity"])
def test_missing_settings_are_named(absent: str) -> None:
    with pytest.raises(ValueError, match=rf"^rlkv: {absent}\b"):
        parse_settings({key: value for key, value in REQUEST.items() if key != absent})


def test_settings_are_read_back() -> None:
    settings = parse_settings({**REQUEST, "sink": 4, "scope": "layer"})
    assert parse_settings(settings.to_request()) == settings
    evicting = parse_settings(
        {**REQUEST, "eviction": {"name": "snapkv", "budget": 64, "kernel": 5}}
    )
    assert parse_settings(evicting.to_request()).policy() == make_policy(
        "snapkv", budget=64, kernel=5
    )
    described = parse_settings({**REQUEST, "eviction": make_policy("rkv", budget=64).describe()})
    assert described.policy() == make_policy("rkv", budget=64)


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
    evicting = parse_settings({**request, "eviction": {"name": "rkv", "budget": 64}}).resolved(
        model.config
    )
    assert evicting.policy() == make_policy("rkv", budget=64)


@pytest.mark.parametrize("found", ["0.31.0", "0.32.0", "0.32.1"])
def test_the_newest_version_and_the_one_before_pass(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    check_version()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("0.30.1", r"0\.30\.1.*0\.31 and 0\.32"),
        ("0.33.0", r"0\.33\.0.*0\.31 and 0\.32"),
        (None, "not installed"),
    ],
)
def test_other_versions_are_errors(
    found: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(ValueError, match=message):
        check_version()


def test_an_installation_without_the_plugin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(plugin.NAME, plugin.ENTRY_POINT, plugin.GROUP)
    monkeypatch.setattr(plugin, "installed_version", lambda: GPU_BUILD)
    monkeypatch.setattr(plugin, "entry_points", lambda group: [entry])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "lora,rlkv")
    check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        check_installed()
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="egg-info"):
        check_installed()
