"""The options of ``rlkv-infer``, and what they rule out before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkv.inference.options import CacheOptions, ModelOptions, SamplingOptions
from rlkv.models.builtin import PACKAGED_GATES
from rlkv.utils.jsonl import is_text

FILE_TOKENS = 8192  # of an answer in a file; the paper's evaluation

if TYPE_CHECKING:
    from rlkv.eviction.base import EvictionPolicy


@dataclass(frozen=True, kw_only=True)
class InferConfig(SamplingOptions, CacheOptions, ModelOptions):
    """What to answer, with which model, and what its heads keep."""

    gates: str | None = None
    """gates file, folder or hub address (gates.pt, .safetensors, .tsv, PEFT); 'tiny', 'smol': built in"""
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
    """prompt template: rlkv, boxed or plain; default: the one that the gates were trained with, else rlkv"""
    prefill: str | None = None  # type: ignore[assignment]
    """full, local (as in training) or published: how prompts are read; default: full, with vllm local"""
    scope: Literal["global", "layer"] = "global"
    """heads compete in the whole model, or in each layer"""
    max_new_tokens: int | None = None
    """longest answer, in tokens; default: up to the model's limit, of --input and vllm at most 8192"""
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
        """Which gates to load: built-in models have their own; None: an eviction policy serves all heads."""
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
            raise ValueError("--prompt answers one text, --input and --output a file of them: pass one or the other")
        if (self.input is None) != (self.output is None):
            raise ValueError("--input and --output belong together: the problems, and where their answers go")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("--prompt is empty: there is nothing to answer")
        if self.prompt is not None and not is_text(self.prompt):
            raise ValueError("--prompt holds bytes that are no UTF-8: write it in UTF-8")
        if self.compare_full and self.is_chat:
            raise ValueError("--compare-full needs --prompt or --input: a chat continues with one cache only")

    def _check_heads(self) -> None:
        if self.eviction is None and (self.budget is not None or self.ratio is not None or self.eviction_option):
            raise ValueError("--budget, --ratio and --eviction-option need --eviction, the policy that they are for")
        if self.eviction is not None and any(x is not None for x in (self.sink, self.window, self.protect_prompt)):
            raise ValueError(
                "--sink, --window and --protect-prompt do not apply with --eviction: use the fields of the policy, "
                "such as --eviction-option sink=4 protect_prompt=true"
            )
        if self.gates_source is not None:
            return
        if self.eviction is None:
            raise ValueError(
                "--gates is missing: pass the gates file that says which heads need the whole past ('tiny' or 'smol' "
                "for a built-in model's, or one that rlkv-train wrote), or --eviction to drop tokens in all heads"
            )
        if self.sparsity is not None:
            raise ValueError("--sparsity needs --gates: without them --eviction drops tokens in all heads")
        if self.backend == "vllm":
            raise ValueError("--backend vllm needs --gates; for all heads, --sparsity 1")
        if self.model is None:
            raise ValueError("--model is missing: without --gates nothing names the model")

    def _check_backend(self) -> None:
        if self.backend == "hf":
            return
        if self.compare_full:
            raise ValueError("--compare-full does not work with --backend vllm: leave out one of the two")
        if self.prefill == "published":
            raise ValueError("--prefill published does not work with --backend vllm: use full or local")
        if self.device != "auto":
            raise ValueError("--device does not work with --backend vllm: the installed vLLM is for CPUs or for GPUs")
        if self.is_chat:
            raise ValueError("--backend vllm needs --prompt or --input; for chats, use `vllm serve`")

    def policy(self) -> EvictionPolicy | None:
        """The eviction policy of the compressible heads; None: they keep sinks and a window.

        Raises:
            ValueError: for an unknown policy or option, and values that the policy refuses.
        """
        if self.eviction is None:
            return None
        from rlkv.eviction import make_policy, parse_options

        sizes = {name: getattr(self, name) for name in ("budget", "ratio") if getattr(self, name) is not None}
        given = parse_options(list(self.eviction_option))
        twice = sorted(given.keys() & sizes.keys())
        if twice:
            raise ValueError(f"{twice[0]} is given twice: by --{twice[0]} and by --eviction-option")
        return make_policy(self.eviction, **given, **sizes)
