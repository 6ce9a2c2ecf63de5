"""Settings of the filter job: the paper's by default, from YAML, and from the command line on top."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from rlkv.data.curriculum import PAPER_BUCKETS, TINY_BUCKETS, Bucket, check_buckets, parse_buckets
from rlkv.data.deepscaler import HUB_DATASET, TINY
from rlkv.data.shards import parse_shard
from rlkv.inference.engines import check_engine

# arXiv 2510.08525: max length 8192, of it 7168 for the completion
PAPER = {"input": HUB_DATASET, "max_length": 8192, "max_new_tokens": 7168, "buckets": PAPER_BUCKETS}
BUILT_IN = {"input": TINY, "max_length": 1024, "max_new_tokens": 440, "buckets": TINY_BUCKETS}


@dataclass(frozen=True)
class FilterConfig:
    """One filter job.  What is None takes the paper's value, for the model ``tiny`` that of the built-in model.

    Attributes:
        input: ``tiny``, a .jsonl or .parquet file, or a data set of the hub.
        outputs: a file of recorded outputs to filter instead of decoding; ``outputs_field`` is their field.
        max_length: tokens of prompt and completion together.
        shard: ``i/n``: this process does every n-th problem, from the i-th (counted from 0).
    """

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    input: str | None = None
    num_problems: int = 400
    outputs: str | None = None
    outputs_field: str = "output"
    output_dir: str = "outputs/curriculum"
    buckets: tuple[Bucket, ...] | None = None
    fill_short_buckets: bool = False
    engine: str = "hf"
    template: str = "rlkv"
    batch_size: int = 16
    max_length: int | None = None
    max_new_tokens: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    shard: str = "0/1"
    limit: int | None = None

    @classmethod
    def resolve(cls, file: str | None, overrides: dict[str, Any]) -> FilterConfig:
        """Defaults, then the YAML ``file``, then ``overrides`` that are not None; checked.

        Raises:
            ValueError: for an unknown key, a value of the wrong type, or an impossible setting.
        """
        values = _read_yaml(file) if file else {}
        values.update({key: value for key, value in overrides.items() if value is not None})
        if values.get("outputs") is not None:
            values.setdefault("input", values["outputs"])  # recorded outputs that carry their answers
        preset = BUILT_IN if values.get("model", cls.model) == TINY else PAPER
        values = {**preset, **values}
        if not isinstance(values["buckets"], tuple):
            given = values["buckets"]
            values["buckets"] = parse_buckets(given if isinstance(given, str) else ",".join(map(str, given)))
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        for name in ("num_problems", "batch_size", "max_length", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        assert self.buckets is not None
        check_buckets(self.buckets)
        check_engine(self.engine)
        parse_shard(self.shard)

    @property
    def num_shards(self) -> int:
        return parse_shard(self.shard)[1]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, buckets as text."""
        return {**asdict(self), "buckets": ",".join(map(str, self.buckets or ()))}


# by the first word of a field's annotation; buckets are text or a list of texts
_YAML_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "tuple[Bucket,": (str, list)}


def _read_yaml(file: str) -> dict[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"config file {file} does not exist")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}: expected keys with values")
    known = [field.name for field in fields(FilterConfig)]
    unknown = sorted(str(key) for key in values if key not in known)
    if unknown:
        raise ValueError(f"{file} has unknown keys {', '.join(unknown)}: known are {', '.join(known)}")
    given = {key: value for key, value in values.items() if value is not None}
    for field in fields(FilterConfig):
        expected = _YAML_TYPES[field.type.split(" ")[0]]
        # type, not isinstance: true is no number
        if field.name in given and type(given[field.name]) not in expected:
            raise ValueError(f"{file}: {field.name} must be {expected[0].__name__}, got {given[field.name]!r}")
    return given
