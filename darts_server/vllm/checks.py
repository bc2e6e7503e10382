"""Start-up checks of vLLM's devices and model. A check returns a description, and an error message or None."""

import os
from argparse import Namespace
from pathlib import Path

import torch
from vllm.platforms import current_platform

from darts_server.vllm.flags import NO_COMPILER, can_compile

CONFIG_FILES = ("config.json", "params.json")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def check_devices() -> tuple[str, str | None]:
    built = f"torch {torch.__version__}"
    if current_platform.is_cpu():
        description = f"{built}, CPU"
        if not can_compile():
            description += f"; {NO_COMPILER}"
        return description, None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return built, "vLLM finds no device: check the driver and, in a container, --gpus"
    names = [
        f"{torch.cuda.get_device_name(i)} with {torch.cuda.get_device_properties(i).total_memory >> 30} GiB"
        for i in range(count)
    ]
    return f"{built}, {', '.join(names)}", None


def probe_fault(args: Namespace) -> str | None:
    """Return why the engine cannot send hidden states, or None if flags show no reason."""
    if getattr(args, "runner", None) == "pooling":
        return "a pooling model generates nothing"
    if (getattr(args, "prefill_context_parallel_size", None) or 1) > 1:
        return "prefill context parallelism spreads a prompt's states over workers"
    return None


def check_model(args: Namespace) -> tuple[str, str | None]:
    """Return a description of the model, which is not loaded, and what is wrong with it or None."""
    name = str(args.model)
    path = Path(name)
    # vLLM streams models from object stores.
    if "://" in name:
        return f"{name}: not checked", None
    if path.exists() or name.startswith(("/", ".", "~")):
        if path.is_dir() and not any((path / file).is_file() for file in CONFIG_FILES):
            return name, f"the folder has no {CONFIG_FILES[0]}; check that it is a model's folder, and complete"
        if not (path.is_dir() or path.is_file()):
            return name, "the folder does not exist; correct the path"
        return name, None
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return f"{name}: not checked", None

    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, CONFIG_FILES[0], revision=args.revision), str):
        return f"{name}, cached", None
    if constants.HF_HUB_OFFLINE:
        return name, "it is not cached, and HF_HUB_OFFLINE is set; download it first, or pass a folder"
    try:
        found = file_exists(name, CONFIG_FILES[0], revision=args.revision)
    # Any error of the network or the hub is a result of the check.
    except Exception as error:
        return name, f"it is not cached, and cannot be downloaded: {type(error).__name__}: {error}"
    if not found:
        return name, f"it has no {CONFIG_FILES[0]} on the hub; correct the name, or set HF_TOKEN if it is not public"
    return f"{name}, to be downloaded", None


def model_bytes(args: Namespace) -> int | None:
    """Return the size of the model's weights, or None unless the model is a folder."""
    folder = Path(str(args.model))
    if not folder.is_dir():
        return None
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)) or None
