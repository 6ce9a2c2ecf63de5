"""The memory of one update of the gates, in bytes, by formula: what ``--plan`` counts with.

Symbols: E states, I width of the MLP, H and G KV heads and query heads of each, D head size, L layers, V vocabulary,
S sinks, W window, n tokens of the micro-batch, e bytes of an element.  The frozen weights keep no inputs for a gradient
of theirs, so that a layer holds of each token::

    8E                              the inputs of both norms, in float32
    3Ie                             the MLP: gate, its SiLU, up
    (2HG + 2H)De + 4HG              full attention: query and output, key and value, the log-sum-exp
    HGDe + 4HG                      local attention through FlexAttention (GPU): its output
    (2HG + 2H(S+W+C)/C)De + G(S+W+C)e   in blocks of C = max(W, 64) queries (CPU): copies of what a block sees, its mask
    8HGD                            both outputs in float32, for the gradient of alpha (CPU, e = 4: 4HGD)

On CPUs with float32 and bfloat16 these are within 10% of measured bytes (``tests/training/test_memory.py``); those of a
GPU have not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.attention.branches import MIN_BLOCK
from rlkv.attention.call import LocalSizes
from rlkv.rollout.estimate import Footprint

# trl computes log-probabilities from tiles of logits, of this many tokens and entries of the vocabulary
TILE_TOKENS, TILE_ENTRIES = 4096, 32768
CPU_TILES = 7.25  # float32 tiles that its CPU form makes besides


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes besides the weights.

    Attributes:
        held: what all layers keep for the backward pass.
        layer: what the layer that is being computed takes in addition.
        logits: what the output layer takes in addition; it is never there together with ``layer``.
    """

    held: int
    layer: int
    logits: int

    @property
    def peak(self) -> int:
        return self.held + max(self.layer, self.logits)


@dataclass(frozen=True)
class UpdateShape:
    """What an update computes: ``rows`` of ``length`` tokens, of which ``rows_per_call`` share a forward."""

    rows: int
    length: int
    rows_per_call: int
    sizes: LocalSizes
    checkpointing: bool = False
    on_gpu: bool = False


def layer_bytes_per_token(model: Footprint, sizes: LocalSizes, on_gpu: bool) -> float:
    """What a layer holds of a token for its backward pass."""
    heads, size, e = model.shape.num_kv_heads, model.shape.head_dim, model.itemsize
    queries = model.shape.num_query_heads
    groups, log_sums = queries / heads, 4 * queries
    common = 8 * model.hidden + 3 * model.intermediate * e + (2 * queries + 2 * heads) * size * e + log_sums
    if on_gpu:
        return common + queries * size * e + log_sums + (0 if e == 4 else 8 * queries * size)
    block = max(sizes.window, MIN_BLOCK)
    seen = sizes.sink + sizes.window + block
    local = (2 * queries + 2 * heads * seen / block) * size * e + groups * seen * e
    return common + local + (4 if e == 4 else 8) * queries * size


def update_memory(model: Footprint, update: UpdateShape) -> UpdateMemory:
    """Of one micro-batch, all of whose rows are as long as the longest."""
    tokens, called = update.rows * update.length, min(update.rows, update.rows_per_call) * update.length
    e, of_layer = model.itemsize, layer_bytes_per_token(model, update.sizes, update.on_gpu)
    kept = model.hidden * e if update.checkpointing else of_layer
    last_norm = 8 * model.hidden
    held = tokens * (model.shape.num_layers * kept + last_norm)
    # gradients of the MLP's inner states and of the residual stream
    working = called * (2 * model.intermediate * e + 2 * model.hidden * e)
    layer = working + (called * of_layer if update.checkpointing else 0)
    tile: float = min(called, TILE_TOKENS) * TILE_ENTRIES * e
    if not update.on_gpu:
        tile += CPU_TILES * 4 * min(called, TILE_TOKENS) * min(model.vocabulary, TILE_ENTRIES)
    logits = tile + called * model.hidden * (4 + e)
    return UpdateMemory(int(held), int(layer), int(logits))
