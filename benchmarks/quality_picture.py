"""Draw the reliability diagrams of `benchmarks.quality`: predicted probabilities against observed shares."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from darts_server.policy.pruning.score_metrics import reliability
from examples.tiny_rl.colours import BLUE, GREY, ORANGE

Pairs = tuple[Sequence[float], Sequence[float]]
"""Probabilities q in [0, 1], and for each trajectory 1 if its answer is right, else 0."""
MIN_TRAJECTORIES = 10
"""In a bin; the share of fewer is noise."""


def picture(kinds: Mapping[str, Pairs], path: Path) -> None:
    """Draw a diagram for each kind of score, side by side, with a histogram of q below."""
    figure = Figure(figsize=(3.6 * len(kinds), 4.6), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(kinds), sharex=True, squeeze=False, height_ratios=(3, 1))
    for (kind, (probabilities, right)), above, below in zip(kinds.items(), axes[0], axes[1], strict=True):
        bars = [bar for bar in reliability(probabilities, right) if bar.weight >= MIN_TRAJECTORIES]
        promised, observed = [bar.predicted for bar in bars], [bar.observed for bar in bars]
        error = [np.sqrt(bar.observed * (1 - bar.observed) / bar.weight) for bar in bars]
        above.plot((0, 1), (0, 1), color=GREY, linewidth=1, label="calibrated")
        above.errorbar(promised, observed, error, color=BLUE, marker="o", markersize=4, capsize=2, label="measured")
        above.set(title=kind, xlim=(0, 1), ylim=(0, 1))
        below.hist(probabilities, bins=np.linspace(0, 1, 31).tolist(), color=ORANGE)
        for each in (above, below):
            each.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share of right answers (± standard error)")
    axes[0][0].legend(frameon=False, fontsize=9)
    axes[1][0].set_ylabel("trajectories")
    figure.supxlabel("probability q of a right answer, at the detection point", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
