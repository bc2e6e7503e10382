"""Tables of `benchmarks.rl`: what was learned under each policy, and what it cost. Nothing here runs anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import fmean, median
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.rl_methods import BASE
from benchmarks.tables import markdown
from examples.tiny_rl.train_log import Entry, HeldOut, Training

LENGTHS = ("length_mean", "length_p95", "length_std")

Runs = Mapping[str, Mapping[int, Sequence[Entry]]]
"""Entries by policy and seed; every policy has the same seeds."""

Rights = NDArray[np.float64]
"""The share of right answers to each held-out prompt, in the same order for all runs from one start."""


@dataclass(frozen=True)
class Point:
    """An evaluation: what had been spent until then, and the result.

    ``generated``: tokens of all candidates. ``decode_steps``: of the engine, in rollouts.
    """

    steps: float
    generated: float
    decode_steps: float
    seconds: float
    right: float
    rights: Rights


@dataclass(frozen=True)
class Difference:
    """How much larger one policy's share of right answers is than another's.

    ``error``: the larger of two standard errors of the mean, over prompts (with their means over seeds) and over seeds.
    The first says what other prompts and samples would change; with few seeds the second is itself a rough estimate of
    what other runs would.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, one: Sequence[Rights], other: Sequence[Rights]) -> Self:
        """Compare by prompt and seed; both have the same seeds, in the same order."""
        each = np.array(one) - np.array(other)  # [seeds, prompts]
        return cls(float(each.mean()), max(standard_error(each.mean(axis=0)), standard_error(each.mean(axis=1))))

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"


def standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / sqrt(len(values))) if len(values) > 1 else 0.0


def learning_curve(entries: Sequence[Entry]) -> list[Point]:
    """Return the run's evaluations, with what had been spent until each."""
    points, generated, decode_steps, seconds = [], 0.0, 0.0, 0.0
    for entry in entries:
        if entry.training is not None:
            generated += entry.training.generated
            decode_steps += entry.training.decode_steps
            seconds += entry.training.seconds.total
        if entry.held_out is not None:
            spent = (entry.step, generated, decode_steps, seconds)
            points.append(Point(*spent, entry.held_out.right, rights_of(entry.held_out)))
    return points


def rights_of(held_out: HeldOut) -> Rights:
    return np.concatenate([np.asarray(rights, float) for rights in held_out.rights.values()])


def rights_at(points: Sequence[Point], budget: float, axis: str) -> Rights:
    """Interpolate each prompt's share of right answers when ``budget`` had been spent."""
    spent = [getattr(point, axis) for point in points]
    return np.array([np.interp(budget, spent, prompt) for prompt in np.transpose([point.rights for point in points])])


def summary(starts: Mapping[str, Runs]) -> str:
    """Format how right each policy's model is at the end, and the decode steps of a training step, from all starts."""
    policies = list(dict.fromkeys(policy for runs in starts.values() for policy in runs))
    head = ["policy", *(column for start in starts for column in (f"{start}: right, minus off", "decode steps, late"))]
    rows = []
    for policy in policies:
        row = [policy]
        for runs in starts.values():
            if policy not in runs:
                row += ["", ""]
                continue
            final = final_rights(runs, policy)
            right = f"{np.mean(final):.3f}" if policy == BASE else minus(final, final_rights(runs, BASE))
            row += [right, decode_steps(runs, policy)]
        rows.append(row)
    return markdown(head, rows)


def decode_steps(runs: Runs, policy: str) -> str:
    """Format the mean decode steps of a training step, and those in the last third of the runs."""
    whole = [trainings(entries) for entries in runs[policy].values()]
    late = [steps[-ceil(len(steps) / 3) :] for steps in whole]
    return ", ".join(f"{fmean(step.decode_steps for steps in each for step in steps):.0f}" for each in (whole, late))


def tables(title: str, runs: Runs) -> str:
    """Format both tables of one start."""
    return f"{title}: what was learned\n\n{learned_table(runs)}\n\n{title}: what it cost\n\n{cost_table(runs)}"


