"""GGUF files as models: each is converted once to an ordinary model folder below ``$RLKV_CACHE``.

transformers reads the architectures and the kinds of quantisation that it knows; the weights are
dequantised, and kept in bfloat16.  The folder is named after the file's SHA-256, so that a moved or
copied file is not converted again and a changed one is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rlkv.models.builtin import forget_blocks, made_once
from rlkv.utils.files import at_home
from rlkv.utils.runtime import first_line, require

SUFFIX = ".gguf"
SPLIT = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$", re.IGNORECASE)
FORMAT = 1  # of the folders: raised where files must be converted again
CONTENT = "rlkv"  # of the turn that shows how the chat template ends one


def find_gguf(model: str) -> Path | None:
    """Return the file, if ``model`` is one, or a folder with one and without ``config.json``.

    Raises:
        ValueError: if the file is absent, or a folder has several, of which none can be meant.
    """
    path = at_home(model)
    if path.suffix.lower() == SUFFIX and not path.is_dir():
        if not path.exists():
            raise ValueError(f"{model!r}: there is no such file")
        _refuse_parts(model, [path])
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    _refuse_parts(model, files)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{model!r} holds several GGUF files ({names}): give the path of one")
    return files[0] if files else None


def _refuse_parts(model: str, files: Sequence[Path]) -> None:
    for file in files:
        if SPLIT.search(file.name):
            raise ValueError(
                f"{model!r}: {file.name} is a part of a split GGUF file, which transformers does "
                "not read: merge the parts with llama-gguf-split --merge, and give the result"
            )


def gguf_folder(file: Path) -> Path:
    """Return the model folder of a GGUF file, made on first use.

    Raises:
        ValueError: if the package ``gguf`` is absent or transformers cannot read the file.
    """
    about = file.stat()
    checksum = _checksum(file, about.st_size, about.st_mtime_ns)
    name = f"gguf-{FORMAT}-{checksum[:16]}"
    return made_once(name, f"the model {file.name}", lambda folder: _convert(file, folder))


@cache
def _checksum(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, folder: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    require("gguf", "gguf")
    require("accelerate", "gguf")  # transformers loads no GGUF file without it
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    options: dict[str, Any] = {"dtype": "bfloat16", "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # since 5.17, which may keep the file's blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(**source, **options)
        model = loaded[0]
        missing = loaded[1]["missing_keys"]  # transformers would draw them at random
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing; is it one part of several?")
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # a reader of its own, whose errors have no class in common
        reason = first_line(error)
        raise ValueError(
            f"transformers cannot read the GGUF file {str(file)!r} ({reason}): give the model's "
            "original folder or hub id"
        ) from error
    forget_blocks(model)
    ends = end_tokens(tokenizer, model.config)
    if not ends:
        raise ValueError(
            f"the GGUF file {str(file)!r} names no token that ends a text: give the model's "
            "original folder or hub id"
        )
    tokenizer.eos_token_id = ends[0]
    if tokenizer.pad_token_id not in ends:
        tokenizer.pad_token_id = ends[0]
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_tokens(tokenizer: Any, config: Any) -> list[int]:
    """Return the tokens that end a text: the one that ends a turn, the file's, and padding.

    A GGUF file names one of them; chat models may end with any.
    """
    found = _ends_of_turns(tokenizer)
    eos = config.eos_token_id
    found += eos if isinstance(eos, list) else [eos]
    found += [tokenizer.eos_token_id, tokenizer.pad_token_id]
    # transformers' tokenizers add what a file does not have, behind the model's vocabulary
    known = [token for token in found if token is not None and token < config.vocab_size]
    return list(dict.fromkeys(known))


def _ends_of_turns(tokenizer: Any) -> list[int]:
    """Return the special token behind an assistant's turn; none if the template shows no such."""
    turns = [
        {"role": "user", "content": CONTENT},
        {"role": "assistant", "content": CONTENT},
    ]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # there is no template, or one that refuses these turns in its own way
        return []
    _, content, tail = text.rpartition(CONTENT)
    after = tokenizer(tail, add_special_tokens=False)["input_ids"] if content else []
    return [token for token in after[:1] if token in tokenizer.added_tokens_decoder]
