"""Rollouts and serving through vLLM in the caller's process: the stock engine and its sampler.

Mixed attention is a model of its own.  Each of several training processes has its own engine, on
the GPU of its local rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkv.attention import LocalSizes
from rlkv.models.loading import (
    dtype_name,
    load_config,
    load_tokenizer,
    model_source,
    resolve_device,
)
from rlkv.models.shape import ModelShape, max_positions
from rlkv.rollout.base import (
    Completion,
    RolloutEngine,
    Rows,
    Sample,
    SamplingParams,
    Usage,
    completion_text,
    end_tokens,
    gate_version,
)
from rlkv.rollout.decoding import Row, StopRule
from rlkv.rollout.footprint import GIB
from rlkv.vllm.packing import OtherLayer, plan_heads
from rlkv.vllm.plugin import check_installed, check_version
from rlkv.vllm.settings import (
    ARCHITECTURES,
    CHECK,
    KEY,
    MIXED_KEY,
    ServingSettings,
    asks_for_check,
    check_temperature,
    resolve_settings,
)

_ENVIRONMENT = {
    # the engine lives in this process; "1" gives it one of its own
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the caller's threads stay where they are
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class VLLMEngine(RolloutEngine):
    """A rollout engine, and a :class:`~rlkv.rollout.base.GatedEngine`.

    Example::

        engine = VLLMEngine("tiny", LocalSizes(sink=4, window=16), dtype="float32")
        engine.set_gates(gates.alpha)  # in place; everything cached under older gates is dropped
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=200, temperature=1.0))
        engine.close()
    """

    def __init__(
        self,
        model: str,
        sizes: LocalSizes | None = None,
        dtype: str = "auto",
        max_positions: int | None = None,
        kv_gib: float = 4.0,
        max_rows: int = 64,
        **engine_options: Any,
    ) -> None:
        """Load ``model`` (``tiny``, a folder or a hub id); all gates are 1 at first.

        Args:
            sizes: S and W of the local branch; None: a stock model without gates.
            max_positions: tokens of a prompt and its completion together; None, or more than the
                model allows: what it allows.
            kv_gib: memory of the KV cache in GiB; rows that do not fit wait.
            max_rows: completions decoded at once.
            engine_options: further options of ``vllm.LLM``.

        Raises:
            ValueError: if vLLM is absent or of an untested version, the model cannot be found or is
                not served, or another engine is open in this process.
        """
        check_version()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from pydantic import ValidationError
        from vllm import LLM
        from vllm.distributed.parallel_state import (
            cleanup_dist_env_and_memory,
            model_parallel_is_initialized,
        )

        # two engines would share state that the first to close destroys
        if model_parallel_is_initialized():
            raise ValueError(
                "one vLLM engine at a time can live in a process: close() the other one first"
            )
        self.tokenizer = load_tokenizer(model)
        self.eos_ids = end_tokens(_generation_config(model), self.tokenizer)
        self.has_gates = sizes is not None
        self._calls = 0
        # where nothing else is asked for, variables in the environment do not ask either
        options: dict[str, Any] = {"additional_config": {KEY: None}}
        # not Mistral's own names, which the engine prefers where a model has both
        options |= {"config_format": "hf", "load_format": "hf"}
        options |= _device_options() | _rank_options() | _length_options(model, max_positions)
        if sizes is not None:
            options |= _mixed_options(model, sizes)
        try:
            self.llm = LLM(
                model_source(model),
                # as the trainer's copy: the engine's own "auto" takes 16 bits on a CPU too
                dtype=dtype_name(dtype, resolve_device()),
                max_num_seqs=max_rows,
                kv_cache_memory_bytes=int(kv_gib * GIB),
                skip_tokenizer_init=True,
                generation_config="vllm",  # what is sampled is what SamplingParams says
                # of what a token was drawn from, below temperature 1 and under top-p and top-k too:
                # what the importance weights of training need
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **{**options, **engine_options},
            )
        except BaseException as error:
            cleanup_dist_env_and_memory()  # a start that fails late leaves state behind
            if isinstance(error, ValidationError):  # our sentence among pydantic's own words
                causes = {}
                for of in error.errors():
                    named = f"{'.'.join(map(str, of['loc']))}: {of['msg']}"
                    causes[str(of.get("ctx", {}).get("error", named))] = True
                raise ValueError("; ".join(causes)) from None
            raise
        self._version = gate_version(self.gates()) if self.has_gates else "stock"

    @property
    def max_positions(self) -> int:
        return self.llm.llm_engine.model_config.max_model_len

    def close(self) -> None:
        """Give the engine's memory back; it cannot be used afterwards."""
        engine = self.llm.llm_engine
        parallel = engine.vllm_config.parallel_config
        is_here = hasattr(engine.engine_core, "engine_core")  # a process that ends empties itself
        is_one = parallel.world_size == 1
        if is_here and (is_one or parallel.distributed_executor_backend == "external_launcher"):
            engine.collective_rpc(_empty_model)
        engine.engine_core.shutdown()

    def gates(self) -> Tensor:
        """The gates that the engine's layers read, float32 ``[num_layers, num_kv_heads]``."""
        return torch.tensor(self._call_worker("rlkv_gates"))

    def set_gates(self, alpha_LH: Tensor) -> str:
        """Overwrite the gates in place and drop everything that was cached under the old ones.

        Returns:
            The version of the gates (:func:`~rlkv.rollout.base.gate_version`).

        Raises:
            ValueError: for another shape, a model without gates, or while completions are being
                sampled.
        """
        if not self.has_gates:
            raise ValueError(
                "this engine was loaded without mixed attention: give it sizes=LocalSizes(sink, "
                "window)"
            )
        if self.llm.llm_engine.has_unfinished_requests():
            raise ValueError("completions are being sampled: gates cannot change under them")
        expected = self.gates().shape
        if alpha_LH.shape != expected:
            raise ValueError(f"the model has gates {list(expected)}, got {list(alpha_LH.shape)}")
        self._version = "none"  # until all of it is done
        self._call_worker("rlkv_set_gates", alpha_LH.detach().float().cpu().tolist())
        self._drop_cached()
        self._version = gate_version(self.gates())
        return self._version

    def _drop_cached(self) -> None:
        # keys and values above layer 0 depend on the gates: none may be used again
        if not self.llm.llm_engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: completions would mix old and new gates"
            )

    def _call_worker(self, method: str, *args: Any) -> Any:
        return self.llm.llm_engine.collective_rpc(method, args=args)[0]

    def sample(
        self, rows: Rows, sampling: SamplingParams, eos_ids: list[int] | None = None
    ) -> Iterator[tuple[int, Sample]]:
        """Yield ``(index into rows.prompts, sample)`` as completions finish.

        The draws of a row depend on its number, the rollout and the seed.  ``ValueError`` as
        :meth:`check_prompts`.
        """
        ends = self.eos_ids if eos_ids is None else eos_ids
        for row in self._decode(rows, sampling, ends, logprobs=True):
            assert row.finish_reason is not None
            yield row.index, Sample(row.token_ids, row.logprobs, row.finish_reason, self._version)

    def stream(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        numbers: Sequence[int] | None = None,
        stop: StopRule | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Yield ``(index into prompts, completion)``; errors as :meth:`sample`.

        ``stop`` ends rows early, with the finish reason ``repetition``.
        """
        encoded = self.tokenize(prompts)
        rows = Rows(encoded, list(range(len(encoded)) if numbers is None else numbers), 0)
        for row in self._decode(rows, sampling, self.eos_ids, stop=stop):
            assert row.finish_reason is not None
            text = completion_text(self.tokenizer, row.token_ids)
            yield row.index, Completion(row.token_ids, text, row.finish_reason, row.seconds)

    def _decode(
        self,
        rows: Rows,
        sampling: SamplingParams,
        eos_ids: list[int],
        logprobs: bool = False,
        stop: StopRule | None = None,
    ) -> Iterator[Row]:
        """Yield rows as they end, each with its share of the time.

        The seconds of a step are divided among the rows that it gave a token.
        """
        self.check_prompts(rows.prompts, sampling)
        engine = self.llm.llm_engine
        self._calls += 1
        open_rows = {f"{self._calls}-{index}": Row(index, []) for index in range(len(rows.prompts))}
        started = time.perf_counter()
        try:
            for name, row in open_rows.items():
                number = rows.numbers[row.index]
                params = _params(sampling, number, rows.rollout, eos_ids, logprobs)
                engine.add_request(name, {"prompt_token_ids": rows.prompts[row.index]}, params)
            while engine.has_unfinished_requests():
                outputs = engine.step()
                if not outputs:  # a part of a prompt: its seconds go to the next tokens
                    continue
                seconds = (time.perf_counter() - started) / len(outputs)
                ended = []
                for output in outputs:
                    row = open_rows[output.request_id]
                    row.seconds += seconds
                    _extend(row, output, stop)
                    if row.finish_reason is None:
                        continue
                    if not output.finished:
                        engine.abort_request([output.request_id], internal=False)
                    ended.append(open_rows.pop(output.request_id))
                yield from ended
                started = time.perf_counter()
        finally:
            if open_rows:  # the caller stopped early
                engine.abort_request(list(open_rows), internal=False)


def _extend(row: Row, output: Any, stop: StopRule | None) -> None:
    """Append a step's tokens to a row, and say whether it ends with them."""
    (made,) = output.outputs
    row.token_ids += made.token_ids
    if made.logprobs is not None:
        pairs = zip(made.logprobs, made.token_ids, strict=True)
        row.logprobs += [found[token].logprob for found, token in pairs]
    if made.finish_reason == "stop":
        row.finish_reason = "stop"
    elif stop is not None and stop.ends(row.token_ids):
        row.finish_reason = "repetition"
    elif output.finished:
        row.finish_reason = "length"


def _generation_config(model: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_source(model))
    except OSError:  # the folder holds none: what transformers makes of the model's config
        return GenerationConfig.from_model_config(load_config(model))


def _length_options(model: str, asked: int | None) -> dict[str, Any]:
    config = load_config(model)
    own = config.get_text_config()
    rotation = getattr(own, "rope_parameters", None) or {}
    kind = rotation.get("rope_type")
    limit = max_positions(config)
    if kind == "dynamic" or (kind == "yarn" and own is not config):
        # vLLM's table of "dynamic" ends there, and the override below is not for nested configs
        limit = own.max_position_embeddings
    length = limit if asked is None else min(asked, limit)
    if kind == "yarn" and length > own.max_position_embeddings:
        # vLLM takes the config's own number for what YaRN has scaled already
        return {"max_model_len": length, "hf_overrides": {"max_position_embeddings": length}}
    return {} if asked is None else {"max_model_len": length}


def _empty_model(worker: Any) -> None:
    """Drop what a model in this process holds: compiled code keeps the model itself alive."""
    model = worker.model_runner.get_model()
    for module in model.modules():
        if hasattr(module, "kv_cache"):
            module.kv_cache = torch.tensor([])
        vars(module).pop("cpu_linear", None)  # holds packed weights
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.new_empty(0)


def _device_options() -> dict[str, Any]:
    from vllm import envs
    from vllm.platforms import current_platform

    if torch.cuda.is_available():
        # vLLM refuses a GPU with less free than its share of 92%, also where the KV memory is given
        free, total = torch.cuda.mem_get_info()
        return {"gpu_memory_utilization": 0.95 * free / total}
    if current_platform.is_cpu() and not envs.VLLM_USE_V2_MODEL_RUNNER:
        # between two parts of a prompt the first model runner takes a draw of a seeded request
        # back, which generators on a CPU cannot do: prompts are read whole
        return {"enable_chunked_prefill": False}
    return {}


def _rank_options() -> dict[str, Any]:
    # a process of a launcher has its own GPU, and the launcher's process group
    is_rank = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return {"distributed_executor_backend": "external_launcher"} if is_rank else {}


def _mixed_options(model: str, sizes: LocalSizes) -> dict[str, Any]:
    name = (load_config(model).architectures or ["none"])[0]
    if name not in ARCHITECTURES:
        raise ValueError(
            f"rollouts of vLLM serve {', '.join(ARCHITECTURES)}, not {name}: sample this model "
            "with --rollout hf"
        )
    check_installed()
    if asks_for_check():
        raise ValueError(
            f"rlkv: {CHECK} compares what served models read, and knows no rollouts: leave it out"
        )
    return {
        "additional_config": {KEY: None, MIXED_KEY: asdict(sizes)},
        "worker_extension_cls": "rlkv.vllm.models.GateWorker",
    }


def row_seed(seed: int, rollout: int, row: int) -> int:
    """Return the seed of one row of one rollout: rows must not share draws."""
    words = np.random.SeedSequence([seed, rollout, row]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))  # the engine takes 63 bits


