"""The CUDA paths of rlkv's attention in vLLM, through the Triton interpreter, against torch.

    python -m tests.helpers.triton_paths

Prints the largest error of every case after the name of its path.
"""

# ruff: noqa: I001  (the switch comes first)
from __future__ import annotations

from tests.helpers import interpreted  # noqa: F401
from tests.helpers import evicting_triton, local_triton, mixed_triton
from tests.helpers.gaps import wrong_entries

if __name__ == "__main__":
    for sizes in ((5, 0, 1), (16, 16, 64), (8, 7, 3), (4, 600, 600), (16, 16, 5999)):
        for most in (1, 150):
            print("gaps", wrong_entries(*sizes, most))
    for path in (local_triton, mixed_triton, evicting_triton):
        path.main()
