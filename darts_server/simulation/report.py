"""What `darts-server simulate` shows: a table, the same for programs, and a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from darts_server.simulation.training import Setting, Step, Summary


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: "" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "policy": ("policy", str),
    "rollout_seconds": ("rollout s", _number(1)),
    "training_seconds": ("train s", _number(1)),
    "step_seconds": ("step s", _number(1)),
    "step_speedup": ("step x", _number(2)),
    "rollout_speedup": ("rollout x", _number(2)),
    "tokens_generated": ("generated", _number(2)),
    "tokens_returned": ("returned", _number(2)),
    "tokens_wasted": ("wasted", _number(2)),
    "idle_share": ("idle", _share),
    "length_bias": ("length", _signed),
    "effective_sample_size": ("ESS", _number(2)),
    "truncated_share": ("truncated", _share),
    "stale_share": ("stale", _share),
    "notes": ("", str),
}
LEGEND = """\
step x, rollout x: times as fast as off. generated, returned, wasted: tokens over those that off generates. idle:
places of an engine that are empty, of the most it used. length: of what is returned, against off. ESS: effective sample
size of the weights over the group size; empty where some candidates can never be returned. stale: returned tokens that
older weights generated. N: prompts of a step; with start=1.25, 1.25 N are started, and the first N complete groups are
returned."""


def table(summaries: Sequence[Summary]) -> str:
    """Format summaries as lines of text."""
    rows = [[title for title, _ in COLUMNS.values()]]
    rows += [[form(getattr(summary, name)) for name, (_, form) in COLUMNS.items()] for summary in summaries]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def document(workload: str, setting: Setting, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Build what ``--json`` writes."""
    return {
        "workload": workload,
        "group_size": setting.size,
        "prompts": setting.prompts,
        "steps": setting.steps,
        "replicas": setting.machine.replicas,
        "machine": asdict(setting.machine),
        "policies": [asdict(summary) for summary in summaries],
    }


RETURNED, TRUNCATED, STOPPED = "#0072B2", "#D55E00", "#BBBBBB"
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
LABELS = {"returned": RETURNED, "returned truncated": TRUNCATED, "not returned": STOPPED}
PANELS = 3


def draw(steps: Mapping[str, Step], path: Path) -> None:
    """Draw a panel for each policy, with a line for each candidate, in the order of engines and groups.

    It needs matplotlib, which is optional.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    rows = -(-len(steps) // PANELS)
    figure = Figure(figsize=(4.2 * PANELS, 2.5 * rows + 0.8), dpi=110, layout="constrained")
    panels = figure.subplots(rows, PANELS, sharex=True, squeeze=False).ravel()
    longest = max(step.rollout.seconds for step in steps.values())
    for axes, (name, step) in zip(panels, steps.items(), strict=False):
        rollout = step.rollout
        started_at, ended_at = rollout.times()
        lines: list[list[tuple[float, float]]] = []
        colours = []
        for group in np.argsort(rollout.clocks.placed, kind="stable").tolist():
            for index in np.flatnonzero(np.isfinite(ended_at[group])).tolist():
                row, place = len(lines), (group, index)
                lines.append([(started_at[place], row), (ended_at[place], row)])
                fate = TRUNCATED if rollout.truncated[place] else RETURNED
                colours.append(fate if rollout.returned[place] else STOPPED)
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
