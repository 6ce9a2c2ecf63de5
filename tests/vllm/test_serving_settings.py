"""What the plugin is asked to do, and what it refuses to understand; which versions it takes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rlkv.eviction import make_policy
from rlkv.vllm import plugin
from rlkv.vllm.plugin import TESTED, check_installed, check_version
from rlkv.vllm.settings import parse_settings, read_request

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
        ({}, {"RLKV_GATES": "gates"}, "RLKV_SPARSITY is missing"),
        ({}, {"RLKV_SPARSITY": "0.5"}, "RLKV_GATES is missing"),
        ({}, {"RLKV_GATES": "gates", "RLKV_SPARSITY": "half"}, "RLKV_SPARSITY must be a number"),
    ],
)
def test_half_a_request_is_an_error(config: dict[str, Any], environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_request(config, environment)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 1.5}, "sparsity must be a number in"),
        ({"sparsity": "0.5"}, "sparsity must be a number in"),
        ({"sparsity": None}, "sparsity must be a number in"),
        ({"gates": ""}, "gates must be the path"),
        ({"sink": -1}, "sink must be an integer of at least 0"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"scope": "head"}, "scope must be global or layer"),
        ({"prefill": "none"}, "prefill must be local or full"),
        ({"prefill": "full", "eviction": {"name": "rkv", "budget": 64}}, "not served together with eviction"),
        ({"sparsty": 1}, "unknown setting 'sparsty'"),
        ({"eviction": "rkv"}, "eviction must be a mapping"),
        ({"eviction": {"budget": 9}}, "eviction must be a mapping"),
        ({"eviction": {"name": "rkw"}}, "there is no eviction policy 'rkw'"),
        ({"eviction": {"name": "rkv", "budgets": 9}}, "rkv has no option budgets"),
        ({"eviction": {"name": "rkv", "budget": 3}}, "less than the 8 entries"),
        ({"eviction": {"name": "h2o", "budget": 64}}, "eviction 'h2o' is not served"),
        ({"eviction": {"name": "rkv", "ratio": 0.3}}, "eviction with ratio is not served"),
        ({"eviction": {"name": "rkv", "budget": 64, "protect_prompt": True}}, "eviction with protect_prompt"),
        ({"eviction": {"name": "rkv", "budget": 64}, "sink": 4}, "sink and window do not apply"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_settings({**REQUEST, **change})


@pytest.mark.parametrize("absent", ["gates", "sparsity"])
def test_missing_settings_are_named(absent: str) -> None:
    with pytest.raises(ValueError, match=f"{absent} must be"):
        parse_settings({key: value for key, value in REQUEST.items() if key != absent})


def test_settings_are_read_back() -> None:
    settings = parse_settings({**REQUEST, "sink": 4, "scope": "layer"})
    assert parse_settings(settings.to_request()) == settings
    evicting = parse_settings({**REQUEST, "eviction": {"name": "snapkv", "budget": 64, "kernel": 5}})
    assert parse_settings(evicting.to_request()).policy() == make_policy("snapkv", budget=64, kernel=5)
    described = parse_settings({**REQUEST, "eviction": make_policy("rkv", budget=64).describe()})
    assert described.policy() == make_policy("rkv", budget=64)


@pytest.mark.parametrize(("found", "message"), [("0.30.1", r"vllm 0\.30\.1 is installed"), (None, "not installed")])
def test_other_versions_are_errors(found: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: TESTED)
    check_version()
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(ValueError, match=message):
        check_version()


def test_an_installation_without_the_plugin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(plugin.NAME, plugin.ENTRY_POINT, plugin.GROUP)
    monkeypatch.setattr(plugin, "installed_version", lambda: TESTED)
    monkeypatch.setattr(plugin, "entry_points", lambda group: [entry])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "lora,rlkv")
    check_installed()
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        check_installed()
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    with pytest.raises(ValueError, match="does not announce"):
        check_installed()
