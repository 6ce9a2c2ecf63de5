r"""Pretrain the built-in tiny reasoning model from scratch, and write its package folder.

    python train/pretrain_tiny.py                  # 4,000 steps, about 40 minutes on 2 CPU cores
    python train/pretrain_tiny.py --output-dir my_tiny --steps 200

Next-token loss on worked solutions.  Recall of far bindings is slow to emerge, so the longest chain
grows with training.  A batch holds problems of one number of definitions: their token counts are
equal, nothing is padded.

A closing stage makes half of the KV heads specialise: in every step all, about half or none of
LOCAL_HEADS read only the first 4 and the last 16 tokens.  Without it nearly every head takes part
in far recall; large models do have local heads.

Seeded; resumes from checkpoint.pt in the work folder after a kill.  Accuracy on problems that it
never drew:

    rlkv-eval --model my_tiny --tasks tiny --methods full --limit 1000 --output-dir results/my_tiny
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.masking_utils import AttentionMaskInterface

from rlkv.cli.app import parse, run_app
from rlkv.inference.options import check_least
from rlkv.models.loading import resolve_device
from rlkv.models.prompts import RLKV_INSTRUCTION, render_prompt
from rlkv.tiny import (
    ANSWER_PREFIX,
    ANSWER_SUFFIX,
    MAX_DEFINITIONS,
    MIN_DEFINITIONS,
    MODEL_DIR,
    NAMES,
    OPERATORS,
    draw_length,
    draw_problem,
)
from rlkv.training.run_folder import load_tensors, save_tensors
from rlkv.utils.files import append_line, read_json, read_log, write_json, write_jsonl
from rlkv.utils.progress import progress_bar
from rlkv.utils.runtime import hardware_line
from rlkv.utils.store import hold_folder

SUMMARY = "pretraining.json"  # in the model's folder
MUON_LR = 5e-3
ADAMW_LR = 3e-3
MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 50
FINAL_LR = 0.02
SPECIALISE_LR = 0.2  # of the peaks, in the closing stage
# until this share of the steps, no longer chains than this
CURRICULUM = ((0.12, 5), (0.22, 8), (0.35, 14))
TOKENS_PER_DEFINITION = 24  # 6 in the problem, 18 in the solution
SINK = 4
WINDOW = 16
# (layer, head): the twelve that a backward elimination on the model of the first stage (seed 0)
# could best spare
LOCAL_HEADS = (
    *((0, 1), (0, 2), (0, 3), (1, 2), (1, 4)),
    *((2, 0), (2, 1), (2, 2), (2, 4), (3, 2), (3, 3), (3, 5)),
)


SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}{{ raise_exception('the tiny model knows the roles user and assistant only') }}{% "
    "endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Pretraining of the tiny model."""

    output_dir: Path = MODEL_DIR
    """where the finished model goes"""
    work_dir: Path = Path("results/pretrain_tiny")
    """checkpoint and log of the run"""
    steps: int = 3500
    """optimizer steps before the closing stage"""
    specialise_steps: int = 500
    """optimizer steps of the closing stage"""
    tokens_per_step: int = 8000
    """approximate number of tokens in a batch"""
    checkpoint_every: int = 100
    """steps between checkpoints"""
    seed: int = 0
    """initial weights and problems"""
    device: str = "auto"
    """auto, cpu or cuda"""

    @property
    def recipe(self) -> dict[str, int]:
        """The options that the weights depend on."""
        names = ("steps", "specialise_steps", "tokens_per_step", "seed")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise ValueError for impossible options, and for a folder that holds another model."""
        check_least(self, 1, "steps", "tokens_per_step", "checkpoint_every")
        check_least(self, 0, "specialise_steps")
        if not (self.output_dir / "config.json").exists():
            return
        summary = self.output_dir / SUMMARY
        noted = read_json(summary).get("config") or {} if summary.exists() else {}
        if any(noted.get(name) != value for name, value in self.recipe.items()):
            raise ValueError(
                f"{self.output_dir} holds a model that these options do not make: take another "
                "--output-dir"
            )

    @property
    def total_steps(self) -> int:
        return self.steps + self.specialise_steps

    def longest_chain(self, step: int) -> int:
        """Return the largest number of definitions that ``step`` (0-based) may draw."""
        return next(
            (longest for end, longest in CURRICULUM if step < end * self.steps), MAX_DEFINITIONS
        )

    def lr_scale(self, step: int) -> float:
        """Warm up linearly, then follow a cosine down to ``FINAL_LR`` of the peak.

        A second, lower cosine is for specialising.
        """
        if step >= self.steps:
            share = (step - self.steps) / self.specialise_steps
            return SPECIALISE_LR * 0.5 * (1 + math.cos(math.pi * share))
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR + (1 - FINAL_LR) * cosine)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer over names, digits, operators and bindings such as ``b=3``.

    The instruction of the ``rlkv`` prompt template and the two halves of the answer sentence are
    single tokens, so that the model reads and writes exactly the text of the real models at a tiny
    length.
    """
    words = [*"=.,?", *OPERATORS, "find", *"0123456789", *NAMES]
    words += [f"{name}={digit}" for name in NAMES for digit in range(10)]
    vocab = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    sentences = [RLKV_INSTRUCTION, ANSWER_PREFIX, ANSWER_SUFFIX]
    backend.add_tokens(
        [AddedToken(s, lstrip=True, rstrip=True, normalized=False) for s in sentences]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """Build a Llama with random weights: 4 layers x 6 KV heads of 32, two query heads each."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=144,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config)


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_definitions: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Draw and encode problems: ``(input_ids, labels)``, both int64 ``[rows, length]``.

    Prompt positions carry the label -100.
    """
    drawn = [draw_problem(rng, num_definitions) for _ in range(rows)]
    prompts = [render_prompt(tokenizer, p.problem) for p in drawn]
    texts = [
        prompt + p.solution + tokenizer.eos_token for prompt, p in zip(prompts, drawn, strict=True)
    ]
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)
    labels = ids.clone()
    labels[:, : len(tokenizer(prompts[0], add_special_tokens=False).input_ids)] = -100
    return ids, labels


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Take Muon for the matrices inside the layers, AdamW for embeddings, head and norms."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inner, lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class LocalHeads:
    """Attention of the closing stage: ``draw`` decides which of LOCAL_HEADS read locally.

    One dense mask per head in a single attention call is far cheaper than two branches at these
    lengths.
    """

    IMPLEMENTATION = "rlkv_tiny_pretraining"

    def __init__(self, model: LlamaForCausalLM) -> None:
        config = model.config
        assert config.num_key_value_heads is not None
        self.model = model
        self.before = config._attn_implementation
        self.is_local = torch.zeros(
            config.num_hidden_layers, config.num_key_value_heads, dtype=torch.bool
        )
        AttentionInterface.register(self.IMPLEMENTATION, self._attend)
        AttentionMaskInterface.register(self.IMPLEMENTATION, lambda *args, **kwargs: None)
        model.set_attn_implementation(self.IMPLEMENTATION)

    def draw(self, rng: random.Random) -> None:
        """Draw for a step whether all, about half or none of the heads are local."""
        share = rng.choice((0.0, 0.5, 1.0))
        for layer, head in LOCAL_HEADS:
            self.is_local[layer, head] = rng.random() < share

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        position = torch.arange(query.shape[2], device=query.device)
        past = position[:, None] - position  # [query, key]
        near = (past < WINDOW) | (position < SINK)
        is_local = (
            self.is_local[module.layer_idx]
            .to(query.device)
            .repeat_interleave(query.shape[1] // key.shape[1])
        )
        mask = (past >= 0) & (near | ~is_local[:, None, None])
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[None], scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    def remove(self) -> None:
        self.model.set_attn_implementation(self.before)


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
    on_step: Callable[[int, float], None],
    checkpoint: Path,
) -> None:
    """Train ``model`` in place; ``on_step(step, loss)`` is called after every step.

    Continues from the file ``checkpoint`` if it exists.  The batch of a step depends on the seed
    and the step alone.
    """
    optimizers = build_optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first = 0
    if checkpoint.exists():
        state = load_tensors(checkpoint)
        if state["recipe"] != config.recipe:
            found = [f"--{n.replace('_', '-')} {value}" for n, value in state["recipe"].items()]
            raise ValueError(
                f"{checkpoint} is of {' '.join(found)}: give the same, or another --work-dir"
            )
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    model.train()
    local_heads: LocalHeads | None = None
    for step in range(first, config.total_steps):
        for peak, optimizer in zip(peaks, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = peak * config.lr_scale(step)
        rng = random.Random(f"rlkv-tiny-pretrain-{config.seed}-{step}")
        num_definitions = draw_length(rng, MIN_DEFINITIONS, config.longest_chain(step))
        rows = max(4, config.tokens_per_step // (TOKENS_PER_DEFINITION * num_definitions))
        ids, labels = encode_batch(tokenizer, rng, num_definitions, rows)
        if step >= config.steps:
            local_heads = local_heads or LocalHeads(model)
            local_heads.draw(rng)
        loss = model(input_ids=ids.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % config.checkpoint_every == 0:
            saved = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
            }
            save_tensors(checkpoint, {**saved, "step": step + 1, "recipe": config.recipe})
        on_step(step, loss.item())
    if local_heads is not None:
        local_heads.remove()
    model.eval()


def main() -> None:
    config = parse(PretrainConfig, __doc__)
    hold_folder(config.work_dir)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, config.seed)
    torch.nn.Module.to(model, resolve_device(config.device))
    started = time.monotonic()
    log = config.work_dir / "log.jsonl"
    with progress_bar("pretraining", "steps", config.total_steps) as bar:

        def on_step(step: int, loss: float) -> None:
            if not bar.done:
                bar.resume(step)
                # a killed run may have gone on beyond its checkpoint
                known = read_log(log) if log.exists() else []
                write_jsonl(log, [record for record in known if record["step"] < step])
            bar.update(step + 1, note=f"loss {loss:.4f}")
            append_line(log, {"step": step, "loss": loss})

        pretrain(model, tokenizer, config, on_step, config.work_dir / "checkpoint.pt")
    model.save_pretrained(config.output_dir)
    tokenizer.save_pretrained(config.output_dir)
    summary = {
        "config": {
            name: value for name, value in asdict(config).items() if not isinstance(value, Path)
        },
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "seconds_of_last_run": round(time.monotonic() - started),
        "hardware": hardware_line(),
    }
    write_json(config.output_dir / SUMMARY, summary)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    run_app(main)
