"""VLLMEngine against transformers: gates at 1, at 0 and between, after every update.

The engine draws with its own sampler, so tokens are compared where decoding is greedy, and the
log-probabilities of what it drew otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlkv.attention import LocalSizes
from rlkv.rollout.base import Rows, Sample, SamplingParams, end_tokens, gate_version
from tests.helpers.child import printed
from tests.helpers.engines import Engines, watch_preemptions
from tests.helpers.mixed_reference import local_mask
from tests.helpers.models import make_tiny_model

pytest.importorskip("vllm")

from rlkv.vllm.engine import (
    VLLMEngine,
    _generation_config,
    _mixed_options,
    row_seed,
)
from tests.helpers.vllm_models import (
    ENDS,
    KV_HEADS,
    LAYERS,
    OPTIONS,
    SINK,
    TOLERANCE,
    WINDOW,
    forced_logprobs,
    load_reference,
    make_folder,
    make_rows,
    put_gates,
    random_gates,
    worst_difference,
)

SIZES = LocalSizes(SINK, WINDOW)
SAMPLED = SamplingParams(40, temperature=1.0, seed=5)


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2", "compiled")),
    ],
)
def opened(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, VLLMEngine]]:
    engines.close()
    compiled = request.param == "compiled"
    family = "qwen3" if compiled else request.param
    folder = make_folder(family, tmp_path_factory.mktemp(request.param))
    # a pool that is too small for 12 long rows, and more positions than the 512 of the model
    options = {**OPTIONS, "enforce_eager": not compiled, "num_gpu_blocks_override": 32}
    with closing(VLLMEngine(str(folder), SIZES, max_positions=600, **options)) as engine:
        yield folder, engine


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(40, temperature=1.0, top_p=0.95, seed=1),
        SamplingParams(40, temperature=0.6, top_p=0.95, top_k=20, seed=2),
        SamplingParams(40, temperature=0.8, seed=3),
    ],
    ids=str,
)
def test_logprobs_are_those_of_what_was_drawn(
    opened: tuple[Path, VLLMEngine], sampling: SamplingParams
) -> None:
    """Tempered, cut by top-k and top-p: the denominator of the importance weights."""
    folder, engine = opened
    alpha = random_gates(sampling.seed)
    version = engine.set_gates(alpha)
    assert version == gate_version(alpha)
    assert torch.equal(engine.gates(), alpha)
    model = put_gates(load_reference(folder), alpha)
    rows = make_rows(rollout=sampling.seed)
    samples = dict(engine.sample(rows, sampling))
    exact, plain = [], []
    for index, sample in samples.items():
        assert sample.version == version
        ids = torch.tensor([rows.prompts[index] + sample.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(rows.prompts[index]) - 1 : -1]
        scores = logits / sampling.temperature
        if sampling.top_k:
            scores = TopKLogitsWarper(sampling.top_k)(None, scores)
        if sampling.top_p < 1:
            scores = TopPLogitsWarper(sampling.top_p)(None, scores)
        token = torch.tensor(sample.token_ids)[:, None]
        found = torch.tensor(sample.logprobs)
        exact.append((scores.log_softmax(-1).gather(1, token)[:, 0] - found).abs())
        prompt = rows.prompts[index]
        trainer = forced_logprobs(model, prompt, sample.token_ids, sampling.temperature)
        plain.append((trainer - found).abs())
    assert torch.cat(exact).max() < TOLERANCE
    # training takes a mean above 0.5 for another model; what is cut off of this random one is much
    assert torch.cat(plain).mean() < (TOLERANCE if sampling.top_p == 1 else 0.5)
    reasons = {}
    for index, sample in samples.items():
        reasons[index] = "stop" if sample.token_ids[-1] in ENDS else "length"
    assert {index: sample.finish_reason for index, sample in samples.items()} == reasons
    assert len(set(reasons.values())) == 2, "all completions end alike: choose other prompts"


def test_gates_at_one_equal_the_stock_model(opened: tuple[Path, VLLMEngine]) -> None:
    folder, engine = opened
    engine.set_gates(torch.ones(LAYERS, KV_HEADS))
    rows = make_rows()
    stock = load_reference(folder, gated=False)
    assert worst_difference(stock, rows, dict(engine.sample(rows, SAMPLED))) < TOLERANCE


def test_gates_at_zero_equal_an_explicit_mask(opened: tuple[Path, VLLMEngine]) -> None:
    folder, engine = opened
    engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    rows = make_rows()
    stock = load_reference(folder, gated=False)

    class Masked(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = local_mask(torch.ones_like(ids).bool(), SINK, WINDOW)
            return stock(ids, attention_mask=mask[:, None])

    samples = dict(engine.sample(rows, SAMPLED))
    assert worst_difference(Masked(), rows, samples) < TOLERANCE
    assert worst_difference(stock, rows, samples) > 0.1  # the mask hides something that matters


def test_a_prefix_cache_that_is_not_reset_is_noticed(
    opened: tuple[Path, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, engine = opened
    rows = make_rows(seed=1)
    assert max(map(len, rows.prompts)) > 64  # whole blocks to be found again
    model = put_gates(load_reference(folder), torch.zeros(LAYERS, KV_HEADS))
    engine.set_gates(torch.ones(LAYERS, KV_HEADS))
    dict(engine.sample(rows, SAMPLED))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_drop_cached", lambda: None)
        engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    assert worst_difference(model, rows, dict(engine.sample(rows, SAMPLED))) > 0.01
    engine.set_gates(torch.zeros(LAYERS, KV_HEADS))
    for _ in range(2):  # the second time with hits under the same gates
        assert worst_difference(model, rows, dict(engine.sample(rows, SAMPLED))) < TOLERANCE


def texts(samples: dict[int, Sample]) -> list[list[int]]:
    return [samples[index].token_ids for index in range(len(samples))]


def test_rows_have_draws_of_their_own(opened: tuple[Path, VLLMEngine]) -> None:
    """The same for the same seed, rollout and number, in any company; others differ."""
    _, engine = opened
    engine.set_gates(random_gates(7))
    rows = make_rows(12)
    together = texts(dict(engine.sample(rows, SAMPLED)))
    assert texts(dict(engine.sample(rows, SAMPLED))) == together
    some = [7, 2, 9]
    alone = texts(dict(engine.sample(rows.only(some), SAMPLED)))
    assert alone == [together[index] for index in some]
    assert together[0] != together[1]  # the same prompt, another row
    assert sum(len(ids) > 1 for ids in together) > 8
    for changed in (
        engine.sample(Rows(rows.prompts, rows.numbers, 1), SAMPLED),
        engine.sample(rows, SamplingParams(40, temperature=1.0, seed=6)),
    ):
        for own, other in zip(texts(dict(changed)), together, strict=True):
            # rows may end at their first token, and in the same end token by chance
            assert own != other or len(own) == 1


def test_seeds_of_rows_differ() -> None:
    seeds = {row_seed(*numbers) for numbers in product(range(5), range(9), range(64))}
    assert len(seeds) == 5 * 9 * 64
    assert 0 <= min(seeds) < max(seeds) < 2**63
    assert row_seed(2**63 - 1, 2**31 - 1, 2**31 - 1) >= 0


def test_preempted_rows_go_on_as_before(opened: tuple[Path, VLLMEngine]) -> None:
    folder, engine = opened
    alpha, rows = random_gates(11), make_rows(12)
    engine.set_gates(alpha)
    preempted = watch_preemptions(engine.llm)
    sampling = SamplingParams(130, temperature=1.0, seed=1)
    found = dict(engine.sample(rows, sampling, eos_ids=[2]))
    assert preempted
    assert worst_difference(put_gates(load_reference(folder), alpha), rows, found) < TOLERANCE
    for index in {int(name.split("-")[1]) for name in preempted}:  # the same draws without
        alone = dict(engine.sample(rows.only([index]), sampling, eos_ids=[2]))
        assert alone[0].token_ids == found[index].token_ids


def test_greedy_completions_as_any_engine_gives_them(opened: tuple[Path, VLLMEngine]) -> None:
    from rlkv.rollout.hf import HFEngine

    folder, engine = opened
    model = put_gates(load_reference(folder), random_gates(2))
    engine.set_gates(random_gates(2))
    prompts = [engine.tokenizer.decode(ids) for ids in make_rows().prompts[::2]]
    reference = HFEngine(model.get_base_model(), engine.tokenizer)
    found = engine.generate(prompts, SamplingParams(30))
    expected = reference.generate(prompts, SamplingParams(30))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.text for c in found] == [c.text for c in expected]
    assert engine.prompt_lengths(prompts) == reference.prompt_lengths(prompts)


def test_wrong_use_is_named(
    opened: tuple[Path, VLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = opened
    with pytest.raises(ValueError, match=rf"gates \[{LAYERS}, {KV_HEADS}\].*\[2, 2\]"):
        engine.set_gates(torch.ones(2, 2))
    with pytest.raises(ValueError, match="prompt 1"):
        next(engine.sample(Rows([[5], []], [0, 1], 0), SAMPLED))
    with pytest.raises(ValueError, match="512 positions"):
        next(engine.sample(Rows([[5] * 500], [0], 0), SAMPLED))
    stream = engine.sample(make_rows(), SAMPLED)
    next(stream)
    with pytest.raises(ValueError, match="being sampled"):
        engine.set_gates(random_gates(0))
    stream.close()  # drops the rest
    engine.set_gates(random_gates(0))
    with pytest.raises(ValueError, match="one vLLM engine"):
        VLLMEngine("tiny")
    monkeypatch.setattr(engine, "has_gates", False)  # as of a stock model
    with pytest.raises(ValueError, match="mixed attention"):
        engine.set_gates(random_gates(0))


def test_no_engine_without_mixed_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not GPT2LMHeadModel"):
        _mixed_options(str(tmp_path), SIZES)
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setenv("RLKV_CHECK", "1")
    with pytest.raises(ValueError, match="knows no rollouts"):
        _mixed_options(str(tmp_path), SIZES)
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    with pytest.raises(ValueError, match="keeps the rlkv plugin out"):
        _mixed_options(str(tmp_path), SIZES)


def test_end_tokens_of_a_folder_without_a_generation_config(tmp_path: Path) -> None:
    make_tiny_model("llama", eos_token_id=[7, 9]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert end_tokens(_generation_config(str(tmp_path)), None) == [7, 9]
    assert end_tokens(loaded.generation_config, None) == [7, 9]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["rollouts", "serving"])
def test_the_second_model_runner(program: str, tmp_path: Path) -> None:
    """The default on a GPU, with asynchronous scheduling: its kernels are interpreted."""
    lines = printed("second_runner", "", program, tmp_path, seconds=1800)
    errors = [float(line.split()[-1]) for line in lines if line.startswith("max error")]
    compared = [line for line in lines if line.startswith("120 tokens")]
    assert (len(errors), len(compared)) == ((2, 0) if program == "rollouts" else (0, 4))
    assert all(error < TOLERANCE for error in errors)
