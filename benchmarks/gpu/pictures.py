"""Draw the number of running sequences over a rollout, one panel for each policy."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from benchmarks.gpu.policies import PLAIN
from benchmarks.gpu.tables import Table

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#555555"
COLUMNS = 3
SMALL = 9

Timeline = Sequence[tuple[float, int]]


def draw(table: Table, timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw the rollouts of one table.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    rows = {str(row["policy"]): row for row in table.rows}
    shown = [policy for policy in rows if timelines.get(policy)]
    count = ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(10.5, 1.2 + 2.5 * count), dpi=110, layout="constrained")
    panels = figure.subplots(count, COLUMNS, squeeze=False)
    longest = max(float(rows[policy]["seconds"] or 0.0) for policy in shown)
    largest = max(batch for policy in shown for _, batch in timelines[policy])
    plain = timelines.get(PLAIN)
    for axes in list(panels.flat)[len(shown) :]:
        axes.set_visible(False)
    for axes, policy in zip(panels.flat, shown, strict=False):
        seconds = float(rows[policy]["seconds"] or 0.0)
        if plain and policy != PLAIN:
            axes.step(*_steps(plain, float(rows[PLAIN]["seconds"] or 0.0)), where="post", color=GREY, linewidth=1.1)
        axes.fill_between(*_steps(timelines[policy], seconds), step="post", color=BLUE, alpha=0.75, linewidth=0)
        axes.axvline(seconds, color=ORANGE, linewidth=1.4)
        axes.set_title(_note(rows[policy]), loc="left", fontsize=SMALL, color=GREY)
        axes.annotate(
            policy, (0, 1), (0, 18), "axes fraction", textcoords="offset points", fontsize=11, fontweight="bold"
        )
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
        axes.set_ylim(0, 1.05 * largest)
        axes.set_xlim(0, 1.02 * longest)
    figure.supxlabel("seconds (orange: all groups are complete; grey line: plain vLLM)", fontsize=10)
    figure.supylabel("running sequences", fontsize=10)
    figure.savefig(path)


def _steps(timeline: Timeline, seconds: float) -> tuple[list[float], list[int]]:
    """Return the corners of the staircase, from 0 to ``seconds``."""
    points = [(0.0, timeline[0][1]), *timeline, (seconds, 0)]
    return [at for at, _ in points], [batch for _, batch in points]


def _note(row: Mapping[str, str | int | float | None]) -> str:
    seconds, ratio = row["seconds"], row["ratio to plain"]
    wasted = int(row["wasted"] or 0) / max(1, int(row["generated"] or 1))
    relative = "" if ratio is None or row["policy"] == PLAIN else f" ({float(ratio):.2f} x plain)"
    return f"{float(seconds or 0.0):.2f} s{relative}, {wasted:.0%} of the tokens wasted"
