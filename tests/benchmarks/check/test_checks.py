"""Every check passes at small sizes on a CPU, and finds an error that is put in its way."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from typing import Any

import pytest
import torch

import rlkv.attention.mixed as mixed_attention
import rlkv.rollout.decoding as rollout_decoding
from rlkv.benchmarks.check import (
    cached,
    decoding,
    evicting,
    local_attention,
    mixed,
    sampling,
    update,
)
from rlkv.benchmarks.check.llama8b import FULL, RESERVE_GIB, layers_that_fit
from rlkv.benchmarks.check.one import Check, Findings, Setting, run_one
from rlkv.benchmarks.check.run import CHECKS
from rlkv.benchmarks.check.twins import compare
from rlkv.benchmarks.decode import realloc_variant
from rlkv.cache import HeadReallocationCache
from rlkv.eviction import TOVA
from tests.helpers.paths import ROOT

CPU = Setting(torch.device("cpu"))
GIB = 2**30


def wider(function: Any) -> Any:
    """Local attention with a window of one token more."""
    return lambda *args, window=None, **kwargs: (
        function(*args, window=window + 1, **kwargs)
        if window
        else function(*args[:5], args[5] + 1, *args[6:])
    )


def break_local(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(local_attention, "local_attention", wider(local_attention.local_attention))


def break_mixed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mixed_attention, "local_attention", wider(mixed_attention.local_attention))


def break_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cached,
        "HeadReallocationCache",
        lambda f, s, w, **rest: HeadReallocationCache(f, s, w + 1, **rest),
    )


def break_eviction(patch: pytest.MonkeyPatch) -> None:
    calls, scores = count(), TOVA.scores
    patch.setattr(TOVA, "scores", lambda *args: scores(*args) * (-1) ** next(calls))


def break_update(patch: pytest.MonkeyPatch) -> None:
    mix = mixed_attention.mix
    patch.setattr(
        mixed_attention,
        "mix",
        lambda full, local, alpha: mix(full, local, alpha.detach() + 0 * alpha),
    )


def break_rollout(patch: pytest.MonkeyPatch) -> None:
    logprobs = rollout_decoding.token_logprobs
    patch.setattr(rollout_decoding, "token_logprobs", lambda *args: logprobs(*args) - 0.01)


def break_decode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        decoding,
        "realloc_variant",
        lambda *args: realloc_variant(*args[:5], args[5] + 1, *args[6:]),
    )


BROKEN = [
    (local_attention.CHECK, break_local, "grad, T 50, B 1, group 4: relative error"),
    (mixed.CHECK, break_mixed, "gates 0, 1 rows: relative error"),
    (cached.CHECK, break_cache, "sparsity 0.5, 1 rows: relative error"),
    (evicting.CHECK, break_eviction, "tova keeps"),
    (update.CHECK, break_update, "64 tokens: 4 gates have no gradient"),
    (sampling.CHECK, break_rollout, "log-probabilities differ by 0.01 on average"),
    (decoding.CHECK, break_decode, "sparsity 0.5 holds"),
]
NAMES = [check.name for check, _, _ in BROKEN]


def test_all_checks_are_here_and_names_are_unique() -> None:
    kernels = [check.name for check in CHECKS if check.name.startswith("kernel_")]
    assert [check.name for check in CHECKS] == NAMES + kernels
    assert len(set(NAMES + kernels)) == len(CHECKS)


@pytest.mark.parametrize("check", [check for check, _, _ in BROKEN], ids=NAMES)
def test_a_check_passes(check: Check) -> None:
    row = run_one(check, CPU)
    assert row["outcome"] == "passes", row["reason"] + row["traceback"]
    assert row["figures"]


@pytest.mark.parametrize(("check", "spoil", "reason"), BROKEN, ids=NAMES)
def test_a_check_finds_an_error(
    check: Check, spoil: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    row = run_one(check, CPU)
    assert row["outcome"] == "fails"
    assert row["reason"].startswith(reason)
    assert not row["traceback"]


def test_kernels_need_a_gpu() -> None:
    for check in CHECKS[len(NAMES) :]:
        row = run_one(check, CPU)
        assert (row["outcome"], row["reason"]) == ("cannot run", "it needs a CUDA GPU")


def test_layers_fit_the_memory() -> None:
    outside, layer = 2 * 128256 * 4096 * 2, 218_103_808 * 2  # bytes in bfloat16
    assert layers_that_fit(FULL, 140 * GIB) == 32
    assert layers_that_fit(FULL, int(RESERVE_GIB * GIB) + outside + 5 * layer) == 5
    assert layers_that_fit(FULL, int(RESERVE_GIB * GIB) + outside + layer - 2) == 0
    assert layers_that_fit(FULL, 8 * GIB) < 1


ALONE = """
import importlib.abc, importlib.util, sys
absent = {"trl", "datasets", "vllm", "tyro", "math_verify", "deepspeed", "wandb"}
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in absent else find_spec(name, package)

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name}", name=name)

sys.meta_path.insert(0, Absent())
from dataclasses import replace
from rlkv.benchmarks.check import run
run.CHECKS = [replace(check, needs_gpu=False) for check in run.CHECKS]  # the interpreter runs kernels on a CPU
only = ("update", "kernel_gapless_tables")
sys.exit(run.run_checks(run.CheckConfig(device="cpu", only=only), run.CHECKS))
"""


def test_torch_transformers_peft_and_triton_are_enough(tmp_path: Any) -> None:
    pytest.importorskip("triton")
    alone = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=tmp_path,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passes after") == 2


def test_an_error_that_is_not_a_number_fails_even_where_the_stock_model_has_one() -> None:
    found = Findings()
    compare(found, "right", 1e-6, 1e-6)
    assert not found.problems
    compare(found, "nan everywhere", torch.inf, torch.inf)
    assert len(found.problems) == 1
