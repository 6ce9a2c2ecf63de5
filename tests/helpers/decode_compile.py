"""Kernels compiled for GPUs that are not there, by Triton and its assembler.

    python -m tests.helpers.decode_compile

prints ``compiled``, the variant of the decode kernel, KiB of shared memory, bytes of stack per
thread, and whether splits hand on their results in order; then ``gaps`` and the bytes of stack of
the kernel that cuts block tables.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlkv.kernels.decode import CHANGING, _decode, tiles
from rlkv.kernels.gaps import TILE, _cut_gaps

# dtype, bytes of a number, group size, size of a head, compute capability
VARIANTS = [
    ("bf16", 2, 4, 128, 90),  # Llama 3.1 8B
    ("fp16", 2, 32, 256, 86),  # the largest
    ("fp32", 4, 1, 80, 80),
]
POINTERS = {
    "places": "*i32",
    "arrivals": "*i32",
    "start": "*i64",
    "padding": "*i64",
    "sinks": "*i64",
    "partials": "*fp32",
}


def compiled(dtype: str, itemsize: int, group: int, size: int, capability: int) -> Any:
    """Compile as a launch would, with memory that is aligned to 16 bytes."""
    constants = dict(tiles(group, size, itemsize))
    options = {"num_warps": constants.pop("num_warps")}
    signature: dict[str, Any] = dict.fromkeys(_decode.arg_names, f"*{dtype}")
    signature |= {**POINTERS, "scale": "fp32"}
    signature |= dict.fromkeys(CHANGING, "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {}
    for index, kind in enumerate(signature.values()):
        if kind.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(_decode, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compiled_gaps() -> Any:
    """Compile the kernel that cuts gaps out of tables of blocks of 16 tokens."""
    constants = {"BLOCK_SIZE": 16, "TILE": TILE}
    tensors = ("table", "lengths", "starts", "prefixes", "out_table", "out_lengths")
    signature = dict.fromkeys(_cut_gaps.arg_names, "i32")
    signature |= dict.fromkeys(tensors, "*i32")
    signature |= dict.fromkeys(constants, "constexpr")
    return triton.compile(
        ASTSource(_cut_gaps, signature, constants), target=GPUTarget("cuda", 90, 32)
    )


def stack(cubin: bytes) -> int:
    """Return the bytes of stack that a thread takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", usage)
    return int(found)


def in_order(ptx: str) -> bool:
    """Return whether all threads have stored when one counts the split, and none reads before."""
    accesses = re.findall(r"(ld\.global|st\.global|bar\.sync|atom\.\S+)", ptx)
    (place,) = [i for i, access in enumerate(accesses) if access.startswith("atom")]
    counted = "atom.global.gpu.acq_rel.add.u32"
    return accesses[place - 1 : place + 2] == ["bar.sync", counted, "bar.sync"]


if __name__ == "__main__":
    for variant in VARIANTS:
        found = compiled(*variant)
        name = "-".join(map(str, variant))
        shared = round(found.metadata.shared / 1024)
        print("compiled", name, shared, stack(found.asm["cubin"]), in_order(found.asm["ptx"]))
    print("gaps", stack(compiled_gaps().asm["cubin"]))
