"""Inject faults into a server, one after the other, and report what happened to everything else.

python -m faults --quick
python -m faults --only disconnects --only oversized
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
from faults.bystanders import check_idle
from faults.case import Fault, Outcome, Scene, Target

FAULTS: Sequence[Fault] = [
    *callers.FAULTS,
    *bodies.FAULTS,
    *running.FAULTS,
    *disk.FAULTS,
    *engine.FAULTS,
    *clock.FAULTS,
]
MAX_PRINTED = 10
"""Violations of one fault that are printed."""
LAST = "sigterm"
"""It stops the second server, so it runs after all other faults that need that."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/faults", description=__doc__.split("\n")[0])
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="inject fewer of each")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for logs and state (default: a temporary one)")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    with open_folder(options.folder) as folder:
        results = dict(inject_all(faults, Scene(folder, options.quick, Random(options.seed)), console))
    report(Console(), {fault.name: (fault, *results[fault.name]) for fault in faults})
    return 0 if all(outcome.survived_all for outcome, _ in results.values()) else 1


def inject_all(faults: Sequence[Fault], scene: Scene, console: Console) -> Iterator[tuple[str, tuple[Outcome, float]]]:
    """Inject the faults; yield each one's name with its outcome and seconds. Servers run as long as they are needed."""
    ordered = sorted(faults, key=lambda fault: (list(Target).index(fault.target), fault.name == LAST))
    with ExitStack() as servers:
        for number, fault in enumerate(ordered):
            console.print(f"{number + 1}/{len(ordered)} {fault.name}: {fault.description}")
            began = time.monotonic()
            try:
                _start_servers(fault, scene, servers)
                began = time.monotonic()  # starting a server does not count
                outcome = asyncio.run(_inject(fault, scene))
            except RuntimeError as error:  # a server did not start
                outcome = Outcome(violations=[str(error)])
            for violation in outcome.violations[:MAX_PRINTED]:
                console.print(f"  {violation}", markup=False)
            console.print(f"  {outcome.verdict}; {outcome.counts}", markup=False)
            yield fault.name, (outcome, time.monotonic() - began)


def _start_servers(fault: Fault, scene: Scene, servers: ExitStack) -> None:
    """Start the servers that the fault is injected into, unless they run already."""
    if fault.target is Target.OWN:
        servers.close()
        scene.server = scene.other = None
    elif fault.target is Target.SECOND and scene.other is None:
        scene.server = scene.server or _shared(scene, servers)
        scene.other, scene.server = scene.server, servers.enter_context(_second(scene))
    elif scene.server is None:
        scene.server = _shared(scene, servers)


async def _inject(fault: Fault, scene: Scene) -> Outcome:
    try:
        outcome = await fault.inject(scene)
        if scene.server is not None and scene.server.process.poll() is None:
            await check_idle(scene.server, outcome)
    except Exception as error:
        return Outcome(violations=[f"it raised {error!r}"])
    return outcome


def _shared(scene: Scene, servers: ExitStack) -> Server:
    flags = ("--weights-root", str(scene.folder), "--weights-staging", str(scene.folder))
    limits = ("--max-body-bytes", str(bodies.MAX_BODY_BYTES), "--state-dir", str(scene.folder / "state"))
    return servers.enter_context(serving(DARTS, scene.folder / "shared.log", *flags, *limits))


@contextmanager
def _second(scene: Scene) -> Iterator[Server]:
    state = ("--state-dir", str(scene.folder / "state"))
    with serving(DARTS, scene.folder / "second.log", *state, *engine.SMALL_CACHE) as server:
        yield server


@contextmanager
def open_folder(path: Path | None) -> Iterator[Path]:
    """Create the folder, or a temporary one that is removed at the end."""
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="darts-faults-") as temporary:
        yield Path(temporary)


def report(console: Console, results: dict[str, tuple[Fault, Outcome, float]]) -> None:
    """Print the table."""
    table = Table("fault", "injected", "survived", "lost", "longest stall, s", "total seconds", "verdict")
    for fault, outcome, seconds in results.values():
        stall = "" if outcome.stall is None else f"{outcome.stall:.1f}"
        counts = (str(outcome.injected), str(outcome.survived), str(outcome.lost))
        table.add_row(fault.name, *counts, stall, f"{seconds:.0f}", outcome.verdict)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
