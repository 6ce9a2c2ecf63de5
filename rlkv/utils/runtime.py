"""Where a result file comes from: versions, hardware, command."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any


def require(module: str, extra: str) -> ModuleType:
    """Import ``module`` of the extra ``rlkv[extra]``.

    ``ValueError`` with the pip command if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        package = module.split(".")[0].replace("_", "-")
        raise ValueError(
            f"this needs the package {package}, which is not installed: pip install 'rlkv[{extra}]'"
        ) from None


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def leave_launcher() -> tuple[int, int]:
    """``(rank, number of processes)``; (0, 1) if this one was started alone.

    From then on it counts as started alone, and sees one GPU, that of its local rank: to be called
    before CUDA starts.

    Raises:
        ValueError: if there are fewer GPUs, or CUDA_VISIBLE_DEVICES names fewer, than processes on
            this machine.
    """
    found = {name: os.environ.pop(name, None) for name in _NAMES}
    rank, count, local = (
        int(found["RANK"] or 0),
        int(found["WORLD_SIZE"] or 1),
        int(found["LOCAL_RANK"] or 0),
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count > 1 and visible != "":  # empty: no GPU is to be used
        from torch.cuda import device_count  # the verifier loads no torch

        gpus = list(map(str, range(device_count()))) if visible is None else visible.split(",")
        if gpus and local >= len(gpus):
            raise ValueError(
                f"there is no GPU for process {local} of this machine: start {len(gpus)} processes"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local] if gpus else ""
    return rank, count


ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    "rlkv",
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "math-verify",
    "vllm",
)


def digest(value: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of bytes, or of a JSON-able value: enough to distinguish
    two states.
    """
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Installed versions of the packages that results depend on; absent ones are left out."""
    import torch  # here, since programs that run stages load no torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["torch"] = torch.__version__  # with its build tag: +cpu, +cu130
    return found


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """CPU, core count, torch threads and GPUs of this machine, and with a GPU the kernels of
    torch's attention.
    """
    import torch

    from rlkv.utils.devices import attention_kernels

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
    }
    return found | ({"attention_kernels": attention_kernels()} if gpus else {})


def hardware_line() -> str:
    """One phrase for the foot of a table or figure."""
    machine = hardware()
    if machine["gpus"]:
        return f"{len(machine['gpus'])} x {machine['gpus'][0]}"
    return f"{machine['cores']} cores of {machine['cpu']}, no GPU"


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with ``+`` if files differ from it.

    None elsewhere.
    """
    if not (ROOT / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(ROOT),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def provenance() -> dict[str, Any]:
    """What a result file carries in addition to its numbers and its configuration."""
    program = Path(sys.argv[0]).resolve()
    # where a program is installed says nothing; where it lies in the repository does
    named = [program.name]
    if program.suffix == ".py":
        named = [
            "python",
            str(program.relative_to(ROOT)) if program.is_relative_to(ROOT) else program.name,
        ]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "command": shlex.join([*named, *sys.argv[1:]]),
        **({"processes": processes} if processes > 1 else {}),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def shadow(instance: Any, name: str, function: Any, undo: ExitStack) -> None:
    """Shadow a method on the instance, until ``undo`` removes the shadow or restores an earlier
    one.
    """
    own = vars(instance)
    undo.callback(
        *((setattr, instance, name, own[name]) if name in own else (delattr, instance, name))
    )
    setattr(instance, name, function)
