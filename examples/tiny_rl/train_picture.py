"""Draw a training run: accuracy, lengths, time and tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from examples.tiny_rl.colours import BLUE, GREY, ORANGE, SKY
from examples.tiny_rl.train_log import Entry, HeldOut, Training


def picture(entries: Sequence[Entry], policy: str, path: Path) -> None:
    """Draw accuracy, lengths, step time and tokens over the steps."""
    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    ((right, length), (time, tokens)) = figure.subplots(2, 2, sharex=True)
    steps = [(entry.step, entry.training) for entry in entries if entry.training is not None]
    held_out = [(entry.step, entry.held_out) for entry in entries if entry.held_out is not None]
    accuracy(right, steps, held_out)
    lengths(length, steps, held_out)
    stacked(time, steps, ("rollout", "train", "push"), "seconds a step")
    spent(tokens, steps)
    for axes in (right, length, time, tokens):
        axes.grid(axis="y", color="#DDDDDD")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
        axes.set_ylim(bottom=0)
    figure.supxlabel("step", fontsize=10)
    figure.suptitle(f"Training under {policy}", fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def accuracy(axes: Any, steps: Sequence[tuple[int, Training]], held_out: Sequence[tuple[int, HeldOut]]) -> None:
    axes.plot(*columns(steps, "right"), color=GREY, linewidth=1, label="training groups, as shaped")
    at, values = columns(held_out, "right")
    _, errors = columns(held_out, "standard_error")
    axes.errorbar(at, values, errors, color=BLUE, linewidth=2.2, capsize=2, label="held out, unshaped (standard error)")
    axes.set(ylabel="share of right answers", ylim=(0, 1))


def lengths(axes: Any, steps: Sequence[tuple[int, Training]], held_out: Sequence[tuple[int, HeldOut]]) -> None:
    for name, style, text in (("length_mean", "-", "mean"), ("length_p95", "--", "95th percentile")):
        axes.plot(*columns(steps, name), style, color=GREY, linewidth=1, label=f"training groups, {text}")
        axes.plot(*columns(held_out, name), style, color=BLUE, linewidth=2.2, label=f"held out, {text}")
    axes.set_ylabel("length (tokens)")


def stacked(axes: Any, steps: Sequence[tuple[int, Training]], parts: Sequence[str], label: str) -> None:
    at = [step for step, _ in steps]
    values = [[getattr(training.seconds, part) for _, training in steps] for part in parts]
    axes.stackplot(at, values, labels=parts, colors=(BLUE, SKY, ORANGE))
    axes.set_ylabel(label)


def spent(axes: Any, steps: Sequence[tuple[int, Training]]) -> None:
    for name, colour, text in (("generated", ORANGE, "generated"), ("trained", BLUE, "trained on")):
        axes.plot(*columns(steps, name), color=colour, linewidth=2.2, label=text)
    axes.set_ylabel("tokens a step")


def columns(entries: Sequence[tuple[int, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps, and the figure ``name`` of each step."""
    return [step for step, _ in entries], [float(getattr(entry, name)) for _, entry in entries]
