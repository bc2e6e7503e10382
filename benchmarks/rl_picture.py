"""Draw what a training step takes and what is learned by each method of `benchmarks.rl` that one would choose from."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from benchmarks.rl_methods import BASE, caps
from benchmarks.rl_table import Difference, Runs, final_rights, step_seconds

OURS, OTHERS = "#0072B2", "#BBBBBB"
"""Okabe and Ito's blue; grey for what one has without us."""


def bars(starts: Mapping[str, Runs], path: Path) -> None:
    """Draw a row for each method, a panel for each start: the time of a training step relative to `off` as a bar.

    Beside it: how many more answers are right in the end, in points of 100, with the standard error, see `Difference`.
    """
    figure = Figure(figsize=(5.2 * len(starts) + 1.6, 2.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(starts), squeeze=False)[0]
    for (start, runs), axes in zip(starts.items(), panels, strict=True):
        rows = list(shown(start, runs))
        times = [time_of(runs, policy) for _, policy in rows]
        colours = [OURS if policy == "auto" else OTHERS for _, policy in rows]
        drawn = axes.barh(range(len(rows)), times, color=colours, height=0.66)
        axes.bar_label(drawn, [f"{time:.2f}" for time in times], padding=4, fontsize=10)
        for row, (_, policy) in enumerate(rows):
            right = Difference.of(final_rights(runs, policy), final_rights(runs, BASE))
            share = np.mean(final_rights(runs, BASE))
            text = f"{share:.0%} right" if policy == BASE else f"{100 * right.mean:+.1f} ± {100 * right.error:.1f}"
            axes.text(1.5, row, text, va="center", fontsize=10)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=10)
        axes.set(xlim=(0, 1.95), ylim=(len(rows) - 0.5, -0.5))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"{start}: time of a step, and right answers", loc="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def shown(start: str, runs: Runs) -> Iterator[tuple[str, str]]:
    """Yield the label and the name of each method that is drawn, as far as it was run."""
    yield "vLLM alone", BASE
    limits = [policy for policy in runs if policy in caps(start)]
    if limits:
        best = max(limits, key=lambda policy: float(np.mean(final_rights(runs, policy))))
        yield f"max_tokens {best.rpartition(' ')[2]}, best in hindsight", best
    for label, policy in (("tail batching", f"{BASE}, tail batching"), ("darts-server, auto", "auto")):
        if policy in runs:
            yield label, policy


def time_of(runs: Runs, policy: str) -> float:
    """Return the seconds of a training step relative to `off`: the mean over seeds of ratios of medians over steps."""
    return fmean(step_seconds(entries) / step_seconds(runs[BASE][seed]) for seed, entries in runs[policy].items())
