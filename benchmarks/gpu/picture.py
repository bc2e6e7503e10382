"""Draw the README's picture: how long a step's rollout takes on a GPU with each method, and what the method changes.

    python -m benchmarks.gpu.picture docs/images/gpu-steps.png

The times are read from the table of eight steps in docs/results.md, so that picture and page cannot differ.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
TABLE = "| eight steps of "
CELL = re.compile(r"(?P<mean>\d+\.?\d*) ± (?P<error>\d*\.?\d+)")
OURS = "#0072B2"
"""Blue of the palette of Okabe and Ito, which readers with any colour vision can tell from grey."""
OTHERS = "#BBBBBB"


@dataclass(frozen=True, slots=True)
class Bar:
    """One method. ``row``: how the first cell of its row in the table begins. ``effect``: what it changes."""

    row: str
    label: str
    effect: str
    is_ours: bool = False


BARS = (
    Bar("`off`", "vLLM alone", "changes nothing"),
    Bar("tail batching", "tail batching", "slow prompts start again, and come out shorter"),
    Bar("`uniform`", "policy uniform", "shorter answers are returned more often", is_ours=True),
    Bar("`auto`, the same", "carry-over", "changes no lengths; some tokens are of older weights", is_ours=True),
    Bar("`cap`, the same", "carry-over, policy cap", "the longest answers are cut", is_ours=True),
)


def read_seconds(page: str) -> Mapping[str, tuple[float, float]]:
    """Return mean and standard error, in seconds, by the first cell of each row of the table of eight steps.

    Raises:
        ValueError: the page has no such table.
    """
    lines = page.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith(TABLE)), None)
    if begin is None:
        raise ValueError(f"{PAGE.name} has no table that begins with {TABLE!r}")
    seconds = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        name, time, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        found = CELL.fullmatch(time)
        if found is not None:
            seconds[name] = (float(found["mean"]), float(found["error"]))
    return seconds


def draw(seconds: Mapping[str, tuple[float, float]], path: Path) -> None:
    """Draw a bar for each method, with its time in the bar's unit, seconds, and what it changes beside it."""
    figure = Figure(figsize=(9.6, 2.9), dpi=120, layout="constrained")
    axes = figure.subplots()
    longest = seconds[BARS[0].row][0]
    for place, bar in enumerate(BARS):
        mean, error = next(value for name, value in seconds.items() if name.startswith(bar.row))
        colour = OURS if bar.is_ours else OTHERS
        axes.barh(place, mean, xerr=error, color=colour, ecolor="#555555", height=0.66, capsize=3)
        text = f"{mean:.1f} s   {bar.effect}"
        axes.text(mean + error + 0.25, place, text, va="center", fontsize=10)
    axes.set_yticks(range(len(BARS)), [bar.label for bar in BARS], fontsize=10)
    axes.set(xlim=(0, 1.85 * longest), ylim=(len(BARS) - 0.5, -0.5))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Seconds until a training step has its 64 groups of 8 answers", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    draw(read_seconds(PAGE.read_text(encoding="utf-8")), Path(sys.argv[1]))
