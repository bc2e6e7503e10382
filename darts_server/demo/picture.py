"""Draw when groups arrive, step after step, and how long their trajectories are. It needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from darts_server.demo.runs import Run

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#D55E00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#E69F00")
GREY, SHADES = "#555555", ("#F7F7F7", "#E9E9E9")
SUBTITLE = {"loc": "left", "fontsize": 10.5, "color": GREY}
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
LANE = 1.35
"""The height of a run with the gap below it, in units of its own height."""


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the runs, raw first, into a PNG file."""
    figure = Figure(figsize=(9.6, 3.6 + 1.15 * len(runs)), dpi=140, layout="constrained")
    times, tail = figure.subplots(2, 1, height_ratios=(1.15 * len(runs), 2.6))
    figure.suptitle(_title(runs), fontsize=13, fontweight="bold")
    _draw_times(times, runs)
    _draw_tail(tail, runs)
    for axes in (times, tail):
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _title(runs: Sequence[Run]) -> str:
    step = runs[0].steps[0]
    size = f"{len(step.lengths)} prompts x {len(step.lengths[0])} trajectories"
    return f"Rollouts of the same {len(runs[0].steps)} steps, {size} each"


def _draw_times(axes: Any, runs: Sequence[Run]) -> None:
    """Draw a lane for each run: its steps from left to right, in each a line from the request to every group."""
    raw = runs[0].seconds
    for row, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        start, top = 0.0, row * LANE
        for number, step in enumerate(run.steps):
            axes.barh(top, step.seconds, left=start, height=1, align="edge", color=SHADES[number % 2])
            heights = top + (np.arange(len(step.arrivals)) + 0.5) / len(step.arrivals)
            axes.hlines(heights, start, [start + arrival for arrival in step.arrivals], color=colour, linewidth=1.6)
            start += step.seconds
        total = f"{run.seconds:.1f} s" if row == 0 else f"{run.seconds:.1f} s\n{run.seconds / raw:.2f} x raw"
        axes.annotate(total, (start, top + 0.5), (8, 0), textcoords="offset points", va="center", **_bold(colour))
    axes.set_yticks([row * LANE + 0.5 for row in range(len(runs))], [run.name for run in runs], fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(runs) * LANE - (LANE - 1) + 0.1, -0.1)
    axes.set_xlim(0, max(run.seconds for run in runs) * 1.13)
    axes.set_xlabel("seconds of rollouts, one step after another")
    axes.set_title("Each line is a group, from request to arrival. A step ends with its last group.", **SUBTITLE)


def _bold(colour: str) -> dict[str, Any]:
    return {"color": colour, "fontweight": "bold", "fontsize": 11, "multialignment": "left"}


def _draw_tail(axes: Any, runs: Sequence[Run]) -> None:
    """Draw which share of the returned trajectories is at least so long."""
    for run, colour in zip(runs, COLOURS, strict=False):
        lengths, longest = np.array(run.lengths), max(run.lengths)
        steps = np.arange(1, longest + 1)
        shares = [float(np.mean(lengths >= step)) for step in steps]
        label = f"{run.name}: mean {np.mean(lengths):.1f}, longest {longest}"
        axes.step(steps, shares, where="pre", color=colour, linewidth=2.2, label=label)
        axes.plot(longest, shares[-1], "o", color=colour)
    axes.set(yscale="log", ylabel="share of trajectories", xlabel="length (generated tokens)")
    axes.set_xscale("log", base=2)
    axes.set_xlim(2, LENGTHS[-1] * 1.1)
    axes.xaxis.set_major_locator(FixedLocator(LENGTHS))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_locator(FixedLocator(SHARES))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.1%}" if share < 0.01 else f"{share:.0%}")
    axes.grid(axis="y", color="#DDDDDD")
    axes.set_title("What comes back: share of the returned trajectories that have at least this length", **SUBTITLE)
    axes.legend(frameon=False, loc="lower left")
