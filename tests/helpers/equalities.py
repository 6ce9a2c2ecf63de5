"""What must hold of every family: the checks of the matrix, against attention in plain torch.

The reference knows nothing of the library: which layers have full attention comes from the table
of :mod:`tests.helpers.families`, which tokens a head sees from explicit masks.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

import rlkv
from rlkv import HeadGates
from rlkv.attention.head_gate import HeadGateConfig, gate_parameters
from rlkv.cache.accounting import KVSizes, kv_nbytes
from tests.helpers.families import FAMILIES, Family, make_family
from tests.helpers.gated import fill_gates
from tests.helpers.mixed_reference import reference_logits

SINK = 1
WINDOW = 3
PADDING = 7  # of the second row
LENGTH = 20
NEW = 8
# fp32 through a few layers, logits up to 10: two orders of summation, and no more
TOLERANCE = 1e-4
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
GREEDY |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}


@torch.no_grad()
def _logits(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    if bool(real.all()):
        return model(input_ids=ids).logits
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=real.long(), position_ids=positions).logits


class StockDiffers(Exception):
    """The stock model does not hold to an equality itself."""


class Case:
    """One family: its model, a text with a padded row, and the stock model's logits."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.line = FAMILIES.get(family, Family())
        self.model = make_family(family)
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, 64, (2, LENGTH), generator=generator)
        self.real = torch.ones(2, LENGTH, dtype=torch.bool)
        self.whole = self.real.clone()
        self.real[1, :PADDING] = False
        self.stock = _logits(self.model, self.ids, self.whole)

    def gated(self, value: float | str = 1.0) -> Any:
        config = HeadGateConfig(sink=SINK, window=WINDOW)
        gated = peft.get_peft_model(copy.deepcopy(self.model), config).eval()
        fill_gates(gated, value)
        return gated

    def heads(self, gated: Any) -> dict[int, int]:
        return {layer: len(gate) for layer, gate in gate_parameters(gated)}

    def check_layers(self, gated: Any) -> None:
        """Compare the layers that carry gates with the table."""
        found = [layer for layer, _ in gate_parameters(gated)]
        kinds = self.line.kinds or "f" * (max(found) + 1)
        expected = [layer for layer, kind in enumerate(kinds) if kind in "fh"]
        assert found == expected, f"gates on layers {found}, expected {expected}"


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError where two sets of logits differ by more than the tolerance."""
    difference = (found - expected).abs().max().item()
    assert difference <= TOLERANCE, f"{what} differ by {difference:.2g}"


def gates_at_one(case: Case) -> None:
    gated = case.gated(1.0)
    case.check_layers(gated)
    close(_logits(gated, case.ids, case.whole), case.stock, "logits")


def gates_at_zero(case: Case) -> None:
    gated = case.gated(0.0)
    none_full = {layer: torch.zeros(n) > 0 for layer, n in case.heads(gated).items()}
    expected = reference_logits(case.model, case.ids, none_full, SINK, WINDOW)
    close(_logits(gated, case.ids, case.whole), expected, "logits")
    assert (expected - case.stock).abs().max() > TOLERANCE, "the mask hides nothing"


def left_padding(case: Case) -> None:
    alone = case.ids[1:, PADDING:]
    stock = _logits(case.model, case.ids, case.real)[1:, PADDING:]
    own = _logits(case.model, alone, torch.ones_like(alone) > 0)
    if (stock - own).abs().max() > TOLERANCE:
        raise StockDiffers("the stock model's padded rows differ from single ones")
    gated = case.gated("random")
    found = _logits(gated, case.ids, case.real)[1:, PADDING:]
    close(found, _logits(gated, alone, torch.ones_like(alone) > 0), "padded rows")


def sparsity_zero(case: Case) -> None:
    gates = _random_gates(case)
    for mask in (case.whole, case.real):
        inputs = {"input_ids": case.ids, "attention_mask": mask.long()}
        expected = case.model.generate(**inputs, **GREEDY)
        with rlkv.compress(case.model, gates, sparsity=0.0):
            found = case.model.generate(**inputs, **GREEDY)
        assert torch.equal(found.sequences, expected.sequences), "tokens differ"
        close(torch.stack(found.logits), torch.stack(expected.logits), "logits")
    beams = {"num_beams": 2, "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = case.model.generate(**inputs, **beams)
    with rlkv.compress(case.model, gates, sparsity=0.0):
        assert torch.equal(case.model.generate(**inputs, **beams), expected), "beams differ"


def two_turns(case: Case) -> None:
    """Continue a text with a question of several tokens, on the cache of the first turn."""

    def read() -> tuple[Tensor, Tensor]:
        first = case.model.generate(case.ids, **GREEDY)
        text = torch.cat([first.sequences, case.ids], dim=1)
        mask = torch.ones_like(text)
        cache = first.past_key_values
        out = case.model.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY)
        return out.sequences, torch.stack(out.logits)

    tokens, logits = read()
    with rlkv.compress(case.model, _random_gates(case), sparsity=0.0):
        found, found_logits = read()
    assert torch.equal(found, tokens), "tokens of the second turn differ"
    close(found_logits, logits, "logits of the second turn")


def _random_gates(case: Case) -> HeadGates:
    """Return gates as our own adapter saves them."""
    with tempfile.TemporaryDirectory() as folder:
        case.gated("random").save_pretrained(folder, save_embedding_layers=False)
        return HeadGates.load(folder)


def reallocated(case: Case) -> None:
    gates = _random_gates(case)
    inputs = {"input_ids": case.ids, "attention_mask": case.real.long()}
    sizes = {"sink": SINK, "window": WINDOW, "prefill": "local"}
    with rlkv.compress(case.model, gates, sparsity=0.5, **sizes) as session:
        out = case.model.generate(**inputs, **GREEDY)
        full = session.allocation.full
        cache = session.cache
    heads = case.heads(case.gated())
    chosen = {layer: full[layer, :number] for layer, number in heads.items()}
    assert any(not bool(row.all()) for row in chosen.values()), "no head is compressed"
    real = torch.cat([case.real, torch.ones(2, NEW) > 0], dim=1)
    forced = reference_logits(case.model, out.sequences, chosen, SINK, WINDOW, real=real)
    close(torch.stack(out.logits, 1), forced[:, LENGTH - 1 : -1], "logits")
    assert cache is not None
    assert cache.used_nbytes() < cache.full_nbytes(), "nothing is saved"


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the states within nested lists and dicts."""
    if isinstance(value, Tensor) and value.ndim > 1:  # not its length, such as a window
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def bytes_held(case: Case) -> None:
    """Compare the bytes that are reported of a text with the tensors of the caches."""
    gates = _random_gates(case)
    sizes = {"sink": SINK, "window": WINDOW, "prefill": "local"}
    ids = case.ids[:1]
    stock = case.model.generate(ids, **GREEDY).past_key_values
    with rlkv.compress(case.model, gates, sparsity=0.5, **sizes) as session:
        case.model.generate(ids, **GREEDY)
    cache = session.cache
    assert cache is not None
    prompt = torch.tensor([LENGTH])
    tokens = prompt + NEW - 1  # the last one is never fed
    kv = KVSizes.of(case.model)
    allocation = session.allocation
    held, full = kv_nbytes(cache.settings, allocation.full, kv, prompt, tokens)
    found = sum(tensor.nbytes for tensor in tensors([vars(layer) for layer in stock.layers]))
    gated = 0
    for number in gates.layers:
        gated += stock.layers[number].keys.nbytes + stock.layers[number].values.nbytes
    of_head = gated // (allocation.num_full + allocation.num_compressible)
    local = of_head * (SINK + WINDOW) // int(tokens)
    used = allocation.num_full * of_head + allocation.num_compressible * local
    assert (int(full), int(held)) == (gated, used), "bytes of layers with gates"
    others = int(kv.unchanged_nbytes(tokens))
    assert others == found - gated == cache.unchanged_nbytes(), "bytes of other layers"
    assert cache.used_nbytes() == int(held) + others
    assert cache.full_nbytes() == found


