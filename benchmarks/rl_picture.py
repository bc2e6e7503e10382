"""Draw what was learned under each policy of `benchmarks.rl`, step by step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.rl_methods import caps
from benchmarks.rl_table import Runs
from examples.tiny_rl.train_log import Entry

# Colours that colour-blind readers can tell apart; dashes separate policies that wait for long trajectories.
STYLES = {
    "off": ("#222222", "-"),
    "off, unbiased": ("#222222", "--"),
    "off, overlong": ("#E69F00", "--"),
    "off, tail batching": ("#E69F00", ":"),
    "uniform": ("#56B4E9", "-"),
    "uniform, unbiased": ("#56B4E9", "--"),
    "darts": ("#0072B2", "-"),
    "darts, longest tail": ("#0072B2", ":"),
    "darts_deadline": ("#009E73", "--"),
    "darts_cut": ("#D55E00", "-"),
    "auto": ("#009E73", "-"),
    "auto, all rules": ("#009E73", ":"),
    "arrol": ("#CC79A7", "-"),
    "darts+arrol": ("#CC79A7", ":"),
    "roulette, unbiased": ("#CC79A7", "--"),
}
OTHER_STYLE = ("#999999", "--")
CAP_STYLES = (("#999999", ":"), ("#999999", "-."), ("#999999", "--"))  # from the lowest
SHOWN = {"right": "share of right answers", "length_mean": "mean length (tokens)", "length_std": "std within a prompt"}


def picture(starts: Mapping[str, Runs], path: Path) -> None:
    """Draw a row for each start, with means over seeds of the unshaped evaluations."""
    figure = Figure(figsize=(11, 3.1 * len(starts) + 0.6), dpi=100, layout="constrained")
    rows = figure.subplots(len(starts), len(SHOWN), sharex=True, squeeze=False)
    for (start, runs), row in zip(starts.items(), rows, strict=True):
        seeds = len(next(iter(runs.values())))
        styles = STYLES | dict(zip(caps(start), CAP_STYLES, strict=True))
        for (name, label), axes in zip(SHOWN.items(), row, strict=True):
            for policy, seed_runs in runs.items():
                colour, dashes = styles.get(policy, OTHER_STYLE)
                at, values = means(seed_runs, name)
                width = 2.2 if policy in ("off", "darts_cut") else 1.3
                axes.plot(at, values, dashes, color=colour, linewidth=width, label=policy)
            axes.set(ylabel=label, title=f"{start}, {seeds} seed{'s' * (seeds > 1)}" if name == "right" else "")
            axes.grid(axis="y", color="#DDDDDD")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            if name != "right":
                axes.set_ylim(bottom=0)
    for axes in rows[-1]:
        axes.set_xlabel("step")
    entries: dict[str, Any] = {}
    for row in rows:  # each start has its own caps
        handles, labels = row[0].get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def means(runs: Mapping[int, Sequence[Entry]], name: str) -> tuple[list[int], list[float]]:
    """Return the evaluated steps, and the mean over seeds at each."""
    found: dict[int, list[float]] = {}
    for entries in runs.values():
        for entry in entries:
            if entry.held_out is not None:
                found.setdefault(entry.step, []).append(getattr(entry.held_out, name))
    return list(found), [fmean(each) for each in found.values()]
