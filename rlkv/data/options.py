"""Options of every command that decodes problems, each declared once."""

from __future__ import annotations

from dataclasses import dataclass

from rlkv.inference.engines import check_engine
from rlkv.inference.options import ModelOptions, check_positive


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(ModelOptions):
    """Which problems, and how they are decoded."""

    input: str | None = None
    """.jsonl or .parquet file, hub data set, or tiny (new problems); default: tiny, or DeepScaleR for other models"""
    num_problems: int = 400
    """how many problems --input tiny draws"""
    limit: int | None = None
    """only the first so many problems"""
    seed: int = 0
    """seed of the sampling, and of --input tiny"""
    template: str = "rlkv"
    """prompt template: rlkv, boxed or plain"""
    engine: str = "hf"
    """hf or vllm"""
    batch_size: int = 16
    """problems decoded together"""
    max_new_tokens: int | None = None
    """tokens of a completion; default: 440 for the model tiny, else 7168"""

    def check(self) -> None:
        """Raise ValueError for impossible settings."""
        check_positive(self, "num_problems", "batch_size", "max_new_tokens", "limit")
        check_engine(self.engine)
