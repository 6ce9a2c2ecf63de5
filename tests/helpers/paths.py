"""Places: the repository, and the data beside it that only some machines have."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED_GATES = ROOT / "tests" / "data" / "gates"
SHARED = ROOT.parent / "shared"
