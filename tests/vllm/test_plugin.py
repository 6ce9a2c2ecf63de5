"""Versions and installations that are taken, and which engine ``auto`` means."""

from __future__ import annotations

import sys
import tomllib
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from rlkv.vllm import plugin
from rlkv.vllm.plugin import check_installed, check_version, check_vllm_options, choose_engine
from rlkv.vllm.settings import SERVED
from tests.helpers.installed import CPU_BUILD, GPU_BUILD, pretend_vllm
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("found", "has_gpu", "gated", "reason"),
    [
        (CPU_BUILD, True, None, ""),
        (CPU_BUILD, False, None, ""),
        (GPU_BUILD, True, None, ""),
        (GPU_BUILD, True, "Qwen3ForCausalLM", ""),
        (None, True, None, "rlkv[vllm]"),
        ("0.30.1", True, None, "0.30.1"),
        (GPU_BUILD, False, None, "built for GPUs, and there is none"),
        (GPU_BUILD, True, "GemmaForCausalLM", "GemmaForCausalLM"),
    ],
)
def test_auto_is_vllm_where_it_can_serve_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
    found: str | None,
    has_gpu: bool,
    gated: str | None,
    reason: str,
) -> None:
    pretend_vllm(monkeypatch, found)
    engine, why = choose_engine("auto", has_gpu, gated)
    assert engine == ("hf" if reason else "vllm")
    assert reason in why
    assert bool(reason) == bool(why)
    assert choose_engine("vllm", has_gpu, gated) == ("vllm", "")


def test_a_build_for_cpus_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_vllm(monkeypatch, CPU_BUILD)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    engine, why = choose_engine("auto", has_gpu=True)
    assert engine == "hf"
    assert "built for CPUs, and there is a GPU" in why


def test_impossible_options_are_refused() -> None:
    check_vllm_options("vllm", "auto", None)
    check_vllm_options("hf", "cpu", 0.5)
    for kv_gib in (0, -1.5):
        with pytest.raises(ValueError, match=f"--kv-gib .*{kv_gib}"):
            check_vllm_options("hf", "auto", kv_gib)
    with pytest.raises(ValueError, match=r"'cpu'.*--device"):
        check_vllm_options("vllm", "cpu", None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("0.31.0", None),
        ("0.32.0", None),
        ("0.32.1", None),
        ("0.30.1", r"0\.30\.1.*0\.31 and 0\.32"),
        ("0.34.0", r"0\.34\.0.*0\.31 and 0\.32"),
        (None, "not installed"),
    ],
)
def test_the_newest_version_and_the_one_before_pass(
    found: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_version()


def test_a_version_that_was_only_compared_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.33.0")
    message = r"0\.33\.0 has every name .* run with vllm 0\.31 and 0\.32"
    with pytest.warns(UserWarning, match=message):
        check_version()


@pytest.mark.parametrize("found", ["0.28.0", "0.32.1", "0.33.0", None])
def test_other_versions_keep_their_models(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[str] = []
    registry = SimpleNamespace(register_model=lambda name, where: registered.append(name))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    monkeypatch.setattr(plugin, "_prepare_every_config", lambda: None)
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    plugin.register()
    assert registered == (list(SERVED) if found in ("0.32.1", "0.33.0") else [])


def test_the_package_asks_for_versions_that_were_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = project["optional-dependencies"]["vllm"]
    major, minor = plugin.TESTED[-1].split(".")
    assert asked == f"vllm>={plugin.TESTED[0]},<{major}.{int(minor) + 1}"


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


def test_another_version_is_an_error_where_rlkv_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig

    plugin._prepare_every_config()
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.99.0")
    VllmConfig()
    for asked in ({"rlkv": {"gates": "gates.pt", "sparsity": 0.5}}, {"rlkv_mixed": {}}):
        with pytest.raises(ValueError, match=r"0\.99\.0"):
            VllmConfig(additional_config=asked)
