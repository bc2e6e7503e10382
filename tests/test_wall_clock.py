"""Timeouts and deadlines use the monotonic clock: nothing waits by the wall clock, which may jump."""

import ast
from pathlib import Path

import darts_server

WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}


def test_no_code_uses_the_wall_clock() -> None:
    package = Path(darts_server.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL
    ]
    assert not found
