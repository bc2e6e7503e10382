"""Compare the demo's runs in a table and a sentence for each. Nothing here talks to a server."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np

from darts_server.demo.rollouts import Step

RAW = "raw"
CLEAR = 0.15
"""Times whose ratio is closer to 1 than this are called equal: runs of a few seconds vary by as much."""


@dataclass(frozen=True)
class Run:
    """All steps under one policy; ``name`` is the policy's, or `RAW`."""

    name: str
    steps: Sequence[Step]

    @cached_property
    def lengths(self) -> list[int]:
        """The length of every returned trajectory, in tokens."""
        return [length for step in self.steps for group in step.lengths for length in group]

    @property
    def right(self) -> float:
        """The share of returned trajectories with the right answer."""
        return sum(step.right for step in self.steps) / len(self.lengths)

    @property
    def spread(self) -> float:
        """The mean standard deviation of the lengths within a group, in tokens."""
        return float(np.mean([np.std(group) for step in self.steps for group in step.lengths]))

    @property
    def generated(self) -> int:
        """Tokens of all candidates, returned or not."""
        return sum(step.generated for step in self.steps)

    @property
    def returned(self) -> int:
        """Tokens of the returned trajectories."""
        return sum(self.lengths)

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(step.seconds for step in self.steps)


Row = tuple[str, Callable[[Run], float], str]
"""A name, its number for a run, and the format of that number."""

ROWS: tuple[Row | None, ...] = (
    ("wall time, all steps (s)", lambda run: run.seconds, ".2f"),
    ("wall time, median step (s)", lambda run: median(step.seconds for step in run.steps), ".2f"),
    None,
    ("tokens generated", lambda run: run.generated, ",.0f"),
    ("tokens returned", lambda run: run.returned, ",.0f"),
    ("tokens discarded", lambda run: run.generated - run.returned, ",.0f"),
    None,
    ("length, mean (tokens)", lambda run: float(np.mean(run.lengths)), ".1f"),
    ("length, 95th percentile", lambda run: float(np.percentile(run.lengths, 95)), ".0f"),
    ("length, longest", lambda run: max(run.lengths), ".0f"),
    ("length, std within a group", lambda run: run.spread, ".1f"),
    None,
    ("right answers", lambda run: run.right, ".1%"),
)
"""``None`` is a rule between rows."""


def table(raw: Run, shaped: Sequence[Run]) -> str:
    """Put the runs side by side; each ratio is against raw in this very run."""
    header = ["", RAW, *(cell for run in shaped for cell in (run.name, "ratio"))]
    rows = [None if row is None else _cells(row, raw, shaped) for row in ROWS]
    widths = [max(map(len, column)) for column in zip(header, *filter(None, rows), strict=True)]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join(rule if row is None else _aligned(row, widths) for row in (header, None, *rows))


def _cells(row: Row, raw: Run, shaped: Sequence[Run]) -> list[str]:
    name, number, form = row
    before, cells = number(raw), [name, format(number(raw), form)]
    for run in shaped:
        after = number(run)
        cells += [format(after, form), f"{after / before:.2f}" if before else "-"]
    return cells


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others])


def verdict(raw: Run, run: Run) -> str:
    """Say in one sentence what shaping did to tokens and time.

    The pace is that of the median step against raw's same step: one step that other work on the machine slowed down
    does not decide it.
    """
    ratio = median(mine.seconds / its.seconds for mine, its in zip(run.steps, raw.steps, strict=True))
    pace = "about as fast as raw" if abs(ratio - 1) < CLEAR else "faster than raw" if ratio < 1 else "slower than raw"
    return (
        f"{run.name}: {run.generated / raw.generated:.2f} x the generated tokens for the same {len(run.lengths)} "
        f"trajectories; a step took {ratio:.2f} x the time (median): {pace} here."
    )
