"""Runs the tests of drafts in a process of their own.

They import numba. vLLM cannot start a worker in a process, or in a fork of a process, that has imported numba before.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(FOLDER.glob("compiled_*.py")), ids=lambda file: file.stem)
def test_compiled_functions(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
