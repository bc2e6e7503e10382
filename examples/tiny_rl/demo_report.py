"""What the demo shows of its two runs: a table, two sentences and a picture. Nothing here talks to a server."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from examples.tiny_rl.colours import BLUE, GREY, ORANGE, SKY

# Each bin reaches from above the edge before it up to its own; the server's length histogram has these edges too.
EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CLEAR = 0.15  # times whose ratio is closer to 1 are called equal: runs of a few seconds vary by as much

SUBTITLE = {"loc": "left", "fontsize": 10, "color": GREY}

Counts = Counter[tuple[str, str, str]]
"""Values of /metrics by name, label "kind" and label "le"; a label that a sample lacks is empty."""


@dataclass(frozen=True)
class Run:
    """All groups of one policy. Lengths are in generated tokens, the end of sequence counted."""

    lengths: Sequence[Sequence[int]]  # of returned trajectories, group by group
    right: int  # returned trajectories with the right answer
    seconds: float  # from the first request to the last answer
    wasted: int = 0  # tokens of candidates that were not returned
    discarded: Sequence[int] = (0,) * len(EDGES)  # those candidates, by how far they came: in each bin of EDGES

    @property
    def flat(self) -> list[int]:
        """The length of every returned trajectory."""
        return [length for group in self.lengths for length in group]

    @property
    def generated(self) -> int:
        """Tokens of all candidates."""
        return sum(self.flat) + self.wasted

    def counted(self, spent: Counts) -> "Run":
        """This run with what the server counted meanwhile."""
        tokens, length = "darts_tokens_total", "darts_trajectory_length_tokens_bucket"
        if spent[tokens, "returned", ""] != sum(self.flat):
            raise RuntimeError(f"{sum(self.flat)} tokens came, the server counted {spent[tokens, 'returned', '']}")
        up_to = [spent[length, "generated", str(float(edge))] for edge in EDGES]
        discarded = np.diff(up_to, prepend=0) - self.bins()
        return replace(self, wasted=spent[tokens, "wasted", ""], discarded=discarded.tolist())

    def bins(self) -> list[int]:
        """How many returned trajectories have a length in each bin of EDGES."""
        up_to = [sum(length <= edge for length in self.flat) for edge in EDGES]
        return [int(count) for count in np.diff(up_to, prepend=0)]


def read_counts(metrics: str) -> Counts:
    """What darts-server counted so far, from the text of /metrics."""
    # Gauges say how things are, and may not know.
    counting = (f for f in text_string_to_metric_families(metrics) if f.type in ("counter", "histogram"))
    samples = [sample for family in counting for sample in family.samples if sample.name.startswith("darts_")]
    return Counter({(s.name, s.labels.get("kind", ""), s.labels.get("le", "")): int(s.value) for s in samples})


# Each row's name, number and form.
ROWS: tuple[tuple[str, Callable[[Run], float], str], ...] = (
    ("right answers", lambda run: run.right / len(run.flat), ".1%"),
    ("length, mean (tokens)", lambda run: float(np.mean(run.flat)), ".1f"),
    ("length, 95th percentile", lambda run: float(np.percentile(run.flat, 95)), ".0f"),
    ("length, longest", lambda run: max(run.flat), ".0f"),
    ("length, std within a group", lambda run: float(np.mean([np.std(group) for group in run.lengths])), ".1f"),
    ("tokens generated", lambda run: run.generated, ",.0f"),
    ("tokens returned", lambda run: sum(run.flat), ",.0f"),
    ("tokens wasted", lambda run: run.wasted, ",.0f"),
    ("wall time (s)", lambda run: run.seconds, ".1f"),
)
ENDS = ("right answers", "length, std within a group", "tokens wasted")  # a rule follows these


def table(raw: Run, shaped: Run) -> Table:
    """The two runs side by side; the ratio is shaped over raw."""
    title = f"{len(raw.lengths)} groups, {len(raw.flat)} trajectories returned by each run"
    result = Table("", title=title, caption="One run each: numbers vary from run to run, times most of all.")
    for column in ("raw", "shaped", "ratio"):
        result.add_column(column, justify="right")
    for name, number, form in ROWS:
        before, after = number(raw), number(shaped)
        ratio = f"{after / before:.2f}" if before else "-"
        result.add_row(name, format(before, form), format(after, form), ratio, end_section=name in ENDS)
    return result


def verdict(raw: Run, shaped: Run) -> str:
    """What the numbers say, in two sentences."""
    time = shaped.seconds / raw.seconds
    pace = "about as fast" if abs(time - 1) < CLEAR else "faster" if time < 1 else "slower"
    count = len(shaped.flat)
    return (
        f"Shaping generated {shaped.generated / raw.generated:.2f} x the tokens and took {time:.2f} x the time for "
        f"the same number of trajectories ({count}): here it was {pace}.\n"
        f"Its trajectories have {np.mean(shaped.flat):.1f} tokens on average (raw: {np.mean(raw.flat):.1f}) and "
        f"{max(shaped.flat)} at most (raw: {max(raw.flat)}); {shaped.right / count:.0%} are right "
        f"(raw: {raw.right / len(raw.flat):.0%})."
    )


def picture(raw: Run, shaped: Run, path: Path) -> None:
    """Draw how long trajectories are: counts by length above, the tail of the returned ones below."""
    figure = Figure(figsize=(8.4, 7.6), dpi=150, layout="constrained")
    counts, tail = figure.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
    means = f"{np.mean(raw.flat):.1f} tokens raw, {np.mean(shaped.flat):.1f} shaped"
    figure.suptitle(f"Mean length of returned trajectories: {means}", fontsize=13, fontweight="bold")

    edges, dropped = [0.5, *EDGES], sum(shaped.discarded)
    bars = {"x": edges[:-1], "width": np.diff(edges), "align": "edge", "edgecolor": "white"}
    counts.bar(height=shaped.bins(), color=BLUE, label="shaped: returned", **bars)
    label = f"shaped: not returned ({dropped} of {dropped + len(shaped.flat)})"
    counts.bar(height=shaped.discarded, bottom=shaped.bins(), color=SKY, hatch="///", label=label, **bars)
    counts.stairs(raw.bins(), edges, color=ORANGE, linewidth=2.2, label="raw: all returned")
    counts.set_ylabel("candidates")
    counts.set_title("Generated, and what was kept: a candidate not returned counts as far as it came", **SUBTITLE)
    counts.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3)

    for name, run, colour in (("raw", raw, ORANGE), ("shaped", shaped, BLUE)):
        lengths, longest = np.array(run.flat), max(run.flat)
        steps = np.arange(1, longest + 1)
        longer = [float(np.mean(lengths >= step)) for step in steps]
        tail.step(steps, longer, where="pre", color=colour, linewidth=2.2, label=f"{name}: longest {longest}")
        tail.plot(longest, longer[-1], "o", color=colour)
    tail.set(yscale="log", ylabel="share of returned trajectories", xlabel="length (generated tokens)")
    tail.yaxis.set_major_locator(FixedLocator([1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]))
    tail.yaxis.set_minor_locator(NullLocator())
    tail.yaxis.set_major_formatter(lambda share, _: f"{share:.1%}" if share < 0.01 else f"{share:.0%}")
    tail.set_title("The tail: share of returned trajectories that are at least so long", **SUBTITLE)
    tail.legend(frameon=False, loc="lower left")

    tail.set_xscale("log", base=2)
    tail.set_xlim(0.5 if raw.bins()[0] + shaped.bins()[0] + shaped.discarded[0] else 1, EDGES[-1] * 1.1)
    tail.xaxis.set_major_locator(FixedLocator(EDGES))
    tail.xaxis.set_major_formatter("{x:.0f}")
    for axes in (counts, tail):
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
