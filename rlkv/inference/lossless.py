"""``generate_lossless(model, input_ids, gates, sparsity)``: the full model's text, drafted cheaply.

The same weights draft tokens with compressible heads that read sinks and window, and one pass with
all heads over the drafted tokens verifies them (arXiv 2211.17192).

Shapes: B rows, T columns, K drafted tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from rlkv.cache.lossless import LosslessCache
from rlkv.inference.compress import (
    CompressedSession,
    Gates,
    check_servable,
    compress,
    tokens_before_drop,
)
from rlkv.models.loading import cache_argument
from rlkv.models.shape import rotation_change
from rlkv.utils.numbers import check_whole

# arguments of compress(...) and generate(...) that would be ignored, or break the rounds
_REFUSED = {
    "assistant_model": "the model drafts for itself",
    "cache": "it has a cache of its own",
    "custom_generate": "it is a decoding loop itself",
    "eviction": "nothing is evicted, and drafts read sinks and window",
    "inputs_embeds": "it takes token ids",
    "past_key_values": "it has a cache of its own",
    "position_ids": "positions follow from attention_mask",
    "prefill": "all heads read the prompt in full",
    "prefix_allowed_tokens_fn": "it would be called with texts that no row has",
    "prompt_lookup_num_tokens": "the model drafts for itself",
    "stop_strings": "pass stopping_criteria=[StopStringCriteria(tokenizer, ...)] instead",
    "synced_gpus": "it runs in one process",
}
_READ = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}


@dataclass(frozen=True)
class LosslessOutput:
    """Texts, and how they came about.

    Attributes:
        sequences: int64 ``[B, T]``, prompts and new tokens, as ``generate`` returns them.
        tokens: new tokens of all rows; the first of each row comes from reading the prompt.
        verifications: verification passes, counted for each row that runs.
        drafted: drafted tokens of rows that run.
        accepted: those of them that the full model agreed with.
    """

    sequences: Tensor
    tokens: int
    verifications: int
    drafted: int
    accepted: int

    @property
    def tokens_per_verification(self) -> float:
        """New tokens that a row gains by a verification: from 1 to ``num_draft_tokens + 1``.

        0 where nothing was verified, as all rows have one token.
        """
        return (self.tokens - len(self.sequences)) / max(1, self.verifications)


def generate_lossless(
    model: PreTrainedModel,
    input_ids: Tensor,
    gates: Gates,
    sparsity: float | None = None,
    num_draft_tokens: int = 4,
    sink: int | None = None,
    window: int | None = None,
    scope: str = "global",
    protect_prompt: bool | None = None,
    **generate: Any,
) -> LosslessOutput:
    """Generate what the full model would, by drafts in which compressible heads read little.

    Greedy decoding gives the tokens of ``model.generate``, sampling draws from its distribution.
    Verification computes several positions in one pass, which a computer may round differently from
    one at a time: where two tokens are equally likely up to rounding (rare in float32, less so in
    bfloat16), the text may go on with the other one, as it may with another batch size.

    All heads keep all tokens, so no memory is saved.  Rows of a left-padded batch accept drafts
    each for itself; rows that have ended are computed until the last one ends.

    Args:
        model: as for :func:`rlkv.compress`, with full attention in every layer.
        input_ids: int64 ``[B, T]``.
        gates: as for :func:`rlkv.compress`; they say which heads read everything in drafts.
        sparsity: share of the heads that read little in drafts.
        num_draft_tokens: K, of each round.
        sink: first tokens that such a head reads; None: what the gates recommend for serving.
        window: last tokens that it reads, the current one included; None: as above.
        scope: ``"global"`` or ``"layer"``, as for :func:`rlkv.compress`.
        protect_prompt: drafts read the prompt in all heads; None: what the gates recommend.
        generate: arguments of ``model.generate``: ``attention_mask``, ``max_new_tokens``,
            ``do_sample``, ``temperature``, ``top_p``, ``eos_token_id``, ``streamer`` (of one row),
            ``logits_processor`` and ``stopping_criteria`` without a memory of earlier calls...

    Raises:
        ValueError: for beams, other caches, eviction policies, layers without full attention,
            rotary frequencies that change within the text, and as :func:`rlkv.compress`.
    """
    asked: Any = model
    base = asked
    if hasattr(asked, "get_base_model"):  # a PEFT model
        base = asked.get_base_model()
        if asked.active_peft_config.is_prompt_learning:
            raise ValueError(
                "generate_lossless reads only token ids, and the active PEFT adapter puts learned "
                "tokens before them: use an adapter of weights, such as LoRA, or model.generate"
            )
    check_whole("num_draft_tokens", num_draft_tokens, 1)
    for name, reason in _REFUSED.items():
        if generate.get(name) is not None:
            raise ValueError(f"generate_lossless does not take {name}: {reason}")
    if gates is None:
        raise ValueError("gates is None: pass gates, which say which heads draft with little")
    layout = check_servable(base)
    if not layout.is_plain:
        raise ValueError(
            f"{layout.model_type} has {layout.describe()}: generate_lossless takes drafted tokens "
            "back, which needs full attention in every layer, so use model.generate"
        )
    sizes: Any = {"sink": sink, "window": window, "protect_prompt": protect_prompt}
    with compress(base, gates, sparsity, scope=scope, **sizes) as session:
        session.own_loop = True

        def decode(model: Any, input_ids: Tensor, **arguments: Any) -> LosslessOutput:
            # generate leaves the streamer out
            arguments["streamer"] = generate.get("streamer")
            return _decode(model, input_ids, session, num_draft_tokens, **arguments)

        # PEFT has a generate of its own, with adapters for single rows
        return asked.generate(input_ids, **generate, custom_generate=decode)


def _decode(
    model: Any,
    input_ids: Tensor,
    session: CompressedSession,
    num_draft_tokens: int,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    **model_kwargs: Any,
) -> LosslessOutput:
    """Run the rounds of one call of ``generate``."""
    _check(generation_config, streamer, len(input_ids), stopping_criteria, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    shortest = input_ids.shape[1] if mask is None else int(mask.sum(-1).min())
    _check_rotation(model, shortest, generation_config.max_length)
    allocation = session.allocation
    cache = LosslessCache(allocation.full, heads=allocation.heads, **vars(session.settings))
    cache.state.limit = generation_config.max_length
    texts = _Texts(
        model,
        cache,
        input_ids,
        config=generation_config,
        processors=logits_processor,
        criteria=stopping_criteria,
        streamer=streamer,
    )
    texts.read_prompt({name: model_kwargs.get(name) for name in _READ})
    while any(texts.running):
        texts.advance(num_draft_tokens)
    if streamer is not None:
        streamer.end()
    return texts.output()


def _check(
    config: Any, streamer: Any, rows: int, criteria: Any, model_kwargs: dict[str, Any]
) -> None:
    """Raise ValueError for what the rounds would ignore."""
    others = sorted(set(model_kwargs) - _READ - {cache_argument()})
    positions = model_kwargs.get("position_ids")
    mode = config.get_generation_mode()
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    cases = [
        (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"generate_lossless decodes greedily or samples, without {mode.value}: use "
            "model.generate for it",
        ),
        (
            config.watermarking_config is not None,
            "generate_lossless asks logits processors for drafts too, which may be taken back, but "
            "watermarking_config counts every call: leave it out",
        ),
        (
            config.return_dict_in_generate,
            "generate_lossless returns only tokens and counts: leave return_dict_in_generate out",
        ),
        (
            streamer is not None and rows > 1,
            f"a streamer takes one row, not {rows}: leave it out",
        ),
        (
            # the first criterion is the length, at which all rows end
            rows > 1 and len(criteria) > 1 and not pads,
            "generate pads rows that stopping_criteria end only where it has an eos_token_id: pass "
            "one, or one row",
        ),
        (
            bool(others),
            f"generate_lossless reads only token ids and attention_mask, not {', '.join(others)}",
        ),
        (
            positions is None or positions.ndim != 2,
            "generate_lossless needs a model with one position for each token (position_ids [rows, "
            "tokens])",
        ),
    ]
    for is_refused, sentence in cases:
        if is_refused:
            raise ValueError(sentence)


def _check_rotation(model: Any, shortest: int, limit: int) -> None:
    """Raise ValueError if rotary frequencies would follow from the longest text of a call.

    Rounds read other lengths at a time than ``generate`` does.
    """
    if change := rotation_change(model.config, shortest, limit):
        newer = "" if tokens_before_drop(model) is None else "transformers 5.20 or newer and "
        raise ValueError(
            f"{change.said}: end them earlier, by max_new_tokens, or use {newer}model.generate"
        )


class _Texts:
    """The rows of a batch while they are decoded.

    ``ends`` counts the columns of each row.  All but the last are in the cache.
    """

    def __init__(
        self,
        model: Any,
        cache: LosslessCache,
        input_ids: Tensor,
        config: Any,
        processors: Any,
        criteria: Any,
        streamer: Any,
    ) -> None:
        rows, length = input_ids.shape
        self.model = model
        self.cache = cache
        self.processors = processors
        self.criteria = criteria
        self.streamer = streamer
        self.is_sampled = config.do_sample
        self.prompt_length = length
        self.pad_id = config._pad_token_tensor
        self.tokens_BT = F.pad(input_ids.to(model.device), (0, config.max_length - length))
        self.ends = [length] * rows
        self.running = [True] * rows
        self.verifications = 0
        self.drafted = 0
        self.accepted = 0

    def read_prompt(self, arguments: dict[str, Any]) -> None:
        """Read the prompts and choose the first token of each row."""
        prompt = self.tokens_BT[:, : self.prompt_length]
        given = {name: value for name, value in arguments.items() if value is not None}
        output = self.model(input_ids=prompt, **given, **{cache_argument(): self.cache})
        self.padding_B = self.cache.state.padding_counts(len(prompt)).to(prompt.device)
        scores = self._processed(output.logits[:, -1:].float(), prompt[:, -1:])
        for row, token in enumerate(self._choose(scores[:, 0]).tolist()):
            self._append(row, [token])

    def advance(self, num_draft_tokens: int) -> None:
        """Draft, verify, and append what the full model agrees with and its own next token."""
        running = [row for row, is_running in enumerate(self.running) if is_running]
        room = self.tokens_BT.shape[1] - max(self.ends[row] for row in running)
        drafted = min(num_draft_tokens, room - 1)
        device = self.padding_B.device
        last_B = torch.tensor(self.ends, device=device) - 1
        # rows that have ended begin again, to stay within their columns
        first_B = torch.where(torch.tensor(self.running, device=device), last_B, self.padding_B)
        tokens_BN = self.tokens_BT.gather(1, first_B[:, None])
        draft_scores = []
        with self.cache.drafting():
            for step in range(drafted):
                logits = self._read(tokens_BN[:, -1:], first_B + step)
                scores = self._processed(logits, tokens_BN)[:, -1]
                draft_scores.append(scores)
                tokens_BN = torch.cat([tokens_BN, self._choose(scores)[:, None]], dim=1)
        scores = self._processed(self._read(tokens_BN, first_B), tokens_BN)
        if self.is_sampled:
            accepted_B, next_B = accept_sampled(tokens_BN[:, 1:], draft_scores, scores)
        else:
            accepted_B, next_B = accept_greedy(tokens_BN[:, 1:], scores)
        accepted = accepted_B.tolist()
        for row in running:
            agreed = tokens_BN[row, 1 : 1 + accepted[row]].tolist()
            self._append(row, [*agreed, int(next_B[row])])
            self.accepted += accepted[row]
        self.drafted += drafted * len(running)
        self.verifications += len(running)

    def output(self) -> LosslessOutput:
        """Return the texts, padded on the right."""
        tokens_BT = self.tokens_BT[:, : max(self.ends)]
        for row, end in enumerate(self.ends):
            if end < max(self.ends):
                tokens_BT[row, end:] = self.pad_id
        new = sum(self.ends) - self.prompt_length * len(self.ends)
        return LosslessOutput(tokens_BT, new, self.verifications, self.drafted, self.accepted)

    def _read(self, tokens_BN: Tensor, first_B: Tensor) -> Tensor:
        """Read tokens into the columns from ``first_B`` on: logits ``[B, N, V]``."""
        self.cache.set_lengths(first_B)
        column_BN = first_B[:, None] + torch.arange(tokens_BN.shape[1], device=first_B.device)
        output = self.model(
            input_ids=tokens_BN,
            position_ids=column_BN - self.padding_B[:, None],
            use_cache=True,
            **{cache_argument(): self.cache},
        )
        return output.logits.float()

    def _processed(self, logits_BNV: Tensor, tokens_BN: Tensor) -> Tensor:
        """Apply the logits processors; the last N tokens of a row's text are ``tokens_BN``."""
        if not self.processors:
            return logits_BNV
        before = tokens_BN.shape[1] - logits_BNV.shape[1]
        scores = torch.empty_like(logits_BNV)
        for end in set(self.ends):
            # all rows, as processors may tell them apart by number; those of this length count
            rows = [row for row, of_row in enumerate(self.ends) if of_row == end]
            text = torch.cat([self.tokens_BT[:, : end - 1], tokens_BN], dim=1)
            for place in range(logits_BNV.shape[1]):
                seen = text[:, : end + before + place]
                scores[rows, place] = self.processors(seen, logits_BNV[:, place].clone())[rows]
        return scores

    def _choose(self, scores_BV: Tensor) -> Tensor:
        if self.is_sampled:
            return torch.multinomial(scores_BV.softmax(-1), 1)[:, 0]
        return scores_BV.argmax(-1)

    def _append(self, row: int, tokens: list[int]) -> None:
        """Append tokens to a row until it ends."""
        for token in tokens:
            end = self.ends[row]
            self.tokens_BT[row, end] = token
            self.ends[row] = end + 1
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if bool(self.criteria(self.tokens_BT[row : row + 1, : end + 1], None).all()):
                self.running[row] = False
                return


