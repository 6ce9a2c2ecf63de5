"""``rlkv-bench serving`` with a real engine, on a tiny model; no time is judged."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.engines import need_vllm

need_vllm()

from rlkv.cli.jobs import bench_main
from tests.helpers.exit_code import exit_code

OPTIONS = """--layers 2 --hidden 128 --query-heads 2 --kv-heads 2 --requests 4 --prompt-tokens 6
    --output-tokens 40 --pool-tokens 320 --sparsities 0.5 --rounds 1"""


def test_both_engines_serve_the_same_requests(tmp_path: Path) -> None:
    options = [*OPTIONS.split(), "--output-dir", tmp_path]
    assert exit_code(bench_main, "rlkv-bench", "serving", *options) == 0
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [run["mode"] for run in found["runs"]] == ["full cache", "sparsity 0.5"]
    assert len({run["total_num_tokens"] for run in found["runs"]}) == 1
    for row in found["results"]:
        assert row["tokens_per_second"] > 0
    assert found["vllm"]
    assert (tmp_path / "serving.png").stat().st_size > 5000
    assert "| sparsity 0.5 |" in (tmp_path / "serving.md").read_text()
