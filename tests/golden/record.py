"""Record what the commands of this checkout give: ``python -m tests.golden.record`` rewrites the JSON files here.

Commands are named as users name them: console scripts by what ``pyproject.toml`` says, programs by their path.  All run
in this process, in one temporary folder, on one thread unless OMP_NUM_THREADS says otherwise.  Figures that lie within
the tolerance of what is recorded are left as they are, so that a diff shows what changed and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.golden.compare import kept, layout, rounded, shortened
from tests.golden.names import record_api, record_options
from tests.golden.runs import CHAT, GATES, PROMPT, ROOT, RUNS, SHOWN, Said, invoke

HERE = Path(__file__).resolve().parent
# figures may differ by this much, absolute below 1 and relative above
TOLERANCE = {"gates": 1e-5, "logs": 1e-4, "results": 1e-6}
ENVIRONMENT = {  # before torch is imported
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}
# what no two runs share, or what tells only where and when: its type is recorded, not its value
VOLATILE = re.compile(
    r"time/.*|.*seconds.*|.*cpu_s|.*, wall|tokens_per_second|command|commit|finished|versions|hardware|rows|findings.*"
    r"|problems|data_digest"
)


# --- contents of files


def schema(value: Any) -> Any:
    """Keys and types of a JSON value; the items of a list are one."""
    if isinstance(value, dict):
        return {name: "dict" if name in ("versions", "hardware") else schema(of) for name, of in value.items()}
    if isinstance(value, list):
        merged: list[Any] = []
        for item in value:
            merged = [schema(item) if not merged else merge(merged[0], schema(item))]
        return merged
    return "null" if value is None else type(value).__name__


def merge(one: Any, other: Any) -> Any:
    """The schema of what has either of two."""
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: merge(one.get(name, other.get(name)), other.get(name, one.get(name))) for name in one | other}
    if isinstance(one, list) and isinstance(other, list):
        return [merge(*one, *other)] if one and other else one or other
    if isinstance(one, str) and isinstance(other, str):
        return " or ".join(sorted({*one.split(" or "), *other.split(" or ")}))
    return other if isinstance(one, str) else one


def content(value: Any) -> Any:
    """A JSON value, with types in the place of what is volatile."""
    if isinstance(value, dict):
        return {name: schema(of) if VOLATILE.fullmatch(name) else content(of) for name, of in value.items()}
    return [content(of) for of in value] if isinstance(value, list) else value


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def describe(path: Path) -> Any:
    """What a result file is made of: keys and types, columns, headings of a report; null for what is only there."""
    if path.name.endswith(".settings.json"):
        return None
    if path.suffix == ".json":
        return schema(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return schema(rows_of(path)[0])
    if path.suffix == ".parquet":
        import pyarrow.parquet

        read = pyarrow.parquet.read_schema(path)
        return {field.name: str(field.type) for field in read}
    if path.suffix == ".tsv":
        return [len(line.split("\t")) for line in path.read_text().splitlines()]
    if path.suffix == ".md":
        lines = path.read_text().splitlines()
        tables = [line for line, below in pairwise(lines) if re.match(r"\|[ :]*-", below)]
        return [line for line in lines if line.startswith("#") or line in tables]
    return None


def record_files(folder: Path) -> dict[str, Any]:
    """Every file that the runs have left; what is in checkpoints may change."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"[0-9a-f]{12}", "*", str(path.relative_to(folder)))
        if "checkpoint-" in name:
            found[re.sub(r"(checkpoint-\d+)/.*", r"\1/", name)] = None
        elif name not in found:
            found[name] = describe(path)
    return shortened(found)


def record_gates(folder: Path) -> dict[str, Any]:
    """The gates that the runs ended with, in all formats."""
    from rlkv import HeadGates

    sizes = ("sink", "window", "deploy_sink", "deploy_window", "deploy_protect_prompt")
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("alpha", "mean_alpha", "sizes", "model", "training")}
    for name, path in GATES.items():
        if path != "tiny" and not (folder / path).exists():
            continue
        gates = HeadGates.load(path)
        parts["alpha"][name] = gates.alpha.tolist()
        parts["mean_alpha"][name] = gates.mean_alpha.tolist()
        parts["sizes"][name] = {size: getattr(gates, size) for size in sizes}
        parts["model"][name] = None if gates.model is None else gates.model.model_id
        parts["training"][name] = content(gates.training)
    return {part: shortened(of) for part, of in parts.items()}