def accept_greedy(draft_BK: Tensor, scores_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens up to the first that is not the full model's choice.

    Args:
        draft_BK: int64 ``[B, K]``.
        scores_BNV: of the full model, ``[B, K + 1, V]``: before each drafted token, and after all.

    Returns:
        How many are accepted, and the full model's token after these, int64 ``[B]`` each.
    """
    choice_BN = scores_BNV.argmax(-1)
    accepted_B = (choice_BN[:, :-1] == draft_BK).long().cumprod(1).sum(1)
    return accepted_B, choice_BN.gather(1, accepted_B[:, None])[:, 0]


def accept_sampled(
    draft_BK: Tensor, draft_scores: list[Tensor], scores_BNV: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens so that all are distributed as the full model's (arXiv 2211.17192).

    Algorithm 1: a token of probability q in the draft and p in the full model is accepted with
    probability min(1, p / q); the next one is drawn from max(0, p - q) at the first that is not,
    from p after all of them.

    Args:
        draft_BK: int64 ``[B, K]``.
        draft_scores: K times ``[B, V]``, from which they were drawn.
        scores_BNV: of the full model, ``[B, K + 1, V]``.

    Returns:
        How many are accepted, and the token after these, int64 ``[B]`` each.
    """
    full_BNV = scores_BNV.softmax(-1)
    drafted_BNV = torch.zeros_like(full_BNV)  # after all drafts nothing is taken off
    for place, scores in enumerate(draft_scores):
        drafted_BNV[:, place] = scores.softmax(-1)
    index = draft_BK[:, :, None]
    full_BK = full_BNV[:, :-1].gather(2, index)[:, :, 0]
    drafted_BK = drafted_BNV[:, :-1].gather(2, index)[:, :, 0]
    accepted = torch.rand_like(full_BK) * drafted_BK < full_BK
    accepted_B = accepted.long().cumprod(1).sum(1)
    row = torch.arange(len(draft_BK), device=draft_BK.device)
    next_BV = full_BNV[row, accepted_B]
    rest_BV = (next_BV - drafted_BNV[row, accepted_B]).clamp(min=0)
    # equal up to rounding: nothing may be left
    rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, next_BV)
    return accepted_B, torch.multinomial(rest_BV, 1)[:, 0]
