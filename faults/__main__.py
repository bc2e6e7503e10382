"""Breaks things on purpose, one after the other, and says what became of the rest.

python -m faults --quick
python -m faults --only disconnects --only malformed
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from darts_server.demo.server import DARTS, Server, serving
from faults import bodies, callers, clock, disk, engine, running
from faults.case import Fault, Outcome, Scene, Where
from faults.others import at_rest

FAULTS: Sequence[Fault] = [
    *callers.FAULTS,
    *bodies.FAULTS,
    *running.FAULTS,
    *disk.FAULTS,
    *engine.FAULTS,
    *clock.FAULTS,
]
LAST = "sigterm"
"""Ends the second server, so it comes after all others that need that."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/faults", description=__doc__.split("\n")[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="inject fewer of each")
    parser.add_argument("--seed", type=int, default=0, help="of all lots (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for logs and state; left out, one that is removed at the end")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    with folder(options.folder) as where:
        done = dict(injected(faults, Scene(where, options.quick, Random(options.seed)), console))
    report(Console(), {fault.name: (fault, *done[fault.name]) for fault in faults})
    return 0 if all(not (outcome.wrong or outcome.lost) for outcome, _ in done.values()) else 1


def injected(faults: Sequence[Fault], scene: Scene, console: Console) -> Iterator[tuple[str, tuple[Outcome, float]]]:
    """Each fault's name, and what became of it in how many seconds. Servers run as long as they are needed."""
    ordered = sorted(faults, key=lambda fault: (list(Where).index(fault.where), fault.name == LAST))
    with ExitStack() as servers:
        for number, fault in enumerate(ordered):
            console.print(f"{number + 1}/{len(ordered)} {fault.name}: {fault.text}")
            began = time.monotonic()
            try:
                _prepare(fault, scene, servers)
                began = time.monotonic()  # a server's start is nobody's stall
                outcome = asyncio.run(_inject(fault, scene))
            except RuntimeError as error:  # a server that does not start
                outcome = Outcome(wrong=[str(error)])
            for wrong in outcome.wrong[:10]:
                console.print(f"  {wrong}", markup=False)
            console.print(f"  {outcome.verdict}; {outcome.counts}", markup=False)
            yield fault.name, (outcome, time.monotonic() - began)


def _prepare(fault: Fault, scene: Scene, servers: ExitStack) -> None:
    """Have the servers run that the fault is to be injected into."""
    if fault.where is Where.OWN:
        servers.close()
        scene.server = scene.other = None
    elif fault.where is Where.SECOND and scene.other is None:
        scene.server = scene.server or _shared(scene, servers)
        scene.other, scene.server = scene.server, servers.enter_context(_second(scene))
    elif scene.server is None:
        scene.server = _shared(scene, servers)


async def _inject(fault: Fault, scene: Scene) -> Outcome:
    try:
        outcome = await fault.inject(scene)
        if scene.server is not None and scene.server.process.poll() is None:
            await at_rest(scene.server, outcome)
    except Exception as error:
        return Outcome(wrong=[f"it ended with {error!r}"])
    return outcome


def _shared(scene: Scene, servers: ExitStack) -> Server:
    flags = ("--weights-root", str(scene.folder), "--weights-staging", str(scene.folder))
    limits = ("--max-body-bytes", str(bodies.MOST_BODY), "--state-dir", str(scene.folder / "state"))
    return servers.enter_context(serving(DARTS, scene.folder / "shared.log", *flags, *limits))


@contextmanager
def _second(scene: Scene) -> Iterator[Server]:
    state = ("--state-dir", str(scene.folder / "state"))
    with serving(DARTS, scene.folder / "second.log", *state, *engine.SMALL_CACHE) as server:
        yield server


@contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="darts-faults-") as made:
        yield Path(made)


def report(console: Console, done: dict[str, tuple[Fault, Outcome, float]]) -> None:
    """The table."""
    table = Table("fault", "injected", "survived", "lost", "longest stall, s", "seconds in all", "verdict")
    for fault, outcome, seconds in done.values():
        stall = "" if outcome.stall is None else f"{outcome.stall:.1f}"
        counts = (str(outcome.injected), str(outcome.survived), str(outcome.lost))
        table.add_row(fault.name, *counts, stall, f"{seconds:.0f}", outcome.verdict)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
