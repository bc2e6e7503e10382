"""Detect a growing process: sample its memory, and fit lines to the samples."""

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

NOISE = 4.0
"""Standard errors. A smaller slope may be chance."""
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """The process after a number of groups, idle.

    Attributes:
        blocks: of Python's allocator.
        objects: tracked by the garbage collector, without those from before the soak.
        own: those of them whose class is ours.
        rss: resident memory in megabytes.
        files: open file descriptors.
    """

    groups: int
    blocks: int
    objects: int
    own: int
    rss: float
    files: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A quantity over the samples. ``slope``: per 1,000 groups; ``error``: its standard error."""

    quantity: str
    first: float
    last: float
    slope: float
    error: float
    flat: bool


LIMITS = {"blocks": 0.01, "objects": 0.1, "own": 0.1, "rss": 0.02, "files": 0.0, "tasks": 0.0}
"""The share of its mean that a quantity may grow by over all samples, even if the growth is no chance."""
NAMES = {
    "rss": "resident memory, MB",
    "blocks": "allocated blocks",
    "objects": "tracked objects",
    "own": "objects of our classes",
    "files": "open files",
}


def sample(groups: int) -> Sample:
    """Sample this process now."""
    gc.collect()
    process, objects = psutil.Process(), gc.get_objects()
    return Sample(
        groups,
        sys.getallocatedblocks(),
        len(objects),
        sum(type(x).__module__.startswith("darts_server.") for x in objects),
        process.memory_info().rss / MEGABYTE,
        process.num_fds(),
        len(asyncio.all_tasks()),
    )


def measure_growth(samples: Sequence[Sample]) -> list[Growth]:
    """Fit a line to each quantity over at least three samples."""
    groups = np.array([s.groups for s in samples], dtype=np.float64)
    return [_fit(name, groups, np.array([float(getattr(s, name)) for s in samples])) for name in LIMITS]


def _fit(name: str, groups: np.ndarray, values: np.ndarray) -> Growth:
    x = groups - groups.mean()
    slope = float(x @ values / (x @ x))
    residuals = values - values.mean() - slope * x
    error = float(np.sqrt(residuals @ residuals / (len(x) - 2) / (x @ x)))
    grown = slope * float(groups[-1] - groups[0])
    flat = slope <= NOISE * error or grown <= LIMITS[name] * float(values.mean())
    return Growth(name, float(values[0]), float(values[-1]), 1000 * slope, 1000 * error, flat)
