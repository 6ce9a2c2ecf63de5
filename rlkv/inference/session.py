"""What ``rlkv-infer`` decodes with: gates are read once, become an allocation once, and that goes
to the engine.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlkv.cache import CacheSettings
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import CacheOptions, ModelOptions, SamplingOptions
from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage, check_length
from rlkv.utils.files import is_text, read_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest, provenance
from rlkv.utils.store import check_output, open_store

if TYPE_CHECKING:
    from rlkv.eviction.base import EvictionPolicy

FILE_TOKENS = 8192  # of an answer in a file; the paper's evaluation


@dataclass(frozen=True, kw_only=True)
class InferConfig(SamplingOptions, CacheOptions, ModelOptions):
    """What to answer, with which model, and what its heads keep."""

    gates: str | None = None
    """gates file, folder or hub address (gates.pt, .safetensors, .tsv, PEFT); 'tiny', 'smol': built
    in
    """
    sparsity: float | None = None
    """share of KV heads to compress, 0 to 1; with gates the default is 0.5"""
    eviction: str | None = None
    """what compressible heads keep; by default the first tokens (sinks) and a window of the last"""
    budget: int | None = None
    """entries per head that --eviction keeps"""
    ratio: float | None = None
    """instead of --budget: share of the text so far"""
    eviction_option: tuple[str, ...] = ()
    """fields of the policy, such as variant=published lam=0.2"""
    model: str | None = None  # type: ignore[assignment]
    """model folder, hub id, 'tiny' or 'smol'; default: the one that the gates name"""
    prompt: str | None = None
    """answer this and stop"""
    input: Path | None = None
    """JSONL with a field 'problem' (and 'answer') per line"""
    output: Path | None = None
    """where the answers to --input go; a rerun resumes"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: the one that the gates were trained with,
    else rlkv
    """
    prefill: str | None = None  # type: ignore[assignment]
    """full, local (as in training) or published: how prompts are read; default: full, with vllm
    local
    """
    scope: Literal["global", "layer"] = "global"
    """heads compete in the whole model, or in each layer"""
    max_new_tokens: int | None = None
    """longest answer, in tokens; default: up to the model's limit, of --input and vllm at most 8192
    """
    batch_size: int = 8
    """problems of --input that are decoded together"""
    compare_full: bool = False
    """decode with the full cache too"""
    backend: Literal["hf", "vllm"] = "hf"
    """transformers, or vLLM for many texts at once"""

    @property
    def is_chat(self) -> bool:
        return self.prompt is None and self.input is None

    @property
    def gates_source(self) -> str | None:
        """Which gates to load: built-in models have their own; None: an eviction policy serves all
        heads.
        """
        has_own = self.gates is None and self.eviction is None and self.model in PACKAGED_GATES
        return self.model if has_own else self.gates

    def longest_answer(self, positions: int, longest_prompt: int) -> int:
        """Tokens that an answer may have, for a model of ``positions``."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        room = max(1, positions - longest_prompt)
        return room if self.input is None and self.backend == "hf" else min(room, FILE_TOKENS)

    def check(self) -> None:
        """Raise ``ValueError`` for options that contradict each other."""
        self._check_task()
        self._check_heads()
        self._check_backend()

    def _check_task(self) -> None:
        if self.prompt is not None and (self.input or self.output):
            raise ValueError(
                "--prompt answers one text, --input and --output a file of them: pass one or the "
                "other"
            )
        if (self.input is None) != (self.output is None):
            raise ValueError(
                "--input and --output belong together: the problems, and where their answers go"
            )
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("--prompt is empty: there is nothing to answer")
        if self.prompt is not None and not is_text(self.prompt):
            raise ValueError("--prompt holds bytes that are no UTF-8: write it in UTF-8")
        if self.compare_full and self.is_chat:
            raise ValueError(
                "--compare-full needs --prompt or --input: a chat continues with one cache only"
            )

    def _check_heads(self) -> None:
        if self.eviction is None and (
            self.budget is not None or self.ratio is not None or self.eviction_option
        ):
            raise ValueError(
                "--budget, --ratio and --eviction-option need --eviction, the policy that they are "
                "for"
            )
        if self.eviction is not None and any(
            x is not None for x in (self.sink, self.window, self.protect_prompt)
        ):
            raise ValueError(
                "--sink, --window and --protect-prompt do not apply with --eviction: use the "
                "fields of the policy, "
                "such as --eviction-option sink=4 protect_prompt=true"
            )
        if self.gates_source is not None:
            return
        if self.eviction is None:
            raise ValueError(
                "--gates is missing: pass the gates file that says which heads need the whole past "
                "('tiny' or 'smol' "
                "for a built-in model's, or one that rlkv-train wrote), or --eviction to drop "
                "tokens in all heads"
            )
        if self.sparsity is not None:
            raise ValueError(
                "--sparsity needs --gates: without them --eviction drops tokens in all heads"
            )
        if self.backend == "vllm":
            raise ValueError("--backend vllm needs --gates; for all heads, --sparsity 1")
        if self.model is None:
            raise ValueError("--model is missing: without --gates nothing names the model")

    def _check_backend(self) -> None:
        if self.backend == "hf":
            return
        if self.compare_full:
            raise ValueError(
                "--compare-full does not work with --backend vllm: leave out one of the two"
            )
        if self.prefill == "published":
            raise ValueError(
                "--prefill published does not work with --backend vllm: use full or local"
            )
        if self.device != "auto":
            raise ValueError(
                "--device does not work with --backend vllm: the installed vLLM is for CPUs or for "
                "GPUs"
            )
        if self.is_chat:
            raise ValueError(
                "--backend vllm needs --prompt or --input; for chats, use `vllm serve`"
            )

    def policy(self) -> EvictionPolicy | None:
        """The eviction policy of the compressible heads; None: they keep sinks and a window.

        Raises:
            ValueError: for an unknown policy or option, and values that the policy refuses.
        """
        if self.eviction is None:
            return None
        from rlkv.eviction import make_policy, parse_options

        sizes = {
            name: getattr(self, name)
            for name in ("budget", "ratio")
            if getattr(self, name) is not None
        }
        given = parse_options(list(self.eviction_option))
        twice = sorted(given.keys() & sizes.keys())
        if twice:
            raise ValueError(f"{twice[0]} is given twice: by --{twice[0]} and by --eviction-option")
        return make_policy(self.eviction, **given, **sizes)


