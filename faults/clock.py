"""A wall clock that jumps. Whatever waits goes by the monotonic one, which does not."""

import ast
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import darts_server
from faults.case import Fault, Outcome, Scene, Where
from faults.soak.house import Kept
from faults.soak.run import soak

WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}
TELLING = {"vllm/traces.py"}
"""What tells others when something was, in spans of traces. Nothing waits by it."""
DAYS = 86400.0 * 400


async def jumps(scene: Scene) -> Outcome:
    """Groups on the scripted engine while each look at the wall clock tells another day; and who looks at it at all."""
    outcome, lots = Outcome(), Random(scene.random.random())
    now = time.time

    def jumping() -> float:
        outcome.injected += 1
        return now() + lots.uniform(-DAYS, DAYS)

    with patch("time.time", jumping):
        soaked = await asyncio.to_thread(soak, scene.few(5000, 500), 5, Kept(100, 100), scene.folder / "clock")
    outcome.survived = soaked.ends.get("answered", 0)
    outcome.lost = soaked.ends.get("lost", 0) + soaked.ends.get("wrong", 0)
    outcome.wrong += soaked.wrong
    for place in looks_at_the_wall_clock():
        outcome.wrong.append(f"{place} goes by the wall clock")
    return outcome


def looks_at_the_wall_clock() -> Iterator[str]:
    """File and line of each place of ours that asks for the time of day, but for `TELLING`."""
    package = Path(darts_server.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if str(path.relative_to(package)) in TELLING:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
                yield f"{path.relative_to(package)}:{node.lineno}"


FAULTS = [Fault("clock", "the time of day jumps by up to 400 days at every look", Where.OWN, jumps)]