def saved_and_loaded(case: Case) -> None:
    gated = case.gated("random")
    before = dict(gate_parameters(gated))
    expected = _logits(gated, case.ids, case.whole)
    with tempfile.TemporaryDirectory() as name:
        gated.save_pretrained(name, save_embedding_layers=False)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(case.model), name).eval()
        close(_logits(again, case.ids, case.whole), expected, "logits of the adapter")
        gates = HeadGates.load(name)
        gates.check_model(case.model.config)
        for suffix in ("gates.pt", "gates.safetensors", "folder/"):
            gates.save(Path(name) / suffix if suffix != "folder/" else f"{name}/{suffix}")
            loaded = HeadGates.load(Path(name) / suffix)
            assert loaded == gates, f"{suffix} gives other gates"
            loaded.check_model(case.model.config)
    for layer, gate in before.items():
        row = gates.alpha[layer, : len(gate)]
        assert torch.equal(row, gate.detach()), f"layer {layer} has other gates"


CHECKS = {
    "gates 1": gates_at_one,
    "gates 0": gates_at_zero,
    "padding": left_padding,
    "saved": saved_and_loaded,
    "sparsity 0": sparsity_zero,
    "reallocated": reallocated,
    "turns": two_turns,
    "bytes": bytes_held,
}


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Check that a refusal leaves the model as it was."""
    before = model.config._attn_implementation
    names = [name for name, _ in model.named_parameters()]
    yield
    assert model.config._attn_implementation == before
    assert [name for name, _ in model.named_parameters()] == names
