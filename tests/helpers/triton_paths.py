"""The CUDA paths of rlkv's attention in vLLM, through the Triton interpreter, against torch.

    python -m tests.helpers.triton_paths

Prints the largest error of every case after the name of its path.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from tests.helpers import interpreted  # noqa: F401
from tests.helpers import evicting_triton, gaps_triton, local_triton, mixed_triton

if __name__ == "__main__":
    for path in (gaps_triton, local_triton, mixed_triton, evicting_triton):
        path.main()
