"""Record what the commands of this checkout give: rewrite the JSON files beside this one.

    python -m tests.golden.record           # about a minute on a quiet core
    python -m tests.golden.record FOLDER    # elsewhere, to compare

All commands run in this process, in one temporary folder, on one thread unless OMP_NUM_THREADS
says otherwise.  Figures that lie within the tolerance of what is recorded are left as they are, so
that a diff shows what changed and nothing else.
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
    "COLUMNS": "100",  # --help in one column, as tests.golden.names reads it
    "NO_COLOR": "1",
}
# what no two runs share, or what tells only where and when: its type is recorded, not its value
VOLATILE = re.compile(
    r"time/.*|.*seconds.*|.*cpu_s|.*, wall|tokens_per_second|command|commit|finished|versions"
    r"|hardware|rows|findings.*|problems|data_digest"
)


# --- contents of files


def schema(value: Any) -> Any:
    """Reduce a JSON value to keys and types; the items of a list are one."""
    if isinstance(value, dict):
        whole = {name: "dict" for name in ("versions", "hardware") if name in value}
        return {name: schema(of) for name, of in value.items()} | whole
    if isinstance(value, list):
        merged: list[Any] = []
        for item in value:
            merged = [schema(item) if not merged else merge(merged[0], schema(item))]
        return merged
    return "null" if value is None else type(value).__name__


def merge(one: Any, other: Any) -> Any:
    """Join two schemas into that of what has either."""
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        merged = one | other
        for name in one.keys() & other.keys():
            merged[name] = merge(one[name], other[name])
        return merged
    if isinstance(one, list) and isinstance(other, list):
        return [merge(*one, *other)] if one and other else one or other
    if isinstance(one, str) and isinstance(other, str):
        return " or ".join(sorted({*one.split(" or "), *other.split(" or ")}))
    return other if isinstance(one, str) else one


def content(value: Any) -> Any:
    """Replace what is volatile in a JSON value by its type."""
    if isinstance(value, dict):
        found = {}
        for name, of in value.items():
            found[name] = schema(of) if VOLATILE.fullmatch(name) else content(of)
        return found
    return [content(of) for of in value] if isinstance(value, list) else value


def rows_of(path: Path) -> list[Any]:
    """Read the values of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def describe(path: Path) -> Any:
    """Describe a file by its keys and types, columns or headings; null: that it is there."""
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


def record_files(folder: Path, elsewhere: set[str]) -> dict[str, Any]:
    """Describe every file that the runs have left; what is in checkpoints may change.

    elsewhere: files of which all of the content is recorded.
    """
    from rlkv import HeadGates

    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = re.sub(r"[0-9a-f]{12}", "*", str(path.relative_to(folder)))
        if "checkpoint-" in name:
            found[re.sub(r"(checkpoint-\d+)/.*", r"\1/", name)] = None
        elif name not in found:
            found[name] = None if name in elsewhere else describe(path)
    trained = {}
    for name, path in GATES.items():
        if (folder / path).exists():
            training = json.loads(json.dumps(HeadGates.load(folder / path).training))
            trained[f"the training of {name} in gates.json"] = schema(training)
    short = shortened(trained | found)
    return {name: short[name] for name in found}


def record_gates(folder: Path) -> dict[str, Any]:
    """Read the gates that the runs ended with, in all formats."""
    from rlkv import HeadGates

    sizes = ("sink", "window", "deploy_sink", "deploy_window", "deploy_protect_prompt")
    parts: dict[str, dict[str, Any]] = {}
    for part in ("alpha", "mean_alpha", "sizes", "model", "training"):
        parts[part] = {}
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
    """Read the figures of every step, and add the names that W&B was ``sent``."""
    logs = {}
    for path in sorted(folder.glob("**/log.jsonl")):
        name = str(path.relative_to(folder))
        if not name.startswith(("a/", "b/")):
            logs[name] = content(rows_of(path))
    return {**shortened(logs), "W&B": shortened(sent)}


def watch_wandb() -> dict[str, Any]:
    """Have W&B runs write down the names that they get, and send nothing."""
    import wandb

    sent: dict[str, Any] = {}

    class Run:
        id, url, dir = "golden", None, "wandb"

        def __init__(self, **options: Any) -> None:
            self.seen: dict[str, Any] = {"options": sorted(options), "logged": []}
            sent[Path(options.get("dir", "?")).name] = self.seen

        def log(self, record: dict[str, Any], **_: Any) -> None:
            self.seen["logged"] = sorted({*self.seen["logged"], *record})

        def log_artifact(self, artifact: Any) -> None:
            files = sorted(artifact.manifest.entries)
            self.seen["artifact"] = [artifact.name, artifact.type, *files]

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    wandb.init = Run
    return sent


def record_texts(folder: Path, said: dict[str, Said]) -> dict[str, Any]:
    """Collect what the model wrote, and what commands print."""
    import pyarrow.parquet

    found: dict[str, Any] = {}
    for name, printed in said.items():
        if name.split()[0] in SHOWN:
            text = re.sub(r"[\d,]+\.\d tokens/s", "N tokens/s", printed.out + printed.err)
            lines = map(str.rstrip, text.replace(str(ROOT), ".").splitlines())
            # without blank lines and progress bars
            found[name] = [line for line in lines if line and "━" not in line]
    curriculum = folder / "curriculum" / "curriculum.parquet"
    if curriculum.exists():
        found["curriculum"] = pyarrow.parquet.read_table(curriculum).to_pylist()[:6]
    for path in sorted([*folder.glob("*.jsonl"), *folder.glob("eval/**/*.jsonl")]):
        found[str(path.relative_to(folder))] = content(rows_of(path))
    return found


def record_results(folder: Path) -> dict[str, Any]:
    """Read every number of the results of a filter job, an evaluation and a study."""
    found = {}
    for name in ("curriculum/report.json", "eval/results.json", "study/results.json"):
        if (folder / name).exists():
            found[name] = content(json.loads((folder / name).read_text()))
    return found


# --- the record


def write_inputs(folder: Path) -> None:
    """Write two gates files that no training made, with logs."""
    import torch

    from rlkv import HeadGates

    for name, seed in (("a", 0), ("b", 1)):
        (folder / name).mkdir()
        alpha = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed))
        HeadGates(alpha, deploy_sink=4, deploy_window=16).save(folder / name / "gates.pt")
        (folder / name / "log.jsonl").write_text('{"time/step_s": 9.0, "time/step_cpu_s": 7.0}\n')


def record(folder: Path) -> dict[str, Any]:
    """Run everything in ``folder`` and return what each JSON file holds, by its name."""
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
    codes = {name: text.code for name, text in said.items()}
    whole = {
        "logs": record_logs(folder, sent),
        "texts": record_texts(folder, said),
        "results": record_results(folder),
    }
    elsewhere = {name for of in whole.values() for name in of}
    return {
        "files": {"exit codes": codes, **record_files(folder, elsewhere)},
        "gates": record_gates(folder),
        **whole,
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
