"""Check the folders that the server reads from and writes to."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from darts_server.doctor.findings import Finding, fail, ok, warn
from darts_server.doctor.machine import GIB
from darts_server.exceptions import StateError
from darts_server.store import Store

STATE_FILE = "state.db"
MIN_STATE_BYTES = 100 * 1024 * 1024
"""A kilobyte for each of a hundred thousand prompts."""
STAGED_MODELS = 2
"""The new weights, and the old ones that are restored if loading fails."""


def check_state(folder: Path | None, min_bytes: int = MIN_STATE_BYTES) -> Finding:
    """Check ``--state-dir``. Nothing is created, and an existing file is only opened."""
    if folder is None:
        return ok("state", "kept in memory and lost when the server stops; --state-dir keeps it")
    try:
        if (folder / STATE_FILE).exists():
            Store(folder).close()
    except StateError as error:
        return fail("state", str(error))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return fail("state", f"{existing} is not writable; choose another --state-dir, or change its owner")
    if (free := shutil.disk_usage(existing).free) < min_bytes:
        return warn("state", f"{folder} has {free / GIB:.2f} GiB left: make room, or new lengths are not stored")
    return ok("state", str(folder))


def check_weights(root: Path | None, staging: Path | None, model_bytes: int | None) -> Iterator[Finding]:
    """Check the folders for new weights. ``model_bytes``: size of the model, ``None`` if unknown."""
    if root is not None:
        readable = os.access(root, os.R_OK | os.X_OK)
        yield (
            ok("weights", f"may be loaded from {root}")
            if readable
            else fail("weights", f"--weights-root {root} is not readable; change its owner or permissions")
        )
    folder = staging or Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail("staging", f"{folder} is not writable; choose another --weights-staging")
        return
    free = shutil.disk_usage(folder).free
    message = f"{folder} has {free / GIB:.1f} GiB left for pushed weights"
    needed = STAGED_MODELS * (model_bytes or 0)
    if free < needed:
        yield warn("staging", f"{message}, and two models need {needed / GIB:.1f}: choose another --weights-staging")
    else:
        yield ok("staging", message)
