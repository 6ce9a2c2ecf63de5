"""Gates on the Hugging Face hub: a PEFT adapter with a model card that is filled in."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlkv.gates.allocation import SPARSITIES, HeadAllocation
from rlkv.gates.formats import hub_address, write_gates
from rlkv.gates.head_gates import HeadGates
from rlkv.gates.plots import plot_gates
from rlkv.models.loading import is_path
from rlkv.utils.atomic import write_text
from rlkv.utils.jsonl import read_json

CARD, HEAT_MAP = "README.md", "heat_map.png"
HELD_OUT = "held_out_figures"  # of the training summary: figures on problems that were not trained on
_EVALUATED = {"task", "method", "accuracy", "ci_low", "ci_high", "n", "kv_bytes", "kv_bytes_full"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def model_card(gates: HeadGates, repo: str, evaluation: Path | None = None) -> str:
    """The card of ``gates`` in ``repo`` (``owner/name``) as Markdown with metadata.

    Args:
        evaluation: ``results.json`` of rlkv-eval with these gates.

    Raises:
        ValueError: if ``evaluation`` is something else.
    """
    from huggingface_hub import ModelCardData

    training, model = dict(gates.training), gates.model.model_id if gates.model else ""
    held_out = training.pop(HELD_OUT, {})
    metadata = ModelCardData(
        base_model=model if _HUB_ID.fullmatch(model) else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["rlkv", "kv-cache", "head-gates"],
    )
    environment = Environment(
        loader=PackageLoader("rlkv.gates", ""), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("card.md.j2").render(
        metadata=metadata.to_yaml(),
        model=model or "a model that the gates do not name",
        method=training.get("method", "unknown"),
        repo=repo,
        gates=gates,
        layers=gates.num_layers,
        heads=gates.num_kv_heads,
        choices={sparsity: HeadAllocation.from_gates(gates, sparsity) for sparsity in SPARSITIES},
        evaluated=[] if evaluation is None else _evaluated(evaluation),
        held_out=held_out,
        settings={name: _cell(value) for name, value in training.items()},
    )


def push_gates(gates: HeadGates, address: str, evaluation: Path | None = None, private: bool = False) -> str:
    """Commit ``gates`` with card and heat map to ``hf://owner/name``, which is made if it is absent; the commit's URL.

    Earlier commits of the repository stay.

    Raises:
        ValueError: for a wrong address or ``evaluation``, or if the hub refuses.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    repo, revision = hub_address(address)
    if revision is not None:
        raise ValueError(f"{address}: gates are pushed to the main branch: leave @{revision} out")
    gates = without_path(gates)
    card, api = model_card(gates, repo, evaluation), HfApi()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_gates(folder, gates.to_payload())
        plot_gates(gates, folder / HEAT_MAP)
        write_text(folder / CARD, card)
        try:
            api.create_repo(repo, private=private or None, exist_ok=True)
            return api.upload_folder(repo_id=repo, folder_path=folder, commit_message="KV head gates").commit_url
        except (OSError, HFValidationError, HTTPError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{address}: the gates could not be pushed ({reason}): log in with `hf auth login` as one who may "
                "write to this repository, and check the network"
            ) from error


def without_path(gates: HeadGates) -> HeadGates:
    """With the last part of the model's name where that is a folder's, which is nobody else's business."""
    model = gates.model
    if model is None or not is_path(model.model_id):
        return gates
    return replace(gates, model=replace(model, model_id=Path(model.model_id).name))


def _cell(value: Any) -> str:
    """On one line of a Markdown table."""
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")


def _evaluated(path: Path) -> list[dict[str, Any]]:
    try:
        rows = read_json(path)["results"]
        if all(row.keys() >= _EVALUATED for row in rows):
            return rows
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path}: not the results.json that rlkv-eval writes: give that file, or push without it")
