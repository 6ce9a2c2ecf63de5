"""``rlkv-bench serving`` for real, on a tiny model; no time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.engines import need_vllm

need_vllm()

OPTIONS = {
    "--layers": "2",
    "--hidden": "128",
    "--query-heads": "2",
    "--kv-heads": "2",
    "--requests": "6",
    "--prompt-tokens": "4 8",
    "--mean-output": "100",
    "--max-output": "180",
    "--pool-tokens": "320",
    "--eviction": "rkv",
    "--budget": "20",
    "--buffer": "12",
    "--sparsities": "0.5",
    "--settings": "memory-limited",
    "--rounds": "1",
}


def test_fewer_steps_in_the_same_pool(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from rlkv.cli.jobs import bench_main; bench_main()",
        "serving",
        "--output-dir",
        str(tmp_path),
    ]
    command += [part for name, values in OPTIONS.items() for part in (name, *values.split())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "serving.json").read_text())
    full, half, evicted = found["results"]
    lengths = found["lengths"]["outputs"]
    assert [run["output_tokens"] for run in found["runs"]] == [sum(lengths)] * 3
    # a block of the full cache is two of the plugin's, so that the pools are equal to the byte
    assert half["pool_bytes"] == full["pool_bytes"]
    assert half["bytes_per_token"][0] < full["bytes_per_token"][0]
    # which step a request joins depends on blocks only, never on time
    assert half["mean_running"][0] > full["mean_running"][0]
    assert half["steps"][0] < full["steps"][0]
    assert full["steps"][0] >= max(lengths)
    # 32 entries and the observed queries need two blocks, sinks and window up to three
    assert evicted["bytes_per_token"][0] < half["bytes_per_token"][0]
    assert evicted["steps"][0] <= half["steps"][0]
    assert found["versions"]["vllm"]
    assert (tmp_path / "serving.png").stat().st_size > 5000
    assert "| sparsity 0.5 |" in (tmp_path / "serving.md").read_text()
