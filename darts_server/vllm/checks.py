"""Start-up checks of vLLM, its devices and its model. Nothing is loaded."""

import os
from argparse import Namespace
from pathlib import Path

import torch
from vllm.platforms import current_platform

from darts_server.vllm.compat import doubt, vllm_version
from darts_server.vllm.platform import NO_COMPILER, can_compile

CONFIG_FILES = ("config.json", "params.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
ALONE = "prefill_context_parallel_size"


def version() -> tuple[str, str | None]:
    """vLLM's, and what is doubtful about it."""
    installed = vllm_version()
    return installed or "none", doubt(installed)


def devices() -> tuple[str, str | None]:
    """What models run on, and what is wrong with it."""
    built = f"torch {torch.__version__}"
    if current_platform.is_cpu():
        return f"{built}, CPU{'' if can_compile() else f'; {NO_COMPILER}'}", None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return built, "vLLM finds no device: are the driver and, in a container, --gpus there?"
    names = [
        f"{torch.cuda.get_device_name(i)} with {torch.cuda.get_device_properties(i).total_memory >> 30} GiB"
        for i in range(count)
    ]
    return f"{built}, {', '.join(names)}", None


def probe_fault(args: Namespace) -> str | None:
    """Why hidden states could not be told, as far as flags show it."""
    if getattr(args, "runner", None) == "pooling":
        return "a pooling model generates nothing"
    if (getattr(args, ALONE, None) or 1) > 1:
        return "prefill context parallelism spreads a prompt's states over workers"
    return None


def model(args: Namespace) -> tuple[str, str | None]:
    """What the model is, and why it cannot be had. Asks its hub, unless it is here."""
    name = str(args.model)
    if "://" in name:
        return f"{name}: not looked at", None
    if Path(name).exists() or name.startswith(("/", ".", "~")):
        return _folder(Path(name))
    return _of_hub(name, args.revision)


def model_bytes(args: Namespace) -> int | None:
    """Of the weights; ``None`` unless they are in a folder."""
    folder = Path(str(args.model))
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)) or None


def _folder(path: Path) -> tuple[str, str | None]:
    if path.is_file():
        return str(path), None
    if not path.is_dir():
        return str(path), "there is no such folder; correct the path"
    if not any((path / file).is_file() for file in CONFIG_FILES):
        return str(path), f"the folder has no {CONFIG_FILES[0]}; is it the model's, and all of it?"
    return str(path), None


def _of_hub(name: str, revision: str | None) -> tuple[str, str | None]:
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return f"{name}: not looked at", None
    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, CONFIG_FILES[0], revision=revision), str):
        return f"{name}, in the cache", None
    if constants.HF_HUB_OFFLINE:
        return name, "it is not in the cache, and HF_HUB_OFFLINE is set; fetch it first, or give a folder"
    try:
        found = file_exists(name, CONFIG_FILES[0], revision=revision)
    except Exception as error:  # whatever a network does
        return name, f"it is not in the cache, and cannot be fetched: {type(error).__name__}: {error}"
    if not found:
        return name, f"it has no {CONFIG_FILES[0]} on the hub; correct the name, or set HF_TOKEN if it is not public"
    return f"{name}, to be fetched", None
