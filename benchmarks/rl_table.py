"""Tables of `benchmarks.rl`: what was learned under each policy, and what it cost. Nothing here runs anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, median

import numpy as np

from examples.tiny_rl.train_log import Entry, HeldOut, Training

BASE = "off"
LEVELS = (0.85, 0.90)
AXES = ("steps", "generated", "seconds")
LENGTHS = ("length_mean", "length_p95", "length_std")

Runs = Mapping[str, Mapping[int, Sequence[Entry]]]
"""Entries by policy and seed; every policy has the same seeds."""


@dataclass(frozen=True)
class Point:
    """An evaluation: what had been spent until then, and the result. ``generated``: tokens of all candidates."""

    steps: float
    generated: float
    seconds: float
    right: float


def learning_curve(entries: Sequence[Entry]) -> list[Point]:
    """Return the run's evaluations, with what had been spent until each."""
    points, generated, seconds = [], 0.0, 0.0
    for entry in entries:
        if entry.training is not None:
            generated += entry.training.generated
            seconds += entry.training.seconds.total
        if entry.held_out is not None:
            points.append(Point(entry.step, generated, seconds, entry.held_out.right))
    return points


def spent_until(points: Sequence[Point], level: float, axis: str) -> float | None:
    """Interpolate what had been spent when ``level`` was first reached; ``None`` if it never was."""
    before = points[0]
    for point in points:
        if point.right >= level:
            share = (level - before.right) / (point.right - before.right) if point.right > before.right else 1.0
            spent, then = getattr(before, axis), getattr(point, axis)
            return float(spent + min(max(share, 0.0), 1.0) * (then - spent))
        before = point
    return None


def right_at(points: Sequence[Point], budget: float, axis: str) -> float:
    """Interpolate the share of right answers when ``budget`` had been spent."""
    return float(np.interp(budget, [getattr(p, axis) for p in points], [p.right for p in points]))


def tables(title: str, runs: Runs) -> str:
    """Format both tables of one start."""
    return f"{title}: what was learned\n\n{learned_table(runs)}\n\n{title}: what it cost\n\n{cost_table(runs)}"


def learned_table(runs: Runs) -> str:
    """Format the final evaluation, and the share of right answers at equal time and at equal tokens."""
    head = ["policy", "right", "length mean", "p95", "std within a prompt", "right at equal time", "at equal tokens"]
    rows = []
    for policy, seeds in runs.items():
        final = [last_held_out(entries) for entries in seeds.values()]
        error = sqrt(sum(each.standard_error**2 for each in final)) / len(final)
        right = spread([each.right for each in final], ".3f")
        lengths = (spread([getattr(each, name) for each in final], ".1f") for name in LENGTHS)
        equal = (f"{fmean(right_at_equal(runs, policy, axis)):.3f}" for axis in ("seconds", "generated"))
        rows.append([policy, f"{right} ± {error:.3f}", *lengths, *equal])
    return markdown(head, rows)


def right_at_equal(runs: Runs, policy: str, axis: str) -> list[float]:
    """Return each seed's share of right answers when it had spent what the seed's cheapest policy spent in total."""
    curves = {seed: [learning_curve(seeds[seed]) for seeds in runs.values()] for seed in runs[policy]}
    budgets = {seed: min(getattr(points[-1], axis) for points in each) for seed, each in curves.items()}
    return [right_at(learning_curve(entries), budgets[seed], axis) for seed, entries in runs[policy].items()]


def cost_table(runs: Runs) -> str:
    """Format tokens and seconds of the steps; and steps, tokens and time to each level, relative to `off`."""
    head = ["policy", "generated a step", "trained on", "truncated", "reward variance"]
    head += ["rollout s", "train s", "push s", "step / off"]
    head += [f"to {level:.2f}: steps, tokens, time" for level in LEVELS]
    rows = []
    for policy, seeds in runs.items():
        steps = [entry.training for entries in seeds.values() for entry in entries if entry.training is not None]
        tokens = [f"{fmean(step.generated for step in steps):.0f}", f"{fmean(step.trained for step in steps):.0f}"]
        seconds = (f"{fmean(getattr(s.seconds, part) for s in steps):.2f}" for part in ("rollout", "train", "push"))
        pace = [step_seconds(entries) / step_seconds(runs[BASE][seed]) for seed, entries in seeds.items()]
        truncated = f"{fmean(step.truncated for step in steps):.1%}"
        variance = f"{fmean(step.reward_variance for step in steps):.3f}"
        to = (", ".join(relative(runs, policy, level, axis) for axis in AXES) for level in LEVELS)
        rows.append([policy, *tokens, truncated, variance, *seconds, spread(pace, ".2f"), *to])
    return markdown(head, rows)


def step_seconds(entries: Sequence[Entry]) -> float:
    """Return the median over the run's steps: other load on the machine affects single steps."""
    return median(training.seconds.total for training in trainings(entries))


def relative(runs: Runs, policy: str, level: float, axis: str) -> str:
    """Format what it took to reach ``level``, relative to `off` with the same seed: the median over seeds.

    A run that never reaches it counts as infinitely expensive.
    """
    ratios = []
    for seed, entries in runs[policy].items():
        own, base = (spent_until(learning_curve(each), level, axis) for each in (entries, runs[BASE][seed]))
        if base:
            ratios.append(float("inf") if own is None else own / base)
    middle = median(ratios) if ratios else float("nan")
    return f"{middle:.2f}" if np.isfinite(middle) else "never" if ratios else "-"


def last_held_out(entries: Sequence[Entry]) -> HeldOut:
    return [entry.held_out for entry in entries if entry.held_out is not None][-1]


def trainings(entries: Sequence[Entry]) -> list[Training]:
    return [entry.training for entry in entries if entry.training is not None]


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, with the smallest and largest."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{fmean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
