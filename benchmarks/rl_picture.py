"""Draw what was learned under each policy of `benchmarks.rl`: step by step, and against what it cost."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.rl_methods import BASE, caps
from benchmarks.rl_table import Difference, Runs, final_rights, late_decode_steps
from examples.tiny_rl.train_log import Entry

# Colours that colour-blind readers can tell apart; dashes separate policies that wait for long trajectories.
STYLES = {
    "off": ("#222222", "-"),
    "off, unbiased": ("#222222", "--"),
    "off, overlong": ("#A6761D", "--"),
    "off, tail batching": ("#E69F00", ":"),
    "off, carry resume": ("#117733", "-"),
    "uniform": ("#56B4E9", "-"),
    "uniform, unbiased": ("#56B4E9", "--"),
    "darts": ("#0072B2", "-"),
    "darts, longest tail": ("#0072B2", ":"),
    "darts_cut": ("#D55E00", "-"),
    "auto": ("#009E73", "-"),
    "auto, all rules": ("#009E73", ":"),
    "arrol": ("#CC79A7", "-"),
    "darts+arrol": ("#CC79A7", ":"),
    "cap": ("#CC79A7", "-."),
    "cap, unguarded": ("#882255", "-."),
    "cap, lost 0.1": ("#882255", ":"),
    "darts_cut, lost 0.1": ("#882255", "-"),
}
OTHER_STYLE = ("#999999", "--")
CAP_STYLES = (("#999999", ":"), ("#999999", "-."), ("#999999", "--"))  # from the lowest
COSTS = (0.2, 0.3, 0.5, 0.7, 1.0)
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


def tradeoff(starts: Mapping[str, Runs], path: Path) -> None:
    """Draw a panel for each start: how right each policy's model is at the end, against what a step cost.

    Cost is in decode steps of the engine in the last third of a run, where no policy is still learning about its
    prompts: relative to `off`, in logarithms. Bars are standard errors, see `Difference`.
    """
    columns = min(2, len(starts))
    rows = ceil(len(starts) / columns)
    figure = Figure(figsize=(5.6 * columns, 3.5 * rows + 0.9), dpi=100, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat[len(starts) :]:
        panel.remove()
    entries: dict[str, Any] = {}
    for (start, runs), axes in zip(starts.items(), panels.flat, strict=False):
        for policy in runs:
            colour, marker = _marker(policy)
            right = Difference.of(final_rights(runs, policy), final_rights(runs, BASE))
            cost = late_decode_steps(runs, policy) / late_decode_steps(runs, BASE)
            drawn = axes.errorbar(cost, right.mean, right.error, fmt=marker, color=colour, elinewidth=0.8, markersize=6)
            entries.setdefault("fixed max_tokens" if policy in caps(start) else policy, drawn)
            if policy in caps(start):
                label = policy.rpartition(" ")[2]  # the limit in tokens
                axes.annotate(label, (cost, right.mean), (4, 4), textcoords="offset points", fontsize=8, color=colour)
        axes.axhline(0, color="#222222", linewidth=0.8)
        seeds = len(runs[BASE])
        axes.set(xscale="log", xlim=(0.17, 1.65), title=f"{start}, {seeds} seed{'s' * (seeds > 1)}")
        axes.set_xticks(COSTS, [f"{cost:g}" for cost in COSTS], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(color="#EEEEEE")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("decode steps of a training step, off = 1")
    for row in panels:
        row[0].set_ylabel("right answers, minus off")
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _marker(policy: str) -> tuple[str, str]:
    """Return colour and shape: those with long rounds are triangles, other controls squares."""
    name = policy.removesuffix(", long rounds")
    colour, _ = STYLES.get(name, OTHER_STYLE)
    is_control = policy.startswith(BASE) and name == policy
    shape = "^" if name != policy else "s" if is_control else "D" if policy == "auto, all rules" else "o"
    return colour, shape


def means(runs: Mapping[int, Sequence[Entry]], name: str) -> tuple[list[int], list[float]]:
    """Return the evaluated steps, and the mean over seeds at each."""
    found: dict[int, list[float]] = {}
    for entries in runs.values():
        for entry in entries:
            if entry.held_out is not None:
                found.setdefault(entry.step, []).append(getattr(entry.held_out, name))
    return list(found), [fmean(each) for each in found.values()]
