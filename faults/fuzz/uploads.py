"""Binary bodies: weights and saved states, valid ones and others; and a folder for --weights-root."""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from safetensors.torch import save

from darts_server.store.archive import pack, unpack
from darts_server.store.document import Row
from faults.fuzz.request import Upload
from faults.fuzz.values import mutated
from tests.integration.weights import EMBEDDING, ORIGINAL

MAX_STATE_BYTES = 1024 * 1024 * 1024
FIRST = sorted(ORIGINAL)[0]
FULL, STATE = "weights", "state"


def _header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


WEIGHTS: Mapping[str, Callable[[], bytes]] = {
    FULL: lambda: save(ORIGINAL),
    "scaled": lambda: save({name: tensor * 1.001 for name, tensor in ORIGINAL.items()}),
    "partial": lambda: save({FIRST: ORIGINAL[FIRST]}),
    "cut off": lambda: save(ORIGINAL)[:-100],
    "no tensors": lambda: save({}),
    "unknown tensor": lambda: save({**ORIGINAL, "unknown": ORIGINAL[FIRST].clone()}),
    "other shape": lambda: save({**ORIGINAL, EMBEDDING: ORIGINAL[EMBEDDING][:-1].contiguous()}),
    "other dtype": lambda: save({**ORIGINAL, FIRST: ORIGINAL[FIRST].long()}),
    "long header": lambda: (2**63).to_bytes(8, "little") + b"{}",
    "deep header": lambda: _header('{"a":' * 100_000 + "1" + "}" * 100_000),
    "list as header": lambda: _header("[1]"),
    "wrong offsets": lambda: _header(json.dumps({FIRST: {"dtype": "F32", "shape": [2**62], "data_offsets": [8, 0]}})),
    "text": lambda: b"weights",
    "empty": lambda: b"",
}


@cache
def _weights(name: str) -> bytes:
    return WEIGHTS[name]()


def content(upload: Upload, state: bytes) -> bytes:
    """Return the bytes of an upload. ``state``: a saved one to start from."""
    return _weights(upload.name) if upload.name != STATE else _mutated_state(state, upload)


def _mutated_state(state: bytes, upload: Upload) -> bytes:
    """Return the state with mutated documents and a checksum that is right."""
    if not upload.mutations:
        return state
    rows: list[Row] = list(unpack(state, MAX_STATE_BYTES))
    for place, (kind, key, text) in enumerate(rows):
        if mutations := [each for each in upload.mutations if each.name % len(rows) == place]:
            rows[place] = kind, key, mutated(json.loads(text), mutations).decode(errors="replace")
    return pack(rows)


def write_weights_root(root: Path) -> list[str]:
    """Write files of all kinds into the folder; return their names."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "full.safetensors").write_bytes(_weights(FULL))
    (root / "cut.safetensors").write_bytes(_weights("cut off"))
    (root / "deep.safetensors").write_bytes(_weights("deep header"))
    outside = root.parent / "outside.safetensors"
    outside.write_bytes(_weights(FULL))
    (root / "link.safetensors").symlink_to(outside)
    os.mkfifo(root / "fifo.safetensors")
    for folder, index in {
        "indexed": json.dumps({"weight_map": dict.fromkeys(ORIGINAL, "shard.bin")}),
        "linked": json.dumps({"weight_map": dict.fromkeys(ORIGINAL, "link.bin")}),
        "fifo": json.dumps({"weight_map": dict.fromkeys(ORIGINAL, "fifo.bin")}),
        "outside": json.dumps({"weight_map": dict.fromkeys(ORIGINAL, "../outside.safetensors")}),
        "deep": "[" * 100_000,
        "wrong": json.dumps({"weight_map": [1]}),
        "numbers": json.dumps({"weight_map": dict.fromkeys(ORIGINAL, 1)}),
        "empty": "",
    }.items():
        (root / folder).mkdir()
        (root / folder / "model.safetensors.index.json").write_text(index)
        (root / folder / "shard.bin").write_bytes(_weights(FULL))
        (root / folder / "link.bin").symlink_to(outside)
        os.mkfifo(root / folder / "fifo.bin")
    return sorted(each.name for each in root.iterdir())
