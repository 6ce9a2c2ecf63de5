"""Parts of ``rlkv-infer``: its options, a loaded engine, and files of problems."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlkv.cache import CacheSettings
from rlkv.eviction import EvictionPolicy, make_policy, parse_options
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.inference.compress import check_servable, resolve_allocation
from rlkv.inference.engine import InferenceEngine
from rlkv.inference.options import CacheOptions, ModelOptions, SamplingOptions, check_least
from rlkv.models.builtin import PACKAGED_GATES
from rlkv.models.loading import files_digest, load_config, load_model, load_tokenizer
from rlkv.models.prompts import choose_template, render_prompt
from rlkv.models.shape import max_positions
from rlkv.rollout.base import NO_USAGE, Completion, SamplingParams, Usage, check_length
from rlkv.utils.files import is_text, read_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import digest, digest_of, library_facts, provenance
from rlkv.utils.store import check_output, open_store
from rlkv.verifier import check_installed, has_answer, is_correct
from rlkv.verifier.extraction import opening
from rlkv.vllm.settings import ServingSettings, check_temperature

FILE_TOKENS = 8192  # of an answer in a file; the paper's evaluation
DEFAULT_SPARSITY = 0.5


@dataclass(frozen=True, kw_only=True)
class InferConfig(SamplingOptions, CacheOptions, ModelOptions):
    """Texts to answer, the model, and what its heads keep."""

    gates: str | None = None
    """gates file, folder or hub address (gates.pt, .safetensors, .tsv, PEFT); 'tiny', 'smol': built
    in
    """
    sparsity: float | None = None
    """share of KV heads to compress, 0 to 1; with gates the default is 0.5"""
    eviction: str | None = None
    """what compressible heads keep; by default the first tokens (sinks) and a window of the last"""
    evict_from: Literal["compressible", "full"] = "compressible"
    """full: --eviction is of the full heads, and the others keep sinks and a window (two budgets)
    """
    budget: int | None = None
    """entries per head that --eviction keeps"""
    ratio: float | None = None
    """instead of --budget: share of the text so far, without a protected prompt"""
    eviction_option: tuple[str, ...] = ()
    """fields of the policy, such as variant=published lam=0.2"""
    model: str | None = None  # type: ignore[assignment]
    """model folder, GGUF file, hub id, 'tiny' or 'smol'; default: the one that the gates name"""
    prompt: str | None = None
    """answer this and stop"""
    input: Path | None = None
    """JSONL with a field 'problem' (and 'answer') per line"""
    output: Path | None = None
    """where the answers to --input go; a rerun resumes"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: the one that the gates were trained with,
    else rlkv (of 'smol' plain)
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
        """Gates to load, for a built-in model its own; None: a policy serves all heads."""
        has_own = self.gates is None and self.eviction is None and self.model in PACKAGED_GATES
        return self.model if has_own else self.gates

    def longest_answer(self, positions: int, longest_prompt: int) -> int:
        """Tokens that an answer may have, for a model of ``positions``."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        room = max(1, positions - longest_prompt)
        return room if self.input is None and self.backend == "hf" else min(room, FILE_TOKENS)

    def check(self) -> None:
        """Raise ValueError for options that contradict each other."""
        self._check_task()
        self._check_heads()
        if self.backend == "vllm":
            self._check_vllm()

    def _check_task(self) -> None:
        prompt = self.prompt
        if prompt is not None and (self.input is not None or self.output is not None):
            raise ValueError(
                "--prompt answers one text, --input and --output a file of them: pass one or the "
                "other"
            )
        if (self.input is None) != (self.output is None):
            raise ValueError(
                "--input and --output belong together: the problems, and where their answers go"
            )
        if prompt is not None and not prompt.strip():
            raise ValueError("--prompt is empty: there is nothing to answer")
        if prompt is not None and not is_text(prompt):
            raise ValueError("--prompt holds bytes that are not UTF-8: write it in UTF-8")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k != 0):
            raise ValueError(
                "--top-p and --top-k limit what is drawn, and --temperature 0 draws nothing: pass "
                "a --temperature above 0, or leave them out"
            )
        if self.compare_full and self.is_chat:
            raise ValueError(
                "--compare-full needs --prompt or --input: a chat continues with one cache only"
            )

    def _check_heads(self) -> None:
        of_policy = (self.budget, self.ratio, self.eviction_option or None)
        of_window = (self.sink, self.window, self.protect_prompt)
        check_least(self, 1, "batch_size")
        if self.eviction is None and any(value is not None for value in of_policy):
            raise ValueError(
                "--budget, --ratio and --eviction-option need --eviction, the policy that they are "
                "for"
            )
        if self.eviction is None and self.evict_from == "full":
            raise ValueError(
                "--evict-from full needs --eviction, the policy by which full heads drop tokens"
            )
        takes_all = self.eviction is not None and self.evict_from == "compressible"
        if takes_all and any(value is not None for value in of_window):
            raise ValueError(
                "--sink, --window and --protect-prompt do not apply with --eviction: use the "
                "fields of the policy, such as --eviction-option sink=4 or protect_prompt=true"
            )
        if self.gates_source is not None:
            return
        if self.eviction is None:
            raise ValueError(
                "--gates is missing: pass the gates file that says which heads need the whole past "
                "('tiny' or 'smol' for a built-in model's, or one that rlkv-train wrote), or "
                "--eviction to drop tokens in all heads"
            )
        if self.sparsity is not None or self.scope != "global":
            raise ValueError(
                "--sparsity and --scope need --gates: without them --eviction drops tokens in all "
                "heads"
            )
        if self.evict_from == "full":
            raise ValueError("--evict-from full needs --gates, which say which heads are full")
        if self.backend == "vllm":
            raise ValueError("--backend vllm needs --gates; for all heads, --sparsity 1")
        if self.model is None:
            raise ValueError("--model is missing: without --gates nothing names the model")

    def _check_vllm(self) -> None:
        if self.compare_full:
            raise ValueError(
                "--compare-full does not work with --backend vllm: leave out one of the two"
            )
        if self.prefill == "published":
            raise ValueError(
                "--prefill published does not work with --backend vllm: use full or local"
            )
        if self.evict_from == "full":
            raise ValueError(
                "--evict-from full does not work with --backend vllm: use the backend hf"
            )
        if self.device != "auto":
            raise ValueError(
                "--device does not work with --backend vllm: the installed vLLM is for CPUs or for "
                "GPUs"
            )
        check_temperature(self.temperature)
        if self.is_chat:
            raise ValueError(
                "--backend vllm needs --prompt or --input; for chats, use `vllm serve`"
            )

    def policy(self) -> EvictionPolicy | None:
        """Return the eviction policy; None: no head has one.

        Raises:
            ValueError: for an unknown policy or option, and values that the policy refuses.
        """
        if self.eviction is None:
            return None
        given = parse_options(list(self.eviction_option))
        for name, value in (("budget", self.budget), ("ratio", self.ratio)):
            if value is None:
                continue
            if name in given:
                raise ValueError(f"{name} is given twice: by --{name} and by --eviction-option")
            given[name] = value
        return make_policy(self.eviction, **given)


def read_problems(path: Path) -> list[dict[str, Any]]:
    """Read one object per line, each with a text ``problem`` and, if known, an ``answer``.

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
                    f"{where}: its problem holds half a surrogate pair and is not text: correct it"
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
        cache: what the heads keep.
        problems: those of ``config.input``, else none.
        settings: what completions depend on in addition to their prompts.
    """

    config: InferConfig
    engine: Any
    cache: CacheSettings
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
        policy = config.policy()
        longest = 1 if config.max_new_tokens is None else config.max_new_tokens
        sampling = config.sampling_params(longest)
        problems = [] if config.input is None else read_problems(config.input)
        if any(has_answer(problem.get("answer")) for problem in problems):
            check_installed()  # before a batch is decoded, after which some output would need it
        gates = None if config.gates_source is None else HeadGates.load(config.gates_source)
        sparsity = config.sparsity
        allocation = None
        if gates is not None:
            sparsity = DEFAULT_SPARSITY if sparsity is None else sparsity
            allocation = HeadAllocation.from_gates(gates, sparsity, config.scope)
        prefill = config.prefill or ("local" if config.backend == "vllm" else "full")
        of_gates = {} if gates is None else {"": gates}
        cache = replace(config, prefill=prefill).cache_settings(of_gates, policy, config.evict_from)
        if allocation is not None:
            cache.check_heads(allocation.num_full)
        model = config.model
        if model is None and gates is not None:
            model = gates.model_id or None
        if model is None:
            raise ValueError(f"{config.gates} does not name its model: pass --model")
        trained_with = None if gates is None else gates.training.get("template")
        template = choose_template(config.template, trained_with, model=model)
        if config.backend == "vllm":
            from rlkv.vllm.engine import ServingEngine

            assert allocation is not None, "checked with the options"
            serving = ServingSettings.of(allocation, cache)
            tokenizer = load_tokenizer(model)
            model_config = load_config(model)
        else:
            loaded, tokenizer = load_model(model, config.dtype, config.device)
            model_config = loaded.config
        if gates is not None:
            gates.check_model(model_config)
        positions = max_positions(model_config)
        cache.check_positions(positions)
        texts = [problem["problem"] for problem in problems] or [config.prompt or ""]
        rendered = [render_prompt(tokenizer, text, template) for text in texts]
        lengths = [len(ids) for ids in tokenizer(rendered, add_special_tokens=False).input_ids]
        longest = config.longest_answer(positions, max(lengths))
        if not config.is_chat:  # a chat's turns end at the last position
            number = max(range(len(lengths)), key=lengths.__getitem__)
            name = f"problem {number + 1}" if len(lengths) > 1 else "the prompt"
            check_length(name, lengths[number], longest, positions)
        engine: Any
        if config.backend == "vllm":
            # room for the longest text and no more, or for as many tokens as a policy drops some of
            room = max(lengths) + longest
            if policy is not None and policy.budget is not None:
                room = max(room, policy.budget + policy.buffer + 1)
            engine = ServingEngine(
                model, serving, config.batch_size, dtype=config.dtype, max_positions=room
            )
        else:
            check_servable(loaded)
            heads = resolve_allocation(loaded, allocation)
            engine = InferenceEngine(loaded, tokenizer, heads, cache, config.batch_size)
        settings = {
            "model": model,
            "allocation": digest(bytes(engine.allocation.full.flatten().tolist())),
            "sparsity": sparsity,
            **engine.describe(),
            "model_files": files_digest(model),
            "libraries": library_facts(),
        }
        sampling = replace(sampling, max_new_tokens=longest)
        return cls(config, engine, cache, sampling, template, problems, settings)

    def heads(self) -> str:
        """Say how many heads are full and compressible, for summaries."""
        allocation = self.engine.allocation
        kept = []
        for is_full in (True, False):
            policy = self.cache.policy_of(is_full)
            kept.append("" if policy is None else f" ({policy.name})")
        if self.cache.protect_prompt:
            kept[1] = " (prompt kept)"
        return (
            f"heads: {allocation.num_full} full{kept[0]}, "
            f"{allocation.num_compressible} compressible{kept[1]}"
        )

    def render(self, problem: str) -> str:
        return render_prompt(self.engine.tokenizer, problem, self.template)


def run_batches(session: InferSession) -> tuple[list[dict[str, Any]], int, dict[str, Usage]]:
    """Decode the problems of ``--input`` that ``--output`` does not answer yet, batch by batch.

    Returns:
        All rows of the output, how many of them were there before, and what the new ones cost:
        with the small cache ("") and, if asked for, with the full one ("_full").  What each gave
        has fields of the rows with this suffix.

    Raises:
        ValueError: for an output of other settings, one that was edited or that another process is
            writing.
    """
    config = session.config
    problems = session.problems
    size = session.engine.batch_size
    assert config.output is not None
    settings = {
        **session.settings,
        **dataclasses.asdict(session.sampling),
        "batch_size": size,
        "template": session.template,
        "compare_full": config.compare_full,
        "input": digest_of(problems),
    }
    options = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    recorded = {"options": options, **provenance()}
    del recorded["finished"]
    usages = {"": NO_USAGE}
    if config.compare_full:
        usages["_full"] = NO_USAGE
    with (
        open_store(config.output, settings, ["index"], recorded) as store,
        progress_bar("decode", "problems", len(problems)) as bar,
    ):
        resumed = len(store.rows)
        if [row["index"] for row in store.rows] != list(range(resumed)) or resumed > len(problems):
            raise ValueError(
                f"{config.output} does not answer the input line by line: the file was edited"
            )
        bar.resume(resumed)
        # a batch that a kill has cut off is decoded again as a whole, which rounds the same way
        first = resumed if resumed == len(problems) else resumed - resumed % size
        for begin in range(first, len(problems), size):
            batch = problems[begin : begin + size]
            prompts = [session.render(problem["problem"]) for problem in batch]
            numbers = range(begin, begin + len(batch))
            rows: list[dict[str, Any]] = []
            for index, problem in zip(numbers, batch, strict=True):
                row = {"index": index, "problem": problem["problem"]}
                if "answer" in problem:
                    row["answer"] = problem["answer"]
                rows.append(row)
            for suffix in usages:
                completions, usage = session.engine.batch(
                    prompts, session.sampling, full=suffix == "_full", numbers=numbers
                )
                usages[suffix] += usage
                for row, prompt, completion in zip(rows, prompts, completions, strict=True):
                    row |= _outcome(prompt, row.get("answer"), completion, suffix)
            missing = rows[len(store.rows) - begin :]
            store.append(*missing)
            bar.advance(len(missing))
        return store.rows, resumed, usages


def _outcome(prompt: str, answer: Any, completion: Completion, suffix: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {
        "output": completion.text,
        "output_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if has_answer(answer):
        outcome["correct"] = is_correct(opening(prompt) + completion.text, answer)
    return {name + suffix: value for name, value in outcome.items()}
