"""Prints how the names of vLLM that we use differ between two versions of vLLM.

    python -m tests.vllm.signatures.compare OLD NEW

OLD and NEW are directories that have the package ``vllm`` in them, or wheels. Nothing is imported. The names are the
names of the recorded file. Signatures that differ come first, as :mod:`tests.vllm.test_compat` sees them. Then come the
changed lines of each name's source, without docstrings. Read these lines too: a function may do something else with the
same parameters.
"""

import ast
import difflib
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.vllm.signatures.extract import describe, find, find_attribute

[RECORD] = Path(__file__).parent.glob("*.json")
"""Signatures of the newest version that was compared."""

MOVED = {
    "vllm.entrypoints.common.cli_args:": "vllm.entrypoints.launchers.cli_args:",
    "vllm.entrypoints.common.startup:cli_env_setup": "vllm.entrypoints.serve.utils.api_utils:cli_env_setup",
}
"""Beginnings of recorded names, with their beginnings in earlier versions. ``compat.py`` imports from both places."""


def signature(root: Path, name: str) -> str | None:
    """Return the signature of a recorded name in the ``vllm`` under ``root``, at its present or its earlier place."""
    return describe(root, name) or next((describe(root, each) for each in earlier_names(name)), None)


def earlier_names(name: str) -> list[str]:
    return [before + name.removeprefix(now) for now, before in MOVED.items() if name.startswith(now)]


def source(root: Path, name: str) -> list[str] | None:
    """Return the lines of a name's source without docstrings, or None if nothing has the name."""
    for each in (name, *earlier_names(name)):
        module, _, path = each.partition("[")[0].partition(":")
        first, _, attribute = path.partition(".")
        found = find(root, module, first)
        if found is not None and attribute:
            found = find_attribute(root, *found, attribute)
        if found is not None:
            return ast.unparse(_without_docstrings(found[1])).splitlines()
    return None


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    node = deepcopy(node)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body = inner.body[1:] or [ast.Pass()]
    return node


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield a directory with the package ``vllm``: ``path`` itself, or the Python files of a wheel."""
    if path.is_dir():
        yield path
        return
    with TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
        yield Path(folder)


def compare(old: Path, new: Path, recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the comparison."""
    # Sources first, because `describe` removes annotations from the statements that it has read.
    sources = {name: (source(old, name), source(new, name)) for name in recorded}
    yield "# Signatures"
    for name in recorded:
        before = signature(old, name)
        after = signature(new, name)
        if before != after:
            yield from (name, f"  {before}", f"  {after}")

    yield "# Sources"
    for name, (lines, changed) in sources.items():
        if lines is not None and changed is not None and lines != changed:
            yield from difflib.unified_diff(lines, changed, name, name, n=2, lineterm="")


if __name__ == "__main__":
    with unpacked(Path(sys.argv[1])) as first, unpacked(Path(sys.argv[2])) as second:
        print(*compare(first, second, json.loads(RECORD.read_text())), sep="\n")
