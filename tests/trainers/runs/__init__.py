"""What the nightly tests have run with each trainer, a file of JSON for each test: see `tests.trainers.table`."""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

FOLDER = Path(__file__).parent
Part = Literal["requests", "groups", "later turns", "weights", "training"]
"""weights: the trainer brings them. A test that brings weights itself has not run this part."""
PARTS: tuple[Part, ...] = get_args(Part)


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return record


def record(name: str, package: str, python: str | Path, parts: Collection[Part]) -> None:
    """Compare what a test has run with the file of the test; write the file and raise an AssertionError if they differ.

    ``package``: the trainer's distribution, whose version is read in the environment of ``python``.
    """
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    version = subprocess.check_output([str(python), "-c", program, package], text=True).strip()
    ran = {"package": package, "version": version, "parts": [part for part in PARTS if part in parts]}
    path = FOLDER / f"{name}.json"
    known = None
    if path.exists():
        known = read(name)
    if ran != known:
        path.write_text(json.dumps(ran, indent=2) + "\n")
        raise AssertionError(
            f"The test has run {ran}, and {path.name} had {known}. The file is now rewritten: check the difference, "
            "run `python -m tests.trainers.table`, and commit the file and the page."
        )
