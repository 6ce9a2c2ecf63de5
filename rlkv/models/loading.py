"""Load a built-in model, a folder, a GGUF file or a hub id, with errors that say what to do."""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlkv.models.builtin import BUILT_IN, built_in_folder, connection_error
from rlkv.models.gguf import find_gguf, gguf_folder
from rlkv.utils.devices import cpu_has_any, leave_cudnn_out
from rlkv.utils.files import read_json
from rlkv.utils.runtime import digest, digest_of, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# mallopt(3) of glibc
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
SAMPLED = 1024  # elements of each parameter that its digest sees
SAMPLED_BLOCKS = 64  # of each file
BLOCK = 4096  # bytes
# what else a text depends on
CONFIGS = ("config.json", "generation_config.json", "adapter_config.json")
BASE = "base_model_name_or_path"  # of an adapter
BESIDE_WEIGHTS = (
    "*chat_template*",
    "additional_chat_templates/*",
    "*token*.json",
    "tekken.json",
    "*.model",
    "vocab.*",
    "merges.txt",
)


# --- device and dtype


def resolve_device(device: str = "auto") -> torch.device:
    """Return the device; ``auto`` is the GPU if there is one, else the CPU.

    What runs on a GPU runs without cuDNN's attention from then on (:mod:`rlkv.utils.devices`).

    Raises:
        ValueError: if the device is unknown or absent.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {device!r} was asked for, but torch sees no CUDA GPU: use --device cpu"
            )
        if (resolved.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs"
            )
    elif resolved.type != "cpu":
        try:
            torch.zeros(1, device=resolved).item()
        except (RuntimeError, NotImplementedError, AssertionError):
            raise ValueError(
                f"torch cannot compute on device {device!r} here: use auto, cpu, cuda or cuda:N"
            ) from None
    leave_cudnn_out(resolved)
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the dtype; ``auto`` is bfloat16 on a GPU and float32 on a CPU.

    ``fast`` is also bfloat16 on a CPU that multiplies it.
    """
    if dtype in ("auto", "fast"):
        # without instructions for it a CPU's products in bfloat16 take 7 times those in float32
        is_bfloat16 = device.type == "cuda" or (
            dtype == "fast" and cpu_has_any("avx512_bf16", "amx_bf16", "bf16")
        )
        return torch.bfloat16 if is_bfloat16 else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: use auto, fast, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def dtype_name(dtype: str, device: torch.device) -> str:
    """Return what :func:`resolve_dtype` finds as files of settings have it: ``bfloat16``."""
    return str(resolve_dtype(dtype, device)).removeprefix("torch.")


# --- loading


def model_source(model: str) -> str:
    """Return what ``from_pretrained`` takes: the folder of a built-in model or of a GGUF file.

    Everything else is the name itself.
    """
    if model in BUILT_IN:
        return str(built_in_folder(model))
    file = find_gguf(model)
    if file is not None:
        return str(gguf_folder(file))
    return os.path.expanduser(model) if is_path(model) else model


def load_config(model: str) -> PretrainedConfig:
    """Load the config of ``model``; otherwise as :func:`load_tokenizer`."""
    from transformers import AutoConfig

    source = model_source(model)
    hub_error = _hub_error(model)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            source, local_files_only=hub_error is not None
        )
    except _loading_errors() as error:
        raise ValueError(_cannot_load(model, error, hub_error)) from error
    return config


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``model``, padding on the left.

    It comes from the local cache, with a warning, if the hub does not answer.

    Raises:
        ValueError: if it is neither built in, nor a local folder, nor on the hub or in its local
            cache.
    """
    return _load_tokenizer(model, _hub_error(model))


def load_model(
    model: str, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a built-in name (``tiny``, ``smol``, ``smollm2``), a folder, GGUF file or hub id.

    No code from a repository is run (``trust_remote_code`` is never set).  On a machine without GPU
    the process keeps the memory of freed tensors from then on.

    Returns:
        The model in eval mode and its tokenizer.

    Raises:
        ValueError: as :func:`load_tokenizer`, and for an unknown device or dtype.
    """
    from transformers import AutoModelForCausalLM

    target = resolve_device(device)
    if not torch.cuda.is_available():
        keep_freed_memory()
    resolved_dtype = resolve_dtype(dtype, target)
    hub_error = _hub_error(model)
    local = {"local_files_only": hub_error is not None}
    source = model_source(model)
    tokenizer = _load_tokenizer(model, hub_error)
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=resolved_dtype, adapter_kwargs=local, output_loading_info=True, **local
        )
        loaded, info = found
        # of a sharded base only the first process of a machine reads the weights
        missing = info["missing_keys"] if os.environ.get("LOCAL_RANK", "0") == "0" else ()
        if missing:  # transformers would draw them at random
            raise ValueError(f"{len(missing)} of its tensors are missing, such as {min(missing)}")
    except _loading_errors() as error:
        raise ValueError(_cannot_load(model, error, hub_error)) from error
    if source != model:
        loaded.config._name_or_path = model  # not its folder: gates files carry this name
    elif os.sep in model and is_path(model) and not model.startswith((".", os.sep)):
        # elsewhere "models/mine" would be an id of the hub
        loaded.config._name_or_path = os.path.join(".", model)
    try:
        loaded = loaded.to(target)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"model {model!r} in {resolved_dtype} does not fit on {target} ({first_line(error)}): "
            "free its memory, take a smaller model or another --device"
        ) from error
    return loaded.eval(), tokenizer


