"""Speed and memory of the compressed cache.

    rlkv-bench decode        # a decode step against transformers' own caches, about 15 minutes on 2 cores
    rlkv-bench generation    # whole texts: memory, latency, throughput and the largest batch, a few minutes
    rlkv-bench attention     # one layer's attention: latency and GB/s against torch's own, a few minutes
    rlkv-bench compaction    # what an eviction costs with each policy, a few minutes
    rlkv-bench serving       # throughput of the vLLM plugin (needs vLLM), about an hour on 2 cores
    rlkv-bench check         # what breaks first on a new GPU, about 20 minutes there

decode: a random Llama of about 100 M parameters (8 KV heads of 64, two query heads each) decodes with
HeadReallocationCache at several sparsities and with transformers' DynamicCache and StaticCache (sdpa), taking turns in
one run.

generation: the same model writes whole texts with each method of compression and batch size; with --memory-gib also
with the largest batch whose weights and KV fit.

attention: one token through one attention layer, by batch, length and sparsity, against torch's attention over a full
cache; a speed-up is given only where the output is right.

compaction: one eviction of every policy against one decode step of that model, and its memory.

serving: offline throughput of the stock engine and of the plugin at several sparsities, with the same requests, output
lengths and bytes of KV pool, where memory is the limit and where it is not. With --eviction each sparsity is also run
with that policy in the compressible heads. Every run has a process of its own; finished ones are kept and not repeated.

check: attention, cache and eviction against float64 on the CPU, a gate update, a rollout and decoding at the shape of
Llama-8B, and the Triton kernels. Each check passes, fails or says why it cannot run. Exit code 1 if one fails.
On a CPU the same runs at small sizes, in under 2 minutes.

Each writes NAME.json, NAME.md and, except check, NAME.png.
"""

from __future__ import annotations

import sys

from rlkv.benchmarks.attention import AttentionConfig
from rlkv.benchmarks.check.config import CheckConfig
from rlkv.benchmarks.compaction import CompactionConfig
from rlkv.benchmarks.decode import DecodeConfig
from rlkv.benchmarks.generation import GenerationConfig
from rlkv.benchmarks.serving import ServingConfig
from rlkv.benchmarks.serving_page import run_serving
from rlkv.cli.errors import run_app
from rlkv.cli.options import parse_command
from rlkv.utils.extras import require
from rlkv.utils.store import check_results

COMMANDS = {
    "decode": DecodeConfig,
    "generation": GenerationConfig,
    "attention": AttentionConfig,
    "compaction": CompactionConfig,
    "serving": ServingConfig,
    "check": CheckConfig,
}


def run() -> None:
    """Parse the command line and run the benchmark that it names."""
    config = parse_command("rlkv-bench", COMMANDS, __doc__)
    name = next(name for name, kind in COMMANDS.items() if type(config) is kind)
    check_results(config.output_dir, f"{name}.json", (f"{name}.md", f"{name}.png"), {"results"})
    if isinstance(config, ServingConfig):
        return run_serving(config)
    if not isinstance(config, CheckConfig):
        return config.run()
    require("peft", "train")
    from rlkv.benchmarks.check.run import run_checks

    sys.exit(run_checks(config))


def main() -> None:
    run_app(run)


if __name__ == "__main__":
    main()