def _params(
    sampling: SamplingParams, row: int, rollout: int, eos_ids: list[int], logprobs: bool
) -> Any:
    from vllm import SamplingParams as EngineParams
    from vllm.sampling_params import RequestOutputKind

    check_temperature(sampling.temperature)
    return EngineParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=row_seed(sampling.seed, rollout, row),
        max_tokens=sampling.max_new_tokens,
        logprobs=0 if logprobs else None,  # only of the sampled tokens
        stop_token_ids=eos_ids,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# the smallest that the CPU kernels take; what the engine would choose, 128, keeps more than S + W
CPU_BLOCK_SIZE = 32


class ServingEngine(VLLMEngine):
    """A model under an allocation, served by vLLM.

    Example::

        settings = ServingSettings.of(allocation, CacheSettings(sink=16, window=64))
        engine = ServingEngine("tiny", settings, dtype="float32")
        completions, usage = engine.batch(prompts, SamplingParams(max_new_tokens=200))
        engine.close()
    """

    def __init__(
        self, model: str, settings: ServingSettings, batch_size: int = 8, **options: Any
    ) -> None:
        """Load ``model`` with head reallocation; further options as of :class:`VLLMEngine`.

        settings: resolved ones (:meth:`ServingSettings.of`).

        Raises:
            ValueError: as :class:`VLLMEngine`, and if vLLM would not load the plugin or the
                allocation is of another model.
        """
        if settings.keeps:
            raise ValueError(
                f"ServingEngine serves mode 'memory', not {settings.mode!r}, which saves none: "
                "serve it by `vllm serve` or vllm.LLM"
            )
        check_installed()
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            options.setdefault("block_size", CPU_BLOCK_SIZE)
        if settings.whole_prompts:  # the engine makes its steps as long as the longest prompt
            options.setdefault("enable_chunked_prefill", False)
        options["additional_config"] = {KEY: settings.to_request()}
        options["worker_extension_cls"] = "rlkv.vllm.models.GateWorker"
        super().__init__(model, max_rows=batch_size, **options)
        self.batch_size = batch_size
        self.settings = settings
        self.allocation = settings.allocation
        config = self.llm.llm_engine.vllm_config
        shape = ModelShape.from_config(config.model_config.hf_config)
        block_size, least, others = self._call_worker("rlkv_pool")
        self.plans = plan_heads(
            resolve_settings(config),
            block_size,
            shape.num_query_heads // shape.num_kv_heads,
            self.max_positions,
            config.parallel_config.tensor_parallel_size,
            least,
        )
        self.others = [OtherLayer(*other) for other in others] * len(self.plans)
        dtype = config.model_config.dtype
        self.dtype = str(dtype).removeprefix("torch.")
        self.entry_bytes = 2 * shape.head_dim * dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return what completions depend on: numbers, and what the compressible heads keep."""
        own: dict[str, Any] = {"dtype": self.dtype, "device": "vllm"}
        for name in ("sink", "window", "prefill", "eviction"):
            own[name] = getattr(self.settings, name)
        if self.settings.protect_prompt:  # left out otherwise, as by the transformers backend
            own["protect_prompt"] = True
        return own

    def batch(
        self,
        prompts: list[str],
        sampling: SamplingParams,
        full: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> tuple[list[Completion], Usage]:
        """Complete rendered ``prompts``, in their order; ``numbers`` as of :meth:`stream`.

        The bytes are those of all blocks at the texts' ends, those of layers without gates
        included.  Windows count as if they began where they touch most blocks, and that of a kept
        prompt as if it had nothing in common with the last one.
        """
        assert not full, "--compare-full is refused with this backend, which has no second cache"
        start = time.perf_counter()
        completions = self.generate(prompts, sampling, numbers=numbers)
        seconds = time.perf_counter() - start
        tokens = held = uncompressed = kept = 0
        for completion, given in zip(completions, self.prompt_lengths(prompts), strict=True):
            made = len(completion.token_ids)
            tokens += made
            length = given + made - 1  # the last token is never fed back
            held += sum(plan.held(length, given) for plan in self.plans)
            uncompressed += sum(plan.uncompressed(length) for plan in self.plans)
            kept += sum(other.held(length) for other in self.others)
        size = self.entry_bytes
        amounts = held * size + kept, uncompressed * size + kept, kept
        return completions, Usage(tokens, seconds, *amounts)