def load_missing(
    name: str,
    dtype: str,
    device: str,
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return ``model`` and ``tokenizer``; what is None is loaded, as :func:`load_model` does."""
    if model is None:
        model, own = load_model(name, dtype, device)
        return model, own if tokenizer is None else tokenizer
    return model, load_tokenizer(name) if tokenizer is None else tokenizer


def _load_tokenizer(model: str, hub_error: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer
    from transformers.utils import find_adapter_config_file

    source = model_source(model)
    is_local = hub_error is not None
    try:
        # transformers would load its base below it, and gates that are switched off take it along
        if find_adapter_config_file(source, local_files_only=is_local) is not None:
            raise ValueError(
                "it holds an adapter of PEFT (adapter_config.json): merge that into its base "
                "model (merge_and_unload), save it with its tokenizer, and give the new folder"
            )
        # the tokenizers of mistral-common have no chat template and cannot write a prompt as text
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=is_local, mistral_format=False
        )
    except _loading_errors() as error:
        raise ValueError(_cannot_load(model, error, hub_error)) from error
    if hub_error is not None:
        warnings.warn(
            f"the hub does not answer ({hub_error}): {model} comes from its local cache",
            stacklevel=3,
        )
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_path(model: str) -> bool:
    """Return whether ``model`` means a local path rather than a hub id."""
    return Path(model).exists() or (
        os.sep in model.rstrip(os.sep) and model.startswith((".", os.sep, "~"))
    )


def _hub_error(model: str) -> str | None:
    """Why the hub cannot be asked for ``model``; None if it can, or need not."""
    return None if model in BUILT_IN or is_path(model) else connection_error(model, "config.json")


def _loading_errors() -> tuple[type[Exception], ...]:
    """Return what transformers raises for files that it cannot load."""
    from huggingface_hub.errors import HTTPError, StrictDataclassError
    from safetensors import SafetensorError

    # ImportError: the package of a quantised checkpoint; KeyError: a rope_scaling without its
    # factor; StrictDataclassError: a value of config.json of another type; HTTPError: of the HTTP
    # library, when a download breaks off
    known = (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)
    return (*known, HTTPError, SafetensorError, StrictDataclassError)


def _cannot_load(model: str, error: Exception, hub_error: str | None) -> str:
    from huggingface_hub.errors import HTTPError

    reason = first_line(error)
    if isinstance(error, KeyError):
        reason = f"it lacks {reason}"
    if reason.endswith(":"):  # what is wrong stands on the lines below
        reason = " ".join(str(error).split())
    if is_path(model):
        return f"cannot load a model from {model!r}: {reason}"
    # others are not of a download: it is there, and cannot be read
    if not isinstance(error, (OSError, HTTPError)):
        offline = "" if hub_error is None else f" (the hub does not answer: {hub_error})"
        return f"cannot load model {model!r}: {reason}{offline}"
    if hub_error is not None:
        reason = f"{hub_error}; its local cache does not hold it either"
    return (
        f"cannot load model {model!r}: it is not a local folder and could not be downloaded "
        f"({reason}); pass a folder that holds the model, or a built-in one "
        f"({', '.join(BUILT_IN)})"
    )


# --- what a loaded model is asked


def try_forward(model: Any, **arguments: Any) -> None:
    """Call ``model`` with two tokens and ``arguments``, in eval mode and without gradients.

    Nothing is called while the weights are not there yet (on the device ``meta``, or sharded over
    processes).
    """
    if any(parameter.is_meta or not parameter.numel() for parameter in model.parameters()):
        return
    modes = {module: module.training for module in model.modules()}
    model.eval()
    tokens = torch.zeros(1, 2, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            model(input_ids=tokens, **arguments)
    finally:
        for module, training in modes.items():
            module.training = training


@cache
def cache_argument() -> str:
    """Return how forward calls name their cache: ``cache`` from transformers 5.24 on."""
    from transformers import LlamaModel

    names = inspect.signature(LlamaModel.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def refuse_latent_attention(model: Any) -> None:
    """Raise ValueError if heads expand their keys and values from one latent state."""
    for module in model.modules():
        rank = getattr(module, "kv_lora_rank", None)
        if rank is not None and hasattr(module, "layer_idx"):
            raise ValueError(
                f"{model.config.model_type} has multi-head latent attention: its heads share one "
                f"latent state of {rank} numbers a token and have no KV heads of their own to gate "
                "or compress; use a model with multi-head or grouped-query attention, such as "
                "Llama or Qwen3"
            )


def attention_of(model: Any) -> dict[str, str | None]:
    """Return the attention implementations of a model and its parts, by their names.

    ``model.set_attn_implementation`` takes them back.
    """
    config = model.config
    found = {"": config._attn_implementation}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            # None where no module belongs to a part: it is refused when it is set
            found[name] = part._attn_implementation or found[""]
    return found


def refuse_own_cache(model: Any, instead: str) -> None:
    """Raise ValueError if a model keeps its past in a cache class of its own."""
    if not model._supports_default_dynamic_cache():
        raise ValueError(
            f"{model.config.model_type} keeps its past in a cache class of its own: {instead}"
        )


# --- what texts of a model depend on


def files_digest(model: str) -> str | None:
    """Return a digest of a model's folder: weights, configs, tokenizer and chat template.

    That of a folder with a PEFT adapter is also of its base (on the hub: of the name).  Configs
    count by their values, but for the version of transformers that wrote them.  Of the other files
    names, sizes and ``SAMPLED_BLOCKS`` evenly spaced pieces count, which are all of a small one:
    another training, merge or quantization is seen, a change of single elements may not be.

    Returns:
        None where there are no weights, as of an id on the hub.
    """
    folder = Path(model_source(model)).resolve()
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    files += sorted(folder.glob("adapter_model*"))
    if not files:
        return None
    for pattern in BESIDE_WEIGHTS:
        files += sorted(folder.glob(pattern))
    content = bytearray()
    for name in CONFIGS:
        if not (folder / name).is_file():
            continue
        config = read_json(folder / name)
        if not isinstance(config, dict):
            raise ValueError(f"{folder / name} is not the config of a model: it holds no mapping")
        base = config.pop(BASE, None)
        if base and Path(model_source(str(base))).resolve() != folder:
            content += str(files_digest(str(base)) or base).encode()
        config.pop("transformers_version", None)
        content += f"{name} {digest_of(config)}".encode()
    for path in files:
        if not path.is_file():
            continue
        size = path.stat().st_size
        content += f"{path.name} {size}".encode()
        last = max(0, size - BLOCK)
        with path.open("rb") as file:
            for number in range(SAMPLED_BLOCKS):
                file.seek(last * number // (SAMPLED_BLOCKS - 1))
                content += file.read(BLOCK)
    return digest(bytes(content))


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """Return config, kind of device, number type, and a hash of the weights.

    The hash is over up to 1,024 evenly spaced elements of each parameter: another training, merge
    or quantization is seen, a change of single elements may not be.
    """
    config = model.config.to_dict()
    for name in list(config):
        if name.startswith("_") or name == "transformers_version":
            del config[name]
    weights = bytearray()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        count = min(SAMPLED, flat.numel())
        places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].cpu()
        weights += f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
        weights += sample.contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "config": digest_of(config),
        "weights": digest(bytes(weights)),
        "dtype": str(model.dtype),
        "device": model.device.type,
    }


# --- memory of the CPU


def keep_freed_memory() -> bool:
    """Have freed memory kept for the next tensors; False where the C library is not glibc.

    By default glibc gives large blocks back to the system, and each new one is mapped and zeroed
    page by page. Reading 200 prompts with the built-in language model takes 53 to 58 CPU s that way
    and 25 to 37 this way; a short training run of the tiny model 15.8 and 13.1.
    """
    mallopt = _of_glibc("mallopt")
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def return_freed_memory() -> bool:
    """Give freed memory back to the system; False if there was none.

    With :func:`keep_freed_memory` tensors of other sizes in every step leave gaps: a training of
    the built-in language model, which holds 4 GB at its first steps, grew to 9 GB in eight.
    """
    trim = _of_glibc("malloc_trim")
    return bool(trim and trim(0))


def _of_glibc(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
