"""Writes down what vLLM's source says of each name that we lean on, for :mod:`tests.vllm.test_compat`.

    python tests/vllm/signatures/extract.py SRC tests/vllm/signatures/0.33.json

SRC is a directory that has the package ``vllm`` in it: ``site-packages``, or an unpacked wheel. The JSON file is of the
newest series that was compared. It is read for its names, and written again; to add one, write any value. Nothing is
imported. By name, as ``module:object``, ``module:Class.attribute`` or ``module:function[text in it]``, it has one of::

    "class needs x, y"      with the fields that must be given
    "def (self, x, *, y=)"  also "async def"; parameters that may be left out end with =
    "attribute"             of a module or class, or set on self in a method
    "imported"              from another module
    "there"                 the text is in the function
    null                    nothing has this name
"""

import ast
import json
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def extract(root: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return what the ``vllm`` under ``root`` says of the names."""
    return {name: describe(root, name) for name in sorted(names)}


def describe(root: Path, name: str) -> str | None:
    name, _, text = name.removesuffix("]").partition("[")
    module, _, path = name.partition(":")
    first, _, attribute = path.partition(".")
    found = find(root, module, first)
    if found is None or (attribute and (found := find_attribute(root, *found, attribute)) is None):
        return None
    home, node = found
    if text:
        made = (part for inner in ast.walk(node) if isinstance(inner, ast.stmt) for part in targets(inner))
        texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
        return "there" if text in (*made, *texts) else None
    if home != module and not attribute:
        return "imported"
    if isinstance(node, ast.ClassDef):
        needed = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign) and n.value is None]
        return f"class needs {', '.join(needed)}" if needed else "class"
    if not isinstance(node, Function) or any("property" in ast.unparse(each) for each in node.decorator_list):
        return "attribute"
    for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]:
        if argument is not None:
            argument.annotation = None
    node.args.defaults = [ast.Name("") for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Name("") for default in node.args.kw_defaults]
    return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def ({ast.unparse(node.args)})"


def find(root: Path, module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the statement that makes a name, and its module: imports are followed."""
    for node in statements(root, module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = module.split(".")
                    package = root.joinpath(*parts).is_dir()
                    base = parts[: len(parts) + package - node.level] if node.level else []
                    return find(root, ".".join([*base, *filter(None, [node.module])]), alias.name)
        elif name in targets(node):
            return module, node
    return None


def find_attribute(root: Path, module: str, node: ast.stmt, name: str) -> tuple[str, ast.stmt] | None:
    """Return the statement that makes an attribute of a class, or of one of its base classes."""
    if not isinstance(node, ast.ClassDef):
        return None
    for inner in node.body:
        if name in targets(inner):
            return module, inner
    for inner in set_on_self(node):
        if f"self.{name}" in targets(inner):
            return module, inner
    bases = (find(root, module, base.id) for base in node.bases if isinstance(base, ast.Name))
    return next(filter(None, (find_attribute(root, *base, name) for base in bases if base)), None)


@cache
def set_on_self(node: ast.ClassDef) -> list[ast.stmt]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Assign | ast.AnnAssign)]


@cache
def statements(root: Path, module: str) -> list[ast.stmt]:
    """Return the statements that run when a module is imported, and those for type checkers."""
    path = root.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    made, found = ast.parse(path.read_text()).body if path.exists() else [], []
    while made:
        found.append(node := made.pop(0))
        if isinstance(node, ast.If | ast.Try):
            made[:0] = [*node.body, *node.orelse]
    return found


def targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement makes."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(extract(source, json.loads(out.read_text())), indent=0) + "\n")
