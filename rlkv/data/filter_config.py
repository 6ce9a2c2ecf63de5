"""Options of the filter: the paper's, for the built-in models their own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from rlkv.data.curriculum import PAPER_BUCKETS, SMOL_BUCKETS, TINY_BUCKETS, Bucket, curriculum_folder, parse_buckets
from rlkv.data.deepscaler import HUB_DATASET
from rlkv.inference.options import ModelOptions, check_positive
from rlkv.models.builtin import SMOL, TINY
from rlkv.smol.task import MAX_NEW_TOKENS
from rlkv.vllm.choice import check_vllm_options, choose_engine

if TYPE_CHECKING:
    from rlkv.rollout.base import RolloutEngine
    from rlkv.rollout.estimate import Footprint

Preset = dict[str, Any]
DEFAULT_BATCH = 16  # problems decoded together, where no GPU says what fits


def _preset(input: str, max_length: int, max_new_tokens: int, template: str, buckets: tuple[Bucket, ...]) -> Preset:
    sizes = {"max_length": max_length, "max_new_tokens": max_new_tokens}
    return {"input": input, **sizes, "template": template, "buckets": tuple(map(str, buckets))}


# arXiv 2510.08525: max length 8192, of it 7168 for the completion
PAPER = _preset(HUB_DATASET, 8192, 7168, "rlkv", PAPER_BUCKETS)
BUILT_IN = {
    TINY: _preset(TINY, 1024, 440, "rlkv", TINY_BUCKETS),
    SMOL: _preset(SMOL, 1024, MAX_NEW_TOKENS, "plain", SMOL_BUCKETS),
}


@dataclass(frozen=True, kw_only=True)
class FilterConfig(ModelOptions):
    """One filter job: which problems, how they are decoded, and what is chosen of them."""

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    """hub id, local folder, or tiny or smol (built in)"""
    input: str | None = None
    """.jsonl or .parquet file, hub data set, tiny or smol (new problems); default: the model's, or DeepScaleR"""
    num_problems: int = 400
    """how many problems --input tiny and smol draw"""
    limit: int | None = None
    """use only the first N problems"""
    seed: int = 0
    """seed of the sampling, and of --input tiny and smol"""
    template: str | None = None
    """prompt template: rlkv, boxed or plain; default: plain for the model smol, else rlkv"""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """what decodes: transformers (hf) or vLLM; auto: vLLM where it is installed, transformers for built-in models"""
    batch_size: int | None = None
    """problems decoded together; default: what the GPU holds, without one 16"""
    kv_gib: float | None = None
    """vllm: memory of its KV cache in GiB; default: what the GPU has left, without one 4"""
    max_new_tokens: int | None = None
    """tokens of a completion; default: 440 for the model tiny, 448 for smol, else 7168"""
    outputs: str | None = None
    """file of recorded outputs (problem + output) to filter; nothing is decoded"""
    outputs_field: str = "output"
    """field of --outputs that holds the output, e.g. solution"""
    output_dir: str | None = None
    """where shards, curriculum and report go; default: results/curriculum_MODEL"""
    buckets: tuple[str, ...] = ()
    """output tokens LOW-HIGH:COUNT (above LOW, at most HIGH), several with commas or spaces; default: the paper's"""
    fill_short_buckets: bool = False
    """fill short buckets from what others have left over"""
    max_length: int | None = None
    """tokens of prompt and completion together; default: 1024 for the models tiny and smol, else 8192"""
    shard: str = "0/1"
    """i/n: do every n-th problem, from the i-th (counted from 0); the processes of a launcher divide a shard further"""

    def check(self) -> None:
        check_positive(self, "num_problems", "batch_size", "max_new_tokens", "limit", "max_length")
        check_vllm_options(self.engine, self.device, self.kv_gib)
        if self.engine == "vllm" and find_spec("vllm") is None:
            raise ValueError("engine 'vllm' comes with the extra rlkv[vllm], which is not installed: use --engine hf")
        if self.buckets:
            parse_buckets(",".join(self.buckets))
        parse_shard(self.shard)

    def of_process(self, rank: int, processes: int) -> FilterConfig:
        """The part of the shard that one of several processes does."""
        shard, count = parse_shard(self.shard)
        return replace(self, shard=f"{shard + count * rank}/{count * processes}")

    def resolved(self) -> FilterConfig:
        """With the model's default for everything that was not given."""
        preset = dict(BUILT_IN.get(self.model, PAPER))
        if self.outputs is not None:
            preset["input"] = self.outputs  # recorded outputs that carry their answers
        preset["output_dir"] = str(curriculum_folder(self.model))
        chosen = {name: value for name, value in preset.items() if getattr(self, name) in (None, ())}
        resolved = replace(self, **chosen)
        assert resolved.max_length is not None
        return replace(resolved, engine=resolved.chosen_engine(resolved.max_length)[0])

    def chosen_engine(self, positions: int) -> tuple[Literal["hf", "vllm"], str]:
        """The engine that ``auto`` stands for, for texts of ``positions`` tokens, and why it is not vLLM."""
        if self.engine != "auto":
            return self.engine, ""
        if self.model in BUILT_IN or self.device != "auto":
            return "hf", ""
        from rlkv.models.loading import resolve_device
        from rlkv.rollout.estimate import Footprint, free_memory

        free = free_memory(resolve_device())
        engine, why = choose_engine("auto", has_gpu=free is not None)
        if engine == "hf":
            return "hf", why
        footprint = None if free is None or self.kv_gib is not None else Footprint.of(self.model, self.dtype)
        lacking = 0.0 if footprint is None or free is None else footprint.lacking(footprint.kv_room(free), positions)
        return ("hf", f"the GPU is too small for vLLM by about {lacking:.1f} GiB") if lacking else ("vllm", "")

    def sized(self, footprint: Footprint | None, positions: int) -> FilterConfig:
        """With rows of ``positions`` tokens and memory that fit the GPU, where none were given; of a chosen engine.

        Raises:
            ValueError: if the GPU is too small for vLLM.
        """
        from rlkv.models.loading import resolve_device
        from rlkv.rollout.estimate import DEFAULT_KV_GIB, GIB, free_memory

        free, kv_gib, rows = free_memory(resolve_device(self.device)), self.kv_gib, self.batch_size
        if footprint is not None and free is not None:
            room = footprint.kv_room(free)
            if self.engine == "vllm":
                kv_gib = kv_gib or footprint.vllm_kv_gib(free, positions)
                room = int(kv_gib * GIB)
            rows = rows or footprint.rows(self.engine, room, positions)
        return replace(self, kv_gib=kv_gib or DEFAULT_KV_GIB, batch_size=rows or DEFAULT_BATCH)

    def load_engine(self, positions: int) -> RolloutEngine:
        """The model in its engine, for texts of up to ``positions`` tokens; of sized options."""
        assert self.batch_size is not None
        assert self.kv_gib is not None
        if self.engine == "vllm":
            from rlkv.vllm.engine import VLLMEngine

            return VLLMEngine(self.model, None, self.dtype, positions, self.kv_gib, self.batch_size)
        from rlkv.rollout.hf import HFEngine

        return HFEngine(*self.load(), batch_size=self.batch_size)


def parse_shard(text: str) -> tuple[int, int]:
    """``(shard, number of shards)`` of ``i/n``, i counted from 0; ``ValueError`` for another form, or i not below n."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not match or not int(match.group(1)) < int(match.group(2)):
        raise ValueError(f"shard {text!r} is not of the form i/n with i from 0 to n-1, for instance 0/4, 1/4, 2/4, 3/4")
    return int(match.group(1)), int(match.group(2))
