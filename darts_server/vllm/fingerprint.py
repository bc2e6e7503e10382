"""A fingerprint of the model that an engine starts with: what was generated under another one is of other weights."""

import hashlib
import json
from pathlib import Path

from vllm.config import VllmConfig

FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json")
"""Of a model in a folder: its weights, and what they are put together by."""


def fingerprint_of(config: VllmConfig) -> str:
    """Return a hash of a model's name, version and numbers, and of size and time of its files if they are in a folder.

    To be called before the weights are loaded: files that are replaced later give another one at the next start.
    """
    model = config.model_config
    described = {
        "model": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "config": [model.hf_config_path, repr(model.hf_overrides)],  # such as another rope scaling
        "load_format": str(config.load_config.load_format),
        "files": _files(Path(model.model)),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file that belongs to a model; none of a name on a hub."""
    paths = [model] if model.is_file() else [path for pattern in FILES for path in model.glob(pattern)]
    stats = [(path, path.stat()) for path in sorted(paths) if path.is_file()]
    return [(str(path.relative_to(model)), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
