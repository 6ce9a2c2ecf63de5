"""The Hugging Face hub: whether it can be reached, in seconds (its client retries for a minute), and its data sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlkv.utils.extras import require

PROBE_SECONDS = 5.0  # per phase of the request; the variable HF_HUB_ETAG_TIMEOUT of the hub's client has precedence
SERVER_ERRORS = 500  # HTTP codes from here on are those of a hub or proxy that does not work


def connection_error(repo: str, file: str, repo_type: str = "model") -> str | None:
    """Why the hub cannot be asked for ``file`` of ``repo``, in one line; None if it answers, even with a refusal.

    In offline mode (``HF_HUB_OFFLINE``), where the hub's client uses its local cache, no request is sent.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if is_offline_mode():
        return None
    timeout = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else PROBE_SECONDS
    try:
        get_hf_file_metadata(hf_hub_url(repo, file, repo_type=repo_type), timeout=timeout)
    except HfHubHTTPError as error:  # no such repository, no access: the download itself says it better
        if error.response.status_code < SERVER_ERRORS:
            return None
        return f"{constants.ENDPOINT} answers with HTTP status {error.response.status_code}"
    except Exception as error:  # whatever the installed HTTP client raises
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def dataset_rows(
    name: str, extra: str, what: str, advice: str, config: str | None = None, split: str = "train"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(where, row)`` of a data set on the hub; ``where`` names data set and row.

    Raises:
        ValueError: if the package of ``extra`` is absent, or ``what`` cannot be loaded; it ends with ``advice``.
    """
    datasets = require("datasets", extra)
    rows, error = [], connection_error(name, "README.md", "dataset")
    if error is None:
        try:
            rows = datasets.load_dataset(name, name=config, split=split)
        except (OSError, ValueError) as failed:
            error = (str(failed).splitlines() or [type(failed).__name__])[0]
    if error is not None:
        raise ValueError(f"cannot load {what} from the hub ({error}): {advice}")
    yield from ((f"{name} row {number}", row) for number, row in enumerate(rows, start=1))
