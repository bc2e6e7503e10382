"""Checks of the folders that are written to."""

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
LEAST_STATE = 100 * 1024 * 1024
"""Bytes: a kilobyte for each of a hundred thousand prompts."""
MODELS_STAGED = 2
"""Weights that come, and those that are put back if they fail."""


def state(folder: Path | None, least: int = LEAST_STATE) -> Finding:
    """Nothing is created, and a file that is there is only opened."""
    if folder is None:
        return ok("state", "what is learned is kept in memory, and lost at the end; --state-dir keeps it")
    try:
        if (folder / STATE_FILE).exists():
            Store(folder).close()
    except StateError as error:
        return fail("state", str(error))
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        return fail("state", f"{nearest} cannot be written to; choose another --state-dir, or change its owner")
    if (free := shutil.disk_usage(nearest).free) < least:
        return warn("state", f"{folder} has {free / GIB:.2f} GiB left: make room, or new lengths are not kept")
    return ok("state", str(folder))


def weights(root: Path | None, staging: Path | None, model_bytes: int | None) -> Iterator[Finding]:
    """``model_bytes``: ``None`` where it is not known."""
    if root is not None:
        readable = os.access(root, os.R_OK | os.X_OK)
        yield (
            ok("weights", f"may come from {root}")
            if readable
            else fail("weights", f"--weights-root {root} cannot be read; change its owner or rights")
        )
    folder = staging or Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK | os.X_OK):
        yield fail("staging", f"{folder} cannot be written to; choose another --weights-staging")
        return
    free = shutil.disk_usage(folder).free
    says = f"{folder} has {free / GIB:.1f} GiB left for pushed weights"
    needed = MODELS_STAGED * (model_bytes or 0)
    if free < needed:
        yield warn("staging", f"{says}, and two models have {needed / GIB:.1f}: choose another --weights-staging")
    else:
        yield ok("staging", says)
