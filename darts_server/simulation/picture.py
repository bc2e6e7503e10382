"""Draw one step under each policy: when each candidate runs, and what becomes of it. It needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from darts_server.simulation.training import Step

RETURNED, TRUNCATED, STOPPED = "#0072B2", "#D55E00", "#BBBBBB"
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
LABELS = {"returned": RETURNED, "returned truncated": TRUNCATED, "not returned": STOPPED}
COLUMNS = 3


def draw(steps: Mapping[str, Step], path: Path) -> None:
    """Draw a panel for each policy, with a line for each candidate, in the order of engines and groups."""
    rows = -(-len(steps) // COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 2.5 * rows + 0.8), dpi=110, layout="constrained")
    panels = figure.subplots(rows, COLUMNS, sharex=True, squeeze=False).ravel()
    longest = max(step.rollout.seconds for step in steps.values())
    for axes, (name, step) in zip(panels, steps.items(), strict=False):
        rollout = step.rollout
        fates = {(one.group, one.index): TRUNCATED if one.truncated else RETURNED for one in rollout.returned}
        lines: list[list[tuple[float, float]]] = []
        colours = []
        for group in np.argsort(rollout.replicas, kind="stable").tolist():
            for index in np.flatnonzero(np.isfinite(rollout.ended_at[group])).tolist():
                row = len(lines)
                lines.append([(rollout.started_at[group, index], row), (rollout.ended_at[group, index], row)])
                colours.append(fates.get((group, index), STOPPED))
        axes.add_collection(LineCollection(lines, colors=colours, linewidths=max(0.4, 150 / len(lines))))
        axes.axvline(rollout.seconds, color="#222222", linewidth=1)
        axes.set(xlim=(0, longest * 1.02), ylim=(len(lines), 0), yticks=[])
        axes.set_title(f"{name}: {rollout.seconds:.0f} s", loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
    for axes in panels[len(steps) :]:
        axes.set_visible(False)
    figure.supxlabel("seconds of one rollout; a line is a candidate, in the order of engines and prompts", fontsize=10)
    handles = [Line2D([], [], color=colour, linewidth=2, label=label) for label, colour in LABELS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
