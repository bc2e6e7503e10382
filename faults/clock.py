"""A wall clock that jumps. Timeouts and deadlines must use the monotonic clock."""

import ast
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import darts_server
from faults.case import Fault, Outcome, Scene, Target
from faults.soak.run import soak
from faults.soak.stack import Retention

WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime.now", "datetime.utcnow", "date.today"}
ALLOWED = {"vllm/traces.py", "weights/staged.py"}
"""Spans of traces have wall-clock timestamps, and so has the expiry of staged weights that callers see; nothing waits
by them."""
DAYS = 86400.0 * 400


async def jumps(scene: Scene) -> Outcome:
    """Run groups on the scripted engine while the wall clock jumps; search the code for uses of the wall clock."""
    outcome, rng = Outcome(), Random(scene.random.random())
    real_time = time.time

    def jumping() -> float:
        outcome.injected += 1
        return real_time() + rng.uniform(-DAYS, DAYS)

    time.time = jumping
    try:
        retention = Retention(groups=100, votes=100)
        soaked = await asyncio.to_thread(soak, scene.count(5000, 500), 5, retention, scene.folder / "clock")
    finally:
        time.time = real_time
    outcome.survived = soaked.requests.get("answered", 0)
    outcome.lost = soaked.requests.get("lost", 0) + soaked.requests.get("wrong", 0)
    outcome.violations += soaked.violations
    for place in find_wall_clock_uses():
        outcome.violations.append(f"{place} uses the wall clock")
    return outcome


def find_wall_clock_uses() -> Iterator[str]:
    """Yield file and line of every use of the wall clock in our code, except in `ALLOWED`."""
    package = Path(darts_server.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if str(path.relative_to(package)) in ALLOWED:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
                yield f"{path.relative_to(package)}:{node.lineno}"


FAULTS = [Fault("clock", "the wall clock jumps by up to 400 days at every read", Target.OWN, jumps)]