DEFAULT_SPARSITY = 0.5


def read_problems(path: Path) -> list[dict[str, Any]]:
    """One object per line, each with a text ``problem`` and, if known, an ``answer``.

    Raises:
        ValueError: if the file is absent or empty, or a line is not such an object (names the
            line).
    """
    problems = []
    try:
        for where, row in read_jsonl(path):
            if not isinstance(row.get("problem"), str) or not row["problem"]:
                raise ValueError(f"{where} has no text field 'problem'")
            if isinstance(row.get("answer"), dict | list):
                raise ValueError(
                    f"{where}: field 'answer' is a {type(row['answer']).__name__}, expected text"
                )
            if not is_text(row["problem"]):
                raise ValueError(
                    f"{where}: its problem holds half a surrogate pair, which is no text: correct "
                    "it"
                )
            problems.append(row)
    except OSError as error:
        raise ValueError(f"cannot read the problems from {path}: {error}") from None
    if not problems:
        raise ValueError(
            f"{path} holds no problems: it needs one JSON object with a field 'problem' per line"
        )
    return problems


@dataclass(frozen=True)
class InferSession:
    """A loaded engine under an allocation.

    Attributes:
        engine: an :class:`InferenceEngine`, or a :class:`rlkv.vllm.engine.ServingEngine`.
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
        cache = replace(config, prefill=prefill).cache_settings(
            {} if gates is None else {"": gates}, policy
        )
        model = config.model or (
            gates.model.model_id if gates is not None and gates.model is not None else None
        )
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
        lengths = engine.prompt_lengths(
            [render_prompt(engine.tokenizer, text, template) for text in texts]
        )
        longest = max(lengths)
        sampling = replace(
            sampling, max_new_tokens=config.longest_answer(engine.max_positions, longest)
        )
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
        return (
            f"heads: {allocation.num_full} full, {allocation.num_compressible} compressible{policy}"
        )

    def render(self, problem: str) -> str:
        return render_prompt(self.engine.tokenizer, problem, self.template)


def check_longest(lengths: list[int], max_new_tokens: int, positions: int) -> None:
    """Raise ``ValueError`` if the longest prompt does not fit, before anything is decoded or
    written.
    """
    number = max(range(len(lengths)), key=lengths.__getitem__)
    name = f"problem {number + 1}" if len(lengths) > 1 else "the prompt"
    check_length(name, lengths[number], max_new_tokens, positions)


def _open_hf(
    config: InferConfig,
    name: str,
    gates: HeadGates | None,
    allocation: HeadAllocation | None,
    cache: CacheSettings,
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
    from rlkv.vllm.engine import ServingEngine, load_config
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
    return ServingEngine(
        name, settings, config.batch_size, dtype=config.dtype, max_positions=positions
    )


@dataclass(frozen=True)
class BatchReport:
    """What a run did: all lines of the output, how many of them were there before, usage of the new
    ones.
    """

    rows: list[dict[str, Any]]
    resumed: int
    usage: Usage
    usage_full: Usage

    def accuracy(self, field: str = "correct") -> tuple[float, int] | None:
        """Share of right answers (``correct`` or ``correct_full``), and of how many.

        None if the input has none.
        """
        judged = [row[field] for row in self.rows if field in row]
        return (sum(judged) / len(judged), len(judged)) if judged else None


def run_batches(session: InferSession) -> BatchReport:
    """Decode the problems of ``--input`` that ``--output`` does not answer yet,
    ``engine.batch_size`` at a time.

    Raises:
        ValueError: for an output of other settings, one that was edited or that another process is
            writing.
    """
    config, engine, problems = session.config, session.engine, session.problems
    assert config.input is not None
    assert config.output is not None
    settings = {
        **session.settings,
        **dataclasses.asdict(session.sampling),
        "batch_size": engine.batch_size,
        "template": session.template,
        "compare_full": config.compare_full,
        "input": digest(config.input.read_bytes()),
    }
    recorded = {
        "options": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        **provenance(),
    }
    usage = usage_full = NO_USAGE
    with (
        open_store(config.output, settings, ["index"], recorded) as store,
        progress_bar("decode", "problems", len(problems)) as bar,
    ):
        resumed, size = len(store.rows), engine.batch_size
        if [row["index"] for row in store.rows] != list(range(resumed)) or resumed > len(problems):
            raise ValueError(
                f"{config.output} does not answer the input line by line: the file was edited"
            )
        bar.resume(resumed)
        first = (
            resumed - resumed % size if resumed < len(problems) else resumed
        )  # the last batch may be short
        for begin in range(first, len(problems), size):
            batch = problems[begin : begin + size]
            prompts = [session.render(problem["problem"]) for problem in batch]
            sampling = dataclasses.replace(
                session.sampling, seed=(session.sampling.seed * 1_000_003 + begin) % 2**63
            )
            completions, spent = engine.batch(prompts, sampling)
            usage += spent
            rows = [
                _row(begin + i, *pair)
                for i, pair in enumerate(zip(batch, completions, strict=True))
            ]
            if config.compare_full:
                full, spent = engine.batch(prompts, sampling, full=True)
                usage_full += spent
                rows = [
                    row | _outcome(problem, c, "_full")
                    for row, problem, c in zip(rows, batch, full, strict=True)
                ]
            missing = rows[len(store.rows) - begin :]
            store.append(*missing)
            bar.advance(len(missing))
        return BatchReport(store.rows, resumed, usage, usage_full)


def _row(index: int, problem: dict[str, Any], completion: Completion) -> dict[str, Any]:
    kept = {"answer": problem["answer"]} if "answer" in problem else {}
    return {
        "index": index,
        "problem": problem["problem"],
        **kept,
        **_outcome(problem, completion, ""),
    }


def _outcome(problem: dict[str, Any], completion: Completion, suffix: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "output": completion.text,
        "output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if problem.get("answer") is not None:
        from rlkv.verifier import is_correct

        outcome["correct"] = is_correct(completion.text, problem["answer"])
    return {name + suffix: value for name, value in outcome.items()}
