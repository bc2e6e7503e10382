"""Runs groups by the hundred thousand on the scripted engine, and looks whether anything grows or is lost.

python -m faults.soak --groups 1000000
"""

import argparse
import logging
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from faults.soak.house import Kept
from faults.soak.memory import NAMES, Growth
from faults.soak.run import Soaked, soak

ROUNDS = 50
FULL = 10
"""Rooms are full after a tenth of the groups at the latest: the second half is looked at."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all lots (default: %(default)s)")
    parser.add_argument("--state-dir", type=Path, help="keep what is learned in a file there, not in memory")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="end earlier, after the round in which they end"
    )
    options = parser.parse_args(argv)
    if options.groups < ROUNDS:
        parser.error(f"--groups must be at least {ROUNDS}, got {options.groups}")
    logging.disable(logging.WARNING)  # candidates fail on purpose
    began = time.monotonic()
    with tqdm(total=options.groups, unit="group") as bar:

        def told(done: int) -> bool:
            bar.update(done - bar.n)
            seconds: float = 60 * options.minutes
            return time.monotonic() - began < seconds

        soaked = soak(
            options.groups,
            ROUNDS,
            kept(options.groups),
            options.state_dir,
            options.seed,
            told,
        )
    report(Console(), soaked, time.monotonic() - began)
    return 0 if soaked.survived else 1


def kept(groups: int) -> Kept:
    """What a server remembers, or less where so few groups would not fill that."""
    most, full = Kept(), groups // FULL
    return Kept(
        groups=min(most.groups, full),
        votes=max(1, min(most.votes, full // 100)),  # one group in seventy is one
        documents=min(most.documents, full // 5),  # one in four has a prompt of its own
        flight_bytes=min(most.flight_bytes, full * 500),
        labels=max(1, min(most.labels, full // 4)),
        vote_labels=max(1, min(most.vote_labels, full // 50)),
        window=max(1, min(most.window, full // 10)),
        batches=min(most.batches, max(1, full // 50)),
    )


def report(console: Console, soaked: Soaked, seconds: float) -> None:
    """The tables, and what was wrong."""
    counts = Table("what", "how many", title=f"{soaked.asked} groups in {seconds:.0f} s")
    for title, values in (
        ("requests that were", soaked.ends),
        ("groups", soaked.outcomes),
        ("candidates", soaked.reasons),
        ("rewards", soaked.rewards),
    ):
        for name, count in sorted(values.items()):
            counts.add_row(f"{title} {name}", f"{count:.0f}")
    counts.add_row("versions of the weights", str(soaked.updates))
    counts.add_row("hours on the engine's clock", f"{soaked.day / 3600:.1f}")
    counts.add_row("longest stall, seconds on that clock", f"{soaked.slowest:.1f}")
    console.print(counts)
    growth = Table("of the process", "half way", "at the end", "per 1,000 groups", "flat", title="Second half")
    for each in soaked.growths:
        growth.add_row(*_row(each))
    console.print(growth)
    for wrong in soaked.wrong:
        console.print(f"WRONG {wrong}")
    console.print("survived" if soaked.survived else "NOT survived")


def _row(growth: Growth) -> tuple[str, ...]:
    slope = f"{growth.slope:+.3g} ± {growth.error:.2g}"
    name = NAMES.get(growth.what, growth.what)
    return name, f"{growth.first:.0f}", f"{growth.last:.0f}", slope, "yes" if growth.flat else "NO"


if __name__ == "__main__":
    sys.exit(main())
