"""The commands whose results are recorded, small and seeded, and how they are run.

Commands are named as users name them: console scripts as in ``pyproject.toml``, programs by path.
"""

from __future__ import annotations

import importlib
import io
import runpy
import sys
import tomllib
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PROGRAMS = ("data_prep", "train", "rollout", "inference")  # folders of programs
SUBCOMMANDS = {
    "rlkv-gates": "inspect convert plot diff report push pull",
    "rlkv-bench": "decode serving check",
}

PROMPT = "a=7 . b=2 . c = b + a . d = c * b . e = d - a . find e ?"
CHAT = f"{PROMPT}\n/reset\n{PROMPT}\n"  # what the command "chat" reads

CURRICULUM = "--curriculum curriculum/curriculum.parquet"
GRPO = f"""rlkv-train --config tiny --finder rlkv {CURRICULUM} --use_cpu --prompts_per_step 4
    --per_device_train_batch_size 16 --max_completion_length 60 --temperature 1.3 --init_value 0.45
    --save_steps 2 --image_steps 2 --sample_steps 2 --held_out 3 --held_out_steps 2
    --target_sparsity 0.5 --stable_steps 0"""
ELIMINATION = f"""rlkv-train --model tiny --dtype float32 --finder elimination {CURRICULUM}
    --use_cpu --elimination_traces 4 --image_steps 0"""
DISTILL = "rlkv-distill --steps 3 --save_steps 2 --batch_size 4 --forward_rows 4 --wandb offline"
INFER = "rlkv-infer --model tiny --max-new-tokens 60"
ASK = "--input problems.jsonl --batch-size 2"

# {prompt} is one word; a/gates.pt, b/gates.pt and truth.json are there from the start
RUNS = {
    "draw": """data_prep/draw_problems.py --model tiny --num-problems 5 --steps 4-6 --seed 11
        --output problems.jsonl""",
    "filter": "rlkv-filter --config filter_tiny --num-problems 24 --output-dir curriculum",
    "grpo": f"{GRPO} --max_steps 4 --output_dir grpo --wandb offline",
    "grpo stopped": f"{GRPO} --max_steps 2 --output_dir resumed",
    "grpo resumed": f"{GRPO} --max_steps 4 --output_dir resumed",
    "grpo published": f"""{GRPO} --max_steps 2 --output_dir published --recipe published
        --held_out 0""",
    "elimination": f"""{ELIMINATION} --elimination_distillation 0 --elimination_sparsity 0.2
        --output_dir elimination""",
    "elimination after distillation": f"""{ELIMINATION} --elimination_distillation 8
        --elimination_sparsity 0.5 --prompts_per_step 4 --output_dir distilled""",
    "attention": f"""rlkv-train --config tiny --finder attention {CURRICULUM} --use_cpu
        --elimination_traces 4 --output_dir attention""",
    "recall": f"{DISTILL} --config distill_tiny --output_dir recall",
    "traces": f"{DISTILL} --config distill_tiny_traces {CURRICULUM} --output_dir traces",
    "rerank": f"""inference/rerank_heads.py --model tiny --gates a/gates.pt {CURRICULUM}
        --num-traces 4 --high 0.4 --output reranked.pt""",
    "eval": """rlkv-eval --model tiny --tasks tiny --data problems.jsonl --gates rlkv=tiny
        --methods full rlkv@0.5 rkv@ratio=0.5:extra=12:buffer=4 random-heads@0.5
        rlkv@0.4+snapkv@20:buffer=4 --max-new-tokens 120 --output-dir eval""",
    "study": """rlkv-study --gates mine=tiny mine=a/gates.pt other=b/gates.pt
        --ablation variant=a/gates.pt --data problems.jsonl --oracle truth.json --output-dir study
        --random-draws 1 --sparsities 0.5 --compare-at 0.5 --top-heads 2
        --repetition 20 5 --policies rkv --savings 0.3 --buffer 4 --observation 2 --extra 8
        --batch-size 5 --max-new-tokens 60 --sink 4 --window 16""",
    "infer file": f"{INFER} {ASK} --output both.jsonl --compare-full",
    "infer evicting": f"""{INFER} {ASK} --output evicting.jsonl --eviction rkv --budget 24
        --eviction-option buffer=4""",
    "infer": f"{INFER} --compare-full --prompt {{prompt}}",
    "infer other sizes": f"""{INFER} --sparsity 0.8 --sink 2 --window 8 --scope layer
        --prompt {{prompt}}""",
    "infer local": f"{INFER} --sparsity 0.8 --prefill local --prompt {{prompt}}",
    "infer published": f"{INFER} --sparsity 0.8 --prefill published --prompt {{prompt}}",
    "infer protected": f"{INFER} --sparsity 1 --protect-prompt --prompt {{prompt}}",
    "chat": "rlkv-infer --gates tiny --sparsity 0.5 --max-new-tokens 40",
    "inspect": "rlkv-gates inspect tiny",
    "convert pt": "rlkv-gates convert tiny converted.pt",
    "convert safetensors": "rlkv-gates convert converted.pt converted.safetensors",
    "convert tsv": "rlkv-gates convert converted.safetensors converted.tsv",
    "convert peft": "rlkv-gates convert converted.pt converted/",
    "plot": "rlkv-gates plot tiny heatmap.png",
    "diff": "rlkv-gates diff tiny a/gates.pt",
    "report": "rlkv-gates report traces",
    "plan": "rlkv-train --config llama8b --plan --plan_gpus 8xh100",
    "bench": """rlkv-bench decode --quick --batches 1 --contexts 64 --sparsities 0 0.5 --rounds 1
        --seconds 0.05 --output-dir bench""",
}
# options with which a budget of 24 entries is felt
POLICIES = {
    "h2o": "",
    "tova": "",
    "sink_window": "",
    "rpc": "R=4",
    "rkv": "buffer=4",
    "snapkv": "buffer=4",
    "random": "buffer=4 protect_prompt=False",
}
for policy, options in POLICIES.items():
    more = f"--eviction-option {options}" if options else ""
    RUNS[f"infer {policy}"] = f"{INFER} --eviction {policy} --budget 24 {more} --prompt {{prompt}}"

# what these print is recorded, by the first word of their names
SHOWN = ("draw", "infer", "chat", "inspect", "convert", "plot", "diff", "report", "plan")
# gates that they leave, by the names of their record
GATES = {"packaged": "tiny"}
for name in (
    "grpo",
    "resumed",
    "published",
    "elimination",
    "distilled",
    "attention",
    "recall",
    "traces",
):
    GATES[name] = f"{name}/gates.pt"
GATES["rerank"] = "reranked.pt"
for name in ("converted.pt", "converted.safetensors", "converted.tsv", "converted"):
    GATES[name] = name
for name in ("gates.safetensors", "adapter_weights.tsv", "adapter"):
    GATES[f"grpo/{name}"] = f"grpo/{name}"


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def invoke(words: list[str], text: str = "") -> Said:
    """Run a command as if in a process of its own, with ``text`` on standard input."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    program = str(ROOT / words[0]) if "/" in words[0] else words[0]
    sys.argv = [program, *words[1:]]
    sys.stdin = io.StringIO(text)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            if words[0] in PROJECT["scripts"]:
                module, function = PROJECT["scripts"][words[0]].split(":")
                getattr(importlib.import_module(module), function)()
            else:
                runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except Exception:  # the other commands are worth comparing all the same
        code = 1
        traceback.print_exc(file=err)
    finally:
        sys.argv, sys.stdin = before
    return Said(code, out.getvalue(), err.getvalue())