def record_logs(folder: Path, sent: dict[str, Any]) -> dict[str, Any]:
    """Figures of every step, and the names that W&B gets."""
    logs = {str(path.relative_to(folder)): content(rows_of(path)) for path in sorted(folder.glob("**/log.jsonl"))}
    return {**{name: log for name, log in logs.items() if name[:2] not in ("a/", "b/")}, "W&B": sent}


def watch_wandb() -> dict[str, Any]:
    """Have W&B runs write down the names that they get, and send nothing."""
    import wandb

    sent: dict[str, Any] = {}

    class Run:
        id, url, dir = "golden", None, "wandb"

        def __init__(self, **options: Any) -> None:
            self.seen = sent[Path(options.get("dir", "?")).name] = {"options": sorted(options), "logged": []}

        def log(self, record: dict[str, Any], **_: Any) -> None:
            self.seen["logged"] = sorted({*self.seen["logged"], *record})

        def log_artifact(self, artifact: Any) -> None:
            self.seen["artifact"] = [artifact.name, artifact.type, *sorted(artifact.manifest.entries)]

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    wandb.init = Run
    return sent


def record_texts(folder: Path, said: dict[str, Said]) -> dict[str, Any]:
    """What the model wrote, and what commands print."""
    import pyarrow.parquet

    found: dict[str, Any] = {}
    for name, printed in said.items():
        if name.split()[0] in SHOWN:
            text = re.sub(r"[\d,]+\.\d tokens/s", "N tokens/s", printed.out + printed.err)
            lines = [line.rstrip() for line in text.replace(str(ROOT), ".").splitlines() if "━" not in line]
            found[name] = [line for line in lines if line]
    curriculum = folder / "curriculum" / "curriculum.parquet"
    if curriculum.exists():
        found["curriculum"] = pyarrow.parquet.read_table(curriculum).to_pylist()[:6]
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("eval/**/*.jsonl")]):
        found[str(path.relative_to(folder))] = content(rows_of(path))
    return found


def record_results(folder: Path) -> dict[str, Any]:
    """Every number of the results of an evaluation, a study and a filter job."""
    paths = [folder / name for name in ("curriculum/report.json", "eval/results.json", "study/results.json")]
    return {str(path.relative_to(folder)): content(json.loads(path.read_text())) for path in paths if path.exists()}


# --- the record


def write_inputs(folder: Path) -> None:
    """Two gates files that no training made, and the log of one."""
    import torch

    from rlkv import HeadGates

    for name, seed in (("a", 0), ("b", 1)):
        (folder / name).mkdir()
        alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
        HeadGates(alpha, deploy_sink=4, deploy_window=16).save(folder / name / "gates.pt")
        (folder / name / "log.jsonl").write_text('{"time/step_s": 9.0, "time/step_cpu_s": 7.0}\n')


def record(folder: Path) -> dict[str, Any]:
    """Run everything in ``folder``; what each JSON file holds, by its name."""
    from rlkv import tiny

    os.chdir(folder)
    write_inputs(folder)
    sent = watch_wandb()
    shutil.copy(tiny.GROUND_TRUTH, folder / "truth.json")
    said, seconds = {}, {}
    for name, command in RUNS.items():
        started = time.monotonic()
        words = [word.format(prompt=PROMPT) for word in command.split()]
        said[name] = invoke(words, CHAT if name == "chat" else "")
        seconds[name] = round(time.monotonic() - started, 1)
        if said[name].code:
            print(f"{name}: exit code {said[name].code}: {said[name].err[-2000:]}", file=sys.stderr)
    print(f"seconds: {seconds}", file=sys.stderr)
    return {
        "files": {"exit codes": {name: text.code for name, text in said.items()}, **record_files(folder)},
        "gates": record_gates(folder),
        "logs": record_logs(folder, sent),
        "texts": record_texts(folder, said),
        "results": record_results(folder),
        "options": record_options(),
        "api": record_api(),
    }


def main() -> None:
    """Write the record to the folder that is named, or else to its place in the checkout."""
    output = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE
    for name in [name for name in os.environ if name.startswith("RLKV_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as staging:
        os.environ.update(ENVIRONMENT, WANDB_DATA_DIR=staging, WANDB_CACHE_DIR=staging)
        found = rounded(record(Path(folder)))
        os.chdir(ROOT)
    failed = [name for name, code in found["files"]["exit codes"].items() if code]
    if failed and output == HERE:
        sys.exit(f"nothing is written: {', '.join(failed)} failed, see above")
    for name, value in found.items():
        path = output / f"{name}.json"
        recorded = json.loads(path.read_text()) if path.exists() else None
        path.write_text(layout(kept(recorded, value, TOLERANCE.get(name, 0))) + "\n")


if __name__ == "__main__":
    main()