def learned_table(runs: Runs) -> str:
    """Format the final evaluation, the share of right answers at equal cost, and differences to `off`."""
    head = ["policy", "right", "minus off", "by difficulty", "length mean", "p95", "std within a prompt"]
    head += ["right at equal time", "minus off", "at equal decode steps", "minus off", "at equal tokens", "minus off"]
    rows = []
    for policy, seeds in runs.items():
        final = [last_held_out(entries) for entries in seeds.values()]
        right = spread([each.right for each in final], ".3f")
        shares = {name: fmean(fmean(each.rights[name]) for each in final) for name in final[0].rights}
        difficulties = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        lengths = (spread([getattr(each, name) for each in final], ".1f") for name in LENGTHS)
        row = [policy, right, minus(final_rights(runs, policy), final_rights(runs, BASE)), difficulties, *lengths]
        for axis in ("seconds", "decode_steps", "generated"):
            own, base = (rights_at_equal(runs, each, axis) for each in (policy, BASE))
            row += [f"{np.mean(own):.3f}", minus(own, base)]
        rows.append(row)
    return markdown(head, rows)


def minus(one: Sequence[Rights], base: Sequence[Rights]) -> str:
    """Format how much larger the first is; nothing for a policy's difference to itself."""
    return "" if one is base or np.array_equal(one, base) else str(Difference.of(one, base))


def final_rights(runs: Runs, policy: str) -> list[Rights]:
    """Return each seed's last evaluation."""
    return [rights_of(last_held_out(entries)) for entries in runs[policy].values()]


def rights_at_equal(runs: Runs, policy: str, axis: str) -> list[Rights]:
    """Return each seed's evaluation when it had spent what the seed's cheapest policy spent in total."""
    curves = {seed: [learning_curve(seeds[seed]) for seeds in runs.values()] for seed in runs[policy]}
    budgets = {seed: min(getattr(points[-1], axis) for points in each) for seed, each in curves.items()}
    return [rights_at(learning_curve(entries), budgets[seed], axis) for seed, entries in runs[policy].items()]


def cost_table(runs: Runs) -> str:
    """Format tokens, decode steps and seconds.

    "off-policy": the share of trained tokens that older weights sampled. "in the last third": decode steps once a
    policy has learned what it must learn of the prompts, which in a longer run is most of the time.
    """
    head = ["policy", "generated a step", "trained on", "decode steps", "in the last third", "off-policy", "truncated"]
    head += ["reward variance", "rollout s", "train s", "push s", "step / off"]
    rows = []
    for policy, seeds in runs.items():
        steps = [step for entries in seeds.values() for step in trainings(entries)]
        tokens = [f"{fmean(getattr(s, what) for s in steps):.0f}" for what in ("generated", "trained")]
        tokens += decode_steps(runs, policy).split(", ")
        seconds = (f"{fmean(getattr(s.seconds, part) for s in steps):.2f}" for part in ("rollout", "train", "push"))
        pace = [step_seconds(entries) / step_seconds(runs[BASE][seed]) for seed, entries in seeds.items()]
        off_policy = f"{sum(s.off_policy * s.trained for s in steps) / sum(s.trained for s in steps):.1%}"
        truncated = f"{fmean(step.truncated for step in steps):.1%}"
        variance = f"{fmean(step.reward_variance for step in steps):.3f}"
        rows.append([policy, *tokens, off_policy, truncated, variance, *seconds, spread(pace, ".2f")])
    return markdown(head, rows)


def step_seconds(entries: Sequence[Entry]) -> float:
    """Return the median over the run's steps: other load on the machine affects single steps."""
    return median(training.seconds.total for training in trainings(entries))


def last_held_out(entries: Sequence[Entry]) -> HeldOut:
    return [entry.held_out for entry in entries if entry.held_out is not None][-1]


def trainings(entries: Sequence[Entry]) -> list[Training]:
    return [entry.training for entry in entries if entry.training is not None]


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean, with the smallest and largest."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{fmean(values):{form}} [{min(values):{form}}, {max(values):{form}}]"
