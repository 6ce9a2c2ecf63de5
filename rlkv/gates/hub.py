"""Gates on the Hugging Face hub: from an address to a local folder."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "hf://"
_ADDRESS = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["gates.pt", "gates.safetensors", "adapter_config.json", "adapter_model.safetensors", "config.json", "*.tsv"]
_FILE_SUFFIXES = (".pt", ".safetensors", ".tsv")


def is_hub_address(path: str | Path) -> bool:
    """Whether ``path`` means the hub: ``hf://...``, or ``owner/name[@revision]`` that is not a local path."""
    if isinstance(path, Path):
        return False
    if path.startswith(PREFIX):
        return True
    return bool(_ADDRESS.fullmatch(path)) and not path.endswith(_FILE_SUFFIXES) and not Path(path).exists()


def fetch(address: str) -> Path:
    """Download the gates files of a hub repository (or find them in the local hub cache) and give their folder.

    Raises:
        ValueError: if the address is malformed, or the hub (and its cache) does not give the repository.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionResolutionError

    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address}: not a hub address, expected hf://owner/name or hf://owner/name@revision")
    try:
        folder = snapshot_download(match["repo"], revision=match["revision"], allow_patterns=_FILES)
    except (OSError, HFValidationError, HfHubHTTPError, RevisionResolutionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "" if address.startswith(PREFIX) else "no such local file or folder, and "
        raise ValueError(
            f"{address}: {where}the hub did not give it ({reason}), expected a local gates file or folder, or a hub "
            "repository that holds gates: check the name and the network"
        ) from error
    return Path(folder)
