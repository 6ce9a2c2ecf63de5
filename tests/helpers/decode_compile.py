"""The decode kernel compiled for GPUs that are not there, by Triton and its assembler.

Prints what came out.

    python -m tests.helpers.decode_compile

A line is ``compiled``, the variant, KiB of shared memory, bytes of stack per thread, whether loads
of keys and values are asynchronous and 16 bytes wide, whether splits hand on their results in
order, and how many loads are under way while a block of entries is computed.
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

from rlkv.kernels.decode import _CHANGING, _decode, tiles

# dtype, group size, sizes of keys and values, compute capability
VARIANTS = [
    ("bf16", 4, 128, 128, 90),  # Llama 3.1 8B
    ("bf16", 1, 128, 128, 80),
    ("fp16", 32, 256, 256, 86),  # the largest
    ("fp32", 7, 80, 80, 89),
]
POINTERS = {
    "places": "*i32",
    "arrivals": "*i32",
    "start": "*i64",
    "padding": "*i64",
    "sinks": "*i64",
}


def compiled(dtype: str, group: int, key_size: int, value_size: int, capability: int) -> Any:
    """As a launch would, with memory and strides that are multiples of 16."""
    constants = dict(tiles(group, key_size, value_size, {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]))
    options = {"num_warps": constants.pop("num_warps")}
    strides = {name for name in _decode.arg_names if name.endswith(("_row", "_head", "_own"))}
    numbers = strides | set(_CHANGING)
    signature: dict[str, Any] = {
        name: "constexpr" if name in constants else "i32" if name in numbers else f"*{dtype}"
        for name in _decode.arg_names
    }
    signature |= {**POINTERS, "partials": "*fp32", "scale": "fp32"}
    attributes = {}
    for i, (name, kind) in enumerate(signature.items()):
        if kind.startswith("*") or name in strides:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(_decode, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack(cubin: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", usage)
    return int(found)


def in_order(ptx: str) -> bool:
    """Whether all threads have stored when one counts the split, and none reads before it has
    counted.
    """
    accesses = re.findall(r"(ld\.global|st\.global|bar\.sync|atom\.\S+)", ptx)
    (place,) = [i for i, access in enumerate(accesses) if access.startswith("atom")]
    return accesses[place - 1 : place + 2] == [
        "bar.sync",
        "atom.global.gpu.acq_rel.add.u32",
        "bar.sync",
    ]


def wide(ptx: str) -> bool:
    """Whether asynchronous loads are 16 bytes wide."""
    return set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*, (0x\w+),", ptx)) == {"0x10"}


def ahead(ptx: str) -> int:
    """How many groups of asynchronous loads may be under way while a block of entries is computed."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)))


def main() -> None:
    for variant in VARIANTS:
        found = compiled(*variant)
        ptx = found.asm["ptx"]
        shared, name = round(found.metadata.shared / 1024), "-".join(map(str, variant))
        print(
            "compiled",
            name,
            shared,
            stack(found.asm["cubin"]),
            wide(ptx),
            in_order(ptx),
            ahead(ptx),
        )


if __name__ == "__main__":
    main()
