"""Draw one step as lanes, under raw and under what it is compared with. It needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from darts_server.demo.runs import Run

# Okabe and Ito's colours, which colour-blind readers can tell apart.
NEW, RESUMED, WAITING, GREY = "#0072B2", "#009E73", "#E69F00", "#555555"
LEGEND = {
    NEW: "a group, from its request to its end",
    RESUMED: "goes on from what an earlier step has generated",
    WAITING: "not waited for: goes on in the next step",
}


def draw(raw: Run, other: Run, path: Path) -> None:
    """Draw the same step of both runs into a PNG file: the one whose time under raw is the median."""
    number = sorted(range(len(raw.steps)), key=lambda step: raw.steps[step].seconds)[len(raw.steps) // 2]
    longest = max(run.steps[number].seconds for run in (raw, other))
    figure = Figure(figsize=(9.6, 6.2), dpi=140, layout="constrained")
    for axes, run in zip(figure.subplots(2, 1, sharex=True), (raw, other), strict=True):
        _draw_step(axes, run, number)
        axes.set_xlim(0, 1.02 * longest)
    axes.set_xlabel("seconds")
    shown = LEGEND if other.steps[number].resumed else {NEW: LEGEND[NEW]}
    handles = [Line2D([], [], color=colour, linewidth=2.5, label=label) for colour, label in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_step(axes: Any, run: Run, number: int) -> None:
    step = run.steps[number]
    resumed: Sequence[bool] = step.resumed or [False] * len(step.arrivals)
    colours = [RESUMED if each else NEW for each in resumed] + [WAITING] * step.waiting
    ends = [*step.arrivals, *[step.seconds] * step.waiting]
    axes.hlines(range(len(ends)), 0, ends, color=colours, linewidth=3)
    axes.scatter([step.seconds] * step.waiting, range(len(step.arrivals), len(ends)), marker=">", color=WAITING, s=18)
    axes.axvline(step.seconds, color=GREY, linewidth=1)
    axes.set(ylim=(len(ends), -1), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{run.name}: step {number + 1} of {len(run.steps)} takes {step.seconds:.1f} s"
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
