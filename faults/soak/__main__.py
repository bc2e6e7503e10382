"""Run groups by the hundred thousand on the scripted engine, and check whether anything grows or is lost.

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

from faults.soak.memory import NAMES, Growth
from faults.soak.run import Soaked, soak
from faults.soak.stack import Retention

ROUNDS = 50
FULL_AFTER = 10
"""Everything that the server retains is full after a tenth of the groups; growth is measured over the second half."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: %(default)s)")
    parser.add_argument("--state-dir", type=Path, help="keep the learned state in a file there (default: in memory)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop earlier, after the round in which this time is over"
    )
    options = parser.parse_args(argv)
    if options.groups < ROUNDS:
        parser.error(f"--groups must be at least {ROUNDS}, got {options.groups}")
    logging.disable(logging.WARNING)  # candidates fail on purpose
    began = time.monotonic()
    with tqdm(total=options.groups, unit="group") as bar:

        def has_time(done: int) -> bool:
            bar.update(done - bar.n)
            seconds: float = 60 * options.minutes
            return time.monotonic() - began < seconds

        soaked = soak(
            options.groups,
            ROUNDS,
            scaled_retention(options.groups),
            options.state_dir,
            options.seed,
            has_time,
        )
    report(Console(), soaked, time.monotonic() - began)
    return 0 if soaked.survived else 1


def scaled_retention(groups: int) -> Retention:
    """Return a server's retention, or less of it where so few groups would not fill it."""
    limit, full = Retention(), groups // FULL_AFTER
    return Retention(
        groups=min(limit.groups, full),
        votes=max(1, min(limit.votes, full // 100)),  # one group in seventy is a vote
        documents=min(limit.documents, full // 5),  # one in four has a prompt of its own
        flight_bytes=min(limit.flight_bytes, full * 500),
        labels=max(1, min(limit.labels, full // 4)),
        vote_labels=max(1, min(limit.vote_labels, full // 50)),
        window=max(1, min(limit.window, full // 10)),
        batches=min(limit.batches, max(1, full // 50)),
        observations=min(limit.observations, full),
    )


def report(console: Console, soaked: Soaked, seconds: float) -> None:
    """Print the tables and the violations."""
    counts = Table("", "count", title=f"{soaked.groups} groups in {seconds:.0f} s")
    for title, values in (
        ("requests:", soaked.requests),
        ("groups:", soaked.outcomes),
        ("candidates:", soaked.reasons),
        ("rewards:", soaked.rewards),
    ):
        for name, count in sorted(values.items()):
            counts.add_row(f"{title} {name}", f"{count:.0f}")
    counts.add_row("weight updates", str(soaked.updates))
    counts.add_row("hours on the engine's clock", f"{soaked.loop_seconds / 3600:.1f}")
    counts.add_row("longest wait, seconds on that clock", f"{soaked.longest_wait:.1f}")
    console.print(counts)
    growth = Table("of the process", "at half time", "at the end", "per 1,000 groups", "flat", title="Second half")
    for each in soaked.growths:
        growth.add_row(*_row(each))
    console.print(growth)
    for violation in soaked.violations:
        console.print(f"VIOLATED {violation}")
    console.print("survived" if soaked.survived else "NOT survived")


def _row(growth: Growth) -> tuple[str, ...]:
    slope = f"{growth.slope:+.3g} ± {growth.error:.2g}"
    name = NAMES.get(growth.quantity, growth.quantity)
    return name, f"{growth.first:.0f}", f"{growth.last:.0f}", slope, "yes" if growth.flat else "NO"


if __name__ == "__main__":
    sys.exit(main())
