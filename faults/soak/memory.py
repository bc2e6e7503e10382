"""Whether a process grows: samples of what it holds, and lines fitted to them."""

import asyncio
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil

NOISE = 4.0
"""Standard errors. Growth below this may be chance."""
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Sample:
    """After ``groups``, with nothing under way. ``blocks``: of Python's allocator. ``objects``: that it tracks,
    but for those from before the soak. ``own``: those of them that are of classes of ours.

    ``rss``: megabytes. ``files``: open descriptors.
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
    """``first``, ``last``: of what was looked at. ``slope``: per 1,000 groups, ``error``: its standard error."""

    what: str
    first: float
    last: float
    slope: float
    error: float
    flat: bool


LIMITS = {"blocks": 0.01, "objects": 0.1, "own": 0.1, "rss": 0.02, "files": 0.0, "tasks": 0.0}
"""Share of the level that a process may grow by over all that was looked at, for growth that is no chance to count."""
NAMES = {
    "rss": "resident memory, MB",
    "blocks": "allocated blocks",
    "objects": "tracked objects",
    "own": "of our classes",
    "files": "open files",
}


def sample(groups: int) -> Sample:
    """What this process holds now."""
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


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Of each thing that is counted, over these samples, at least three."""
    groups = np.array([s.groups for s in samples], dtype=np.float64)
    return [_growth(what, groups, np.array([float(getattr(s, what)) for s in samples])) for what in LIMITS]


def _growth(what: str, groups: np.ndarray, values: np.ndarray) -> Growth:
    x = groups - groups.mean()
    slope = float(x @ values / (x @ x))
    left = values - values.mean() - slope * x
    error = float(np.sqrt(left @ left / (len(x) - 2) / (x @ x)))
    grown = slope * float(groups[-1] - groups[0])
    flat = slope <= NOISE * error or grown <= LIMITS[what] * float(values.mean())
    return Growth(what, float(values[0]), float(values[-1]), 1000 * slope, 1000 * error, flat)
