"""What ``rlkv-infer`` needs before it decodes: allocation, eviction policy, model and engine, checked in this order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

NO_GATES = (
    "--gates is missing: pass the gates file that says which heads need the whole past, such as "
    "results/demo/gates.pt after `make demo`, or one trained by train/grpo_gates.py; or pass --eviction to drop tokens "
    "in all heads"
)
DEFAULT_SPARSITY = 0.5
BACKENDS = ("hf", "vllm")


@dataclass(frozen=True)
class Setup:
    """A loaded engine and the facts that a batch run's settings and the summaries name."""

    engine: Any
    sampling: Any
    template: str
    settings: dict[str, Any]

    def heads(self) -> str:
        allocation, eviction = self.engine.allocation, self.engine.eviction
        policy = "" if eviction is None else f" ({eviction.name})"
        return f"heads: {allocation.num_full} full, {allocation.num_compressible} compressible{policy}"


def build_policy(name: str | None, budget: int | None, ratio: float | None, options: list[str]) -> Any:
    """The eviction policy that the options name; None if they name none.

    Args:
        options: texts such as ``variant=published`` or ``observation=16``.

    Raises:
        ValueError: for an unknown policy or option, or sizes without a policy.
    """
    if name is None:
        if budget is not None or ratio is not None or options:
            raise ValueError("--budget, --ratio and --eviction-option need --eviction, the policy that they are for")
        return None
    from rlkv.eviction import make_policy, parse_options

    sizes = {name: value for name, value in (("budget", budget), ("ratio", ratio)) if value is not None}
    given = parse_options(options)
    twice = sorted(given.keys() & sizes.keys())
    if twice:
        raise ValueError(f"{twice[0]} is given twice: by --{twice[0]} and by --eviction-option")
    return make_policy(name, **given, **sizes)


def build_setup(
    gates_path: str | None,
    sparsity: float | None,
    scope: str,
    policy: Any,
    model_name: str | None,
    sizes: dict[str, Any],
    dtype: str,
    device: str,
    batch_size: int,
    record: bool,
    sampling: Any,
    template: str,
) -> Setup:
    """Everything that can be wrong is checked before the model is loaded, but what only the model tells.

    Raises:
        ValueError: for anything that is missing, unknown or does not fit.
    """
    from rlkv.cache import CacheSettings
    from rlkv.gates.allocation import HeadAllocation
    from rlkv.gates.head_gates import HeadGates
    from rlkv.models.prompts import fill_template

    fill_template("", template)
    if gates_path is None:
        gates = None
        if policy is None:
            raise ValueError(NO_GATES)
        if sparsity is not None:
            raise ValueError("--sparsity needs --gates: without them --eviction drops tokens in all heads")
        if model_name is None:
            raise ValueError("--model is missing: without --gates nothing names the model")
    else:
        gates = HeadGates.load(gates_path)
        sparsity = DEFAULT_SPARSITY if sparsity is None else sparsity
        model_name = _model_of(gates, gates_path) if model_name is None else model_name
    check_sizes(policy, sizes)
    if gates is not None:
        defaults = {"sink": gates.deploy_sink, "window": gates.deploy_window}
        HeadAllocation.from_gates(gates, sparsity or 0.0, scope=scope)  # for its errors
    else:
        defaults = {"sink": CacheSettings.sink, "window": CacheSettings.window}
    sizes = {name: defaults.get(name) if value is None else value for name, value in sizes.items()}
    CacheSettings(**sizes)

    from rlkv.inference.compress import resolve_allocation
    from rlkv.inference.engine import InferenceEngine
    from rlkv.models.loading import load_model

    model, tokenizer = load_model(model_name, dtype=dtype, device=device)
    allocation = resolve_allocation(model, gates, sparsity, scope)
    engine = InferenceEngine(
        model, tokenizer, allocation, batch_size=batch_size, eviction=policy, record=record, **sizes
    )
    settings = {
        "model": model_name,
        "allocation": hashlib.sha256(bytes(allocation.full.flatten().tolist())).hexdigest(),
        "sparsity": sparsity,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
    }
    return Setup(engine, sampling, template, settings)


def _longest(model_name: str, problems: list[str], template: str) -> int:
    """Tokens of the longest prompt."""
    from rlkv.models.loading import load_tokenizer
    from rlkv.models.prompts import render_prompt

    tokenizer = load_tokenizer(model_name)
    texts = [render_prompt(tokenizer, problem, template) for problem in problems]
    return max(len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids)


def check_sizes(policy: Any, sizes: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a sink or a window beside an eviction policy."""
    if policy is not None and any(sizes[name] is not None for name in ("sink", "window")):
        raise ValueError(
            "--sink and --window do not apply with --eviction: say it in the policy's terms, such as --eviction-option "
            "sink=4"
        )


def _model_of(gates: Any, gates_path: str) -> str:
    if gates.model is None:
        raise ValueError(f"{gates_path} does not name its model: pass --model")
    return gates.model.model_id


def check_backend(backend: str, chat: bool, show_kept: Any, compare_full: bool, device: str) -> None:
    """Raise ``ValueError`` for an unknown backend, and for what the one of vLLM does not do."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown --backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "hf":
        return
    given = {"--show-kept": show_kept, "--compare-full": compare_full}
    for option, value in given.items():
        if value:
            raise ValueError(f"{option} does not work with --backend vllm: leave out one of the two")
    if device != "auto":
        raise ValueError("--device does not work with --backend vllm: the installed vLLM is for CPUs or for GPUs")
    if chat:
        raise ValueError("--backend vllm needs --prompt or --input; for chats, `vllm serve` (docs/SERVING.md)")


def build_served(
    gates_path: str | None,
    sparsity: float | None,
    policy: Any,
    model_name: str | None,
    request: dict[str, Any],
    dtype: str,
    batch_size: int,
    sampling: Any,
    template: str,
    problems: list[str],
) -> Setup:
    """As :func:`build_setup`, with the engine of vLLM.

    Args:
        policy: the eviction policy of the compressible heads; None: they keep sinks and a window.
        request: further settings of the plugin, None where its default stands.
        problems: all that will be asked.

    Raises:
        ValueError: for anything that is missing, unknown or does not fit.
    """
    from rlkv.gates.head_gates import HeadGates
    from rlkv.models.prompts import fill_template

    fill_template("", template)
    if gates_path is None:
        raise ValueError(NO_GATES if policy is None else "--backend vllm needs --gates; for all heads, --sparsity 1")
    check_sizes(policy, request)
    gates = HeadGates.load(gates_path)
    sparsity = DEFAULT_SPARSITY if sparsity is None else sparsity
    model_name = _model_of(gates, gates_path) if model_name is None else model_name
    from rlkv.vllm.serving_engine import ServingEngine

    eviction = None if policy is None else policy.describe()
    chosen = {key: value for key, value in {**request, "eviction": eviction}.items() if value is not None}
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}
    if request.get("prefill") == "full":  # steps and pool have to have room for the longest text: no longer than needed
        options["max_positions"] = _longest(model_name, problems, template) + sampling.max_new_tokens
    engine = ServingEngine(model_name, {**chosen, "gates": gates_path, "sparsity": sparsity}, **options)
    settings = {
        "model": model_name,
        "allocation": hashlib.sha256(bytes(engine.allocation.full.flatten().tolist())).hexdigest(),
        "sparsity": sparsity,
        "dtype": engine.dtype,
        "device": "vllm",
    }
    return Setup(engine, sampling, template, settings)
