"""What ``rlkv-infer`` decodes with: gates are read once, become an allocation once, and that goes to the engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.config import InferConfig
from rlkv.inference.engine import InferenceEngine
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.rollout.base import SamplingParams, check_length
from rlkv.utils.jsonl import is_text, read_jsonl
from rlkv.utils.provenance import digest
from rlkv.utils.store import check_output

DEFAULT_SPARSITY = 0.5


def read_problems(path: Path) -> list[dict[str, Any]]:
    """One object per line, each with a text ``problem`` and, if known, an ``answer``.

    Raises:
        ValueError: if the file is absent or empty, or a line is not such an object (names the line).
    """
    problems = []
    try:
        for where, row in read_jsonl(path):
            if not isinstance(row.get("problem"), str) or not row["problem"]:
                raise ValueError(f"{where} has no text field 'problem'")
            if isinstance(row.get("answer"), dict | list):
                raise ValueError(f"{where}: field 'answer' is a {type(row['answer']).__name__}, expected text")
            if not is_text(row["problem"]):
                raise ValueError(f"{where}: its problem holds half a surrogate pair, which is no text: correct it")
            problems.append(row)
    except OSError as error:
        raise ValueError(f"cannot read the problems from {path}: {error}") from None
    if not problems:
        raise ValueError(f"{path} holds no problems: it needs one JSON object with a field 'problem' per line")
    return problems


@dataclass(frozen=True)
class InferSession:
    """A loaded engine under an allocation.

    Attributes:
        engine: an :class:`InferenceEngine`, or a :class:`rlkv.vllm.serving_engine.ServingEngine`.
        problems: those of ``config.input``, else none.
        settings: what completions depend on in addition to their prompts.
    """

    config: InferConfig
    engine: Any
    sampling: SamplingParams
    template: str
    problems: list[dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def open(cls, config: InferConfig) -> InferSession:
        """Load the model; whatever does not depend on it is checked before."""
        config.check()
        if config.output is not None:
            check_output(config.output)
        policy, sampling = config.policy(), config.sampling_params(config.max_new_tokens or 1)
        problems = read_problems(config.input) if config.input else []
        gates = None if config.gates_source is None else HeadGates.load(config.gates_source)
        sparsity, allocation = config.sparsity, None
        if gates is not None:
            sparsity = DEFAULT_SPARSITY if sparsity is None else sparsity
            allocation = HeadAllocation.from_gates(gates, sparsity, config.scope)
        prefill = config.prefill or ("local" if config.backend == "vllm" else "full")
        cache = replace(config, prefill=prefill).cache_settings({} if gates is None else {"": gates}, policy)
        model = config.model or (gates.model.model_id if gates is not None and gates.model is not None else None)
        texts = [problem["problem"] for problem in problems] or [config.prompt or ""]
        if model is None:
            raise ValueError(f"{config.gates} does not name its model: pass --model")
        of_gates = None if gates is None else gates.training.get("template")
        template = choose_template(config.template, of_gates, model=model)
        if config.backend == "vllm":
            assert gates is not None, "checked with the options"
            assert allocation is not None
            engine: Any = _open_vllm(config, model, gates, allocation, cache, texts, template)
        else:
            engine = _open_hf(config, model, gates, allocation, cache)
        lengths = engine.prompt_lengths([render_prompt(engine.tokenizer, text, template) for text in texts])
        longest = max(lengths)
        sampling = replace(sampling, max_new_tokens=config.longest_answer(engine.max_positions, longest))
        if not config.is_chat:  # a chat's turns end at the last position
            check_longest(lengths, sampling.max_new_tokens, engine.max_positions)
        settings = {
            "model": model,
            "allocation": digest(bytes(engine.allocation.full.flatten().tolist())),
            "sparsity": sparsity,
            **engine.describe(),
        }
        return cls(config, engine, sampling, template, problems, settings)

    def heads(self) -> str:
        """How many heads are full and compressible, for summaries."""
        allocation, eviction = self.engine.allocation, self.engine.eviction
        kept_whole = " (prompt kept)" if self.engine.describe().get("protect_prompt") else ""
        policy = kept_whole if eviction is None else f" ({eviction.name})"
        return f"heads: {allocation.num_full} full, {allocation.num_compressible} compressible{policy}"

    def render(self, problem: str) -> str:
        return render_prompt(self.engine.tokenizer, problem, self.template)


def check_longest(lengths: list[int], max_new_tokens: int, positions: int) -> None:
    """Raise ``ValueError`` if the longest prompt does not fit, before anything is decoded or written."""
    number = max(range(len(lengths)), key=lengths.__getitem__)
    name = f"problem {number + 1}" if len(lengths) > 1 else "the prompt"
    check_length(name, lengths[number], max_new_tokens, positions)


def _open_hf(
    config: InferConfig, name: str, gates: HeadGates | None, allocation: HeadAllocation | None, cache: CacheSettings
) -> InferenceEngine:
    from rlkv.inference.compress import resolve_allocation
    from rlkv.models.loading import load_model

    model, tokenizer = load_model(name, dtype=config.dtype, device=config.device)
    if gates is not None:
        gates.check_model(model.config)
    return InferenceEngine(
        model,
        tokenizer,
        resolve_allocation(model, allocation),
        cache.sink,
        cache.window,
        cache.prefill,
        config.batch_size,
        cache.eviction,
        protect_prompt=cache.protect_prompt,
    )


def _open_vllm(
    config: InferConfig,
    name: str,
    gates: HeadGates,
    allocation: HeadAllocation,
    cache: CacheSettings,
    problems: list[str],
    template: str,
) -> Any:
    from rlkv.models.loading import load_tokenizer
    from rlkv.vllm.engine import load_config
    from rlkv.vllm.serving_engine import ServingEngine
    from rlkv.vllm.settings import ServingSettings

    tokenizer, settings = load_tokenizer(name), ServingSettings.of(allocation, cache)
    model_config = load_config(name)
    gates.check_model(model_config)
    texts = [render_prompt(tokenizer, problem, template) for problem in problems]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
    longest = max(lengths)
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    cache.check_positions(limit)
    check_longest(lengths, config.longest_answer(limit, longest), limit)
    # room for the longest text and no more; what the model does not take is refused with its prompt
    positions = longest + config.longest_answer(limit, longest)
    return ServingEngine(name, settings, config.batch_size, dtype=config.dtype, max_positions=positions)
