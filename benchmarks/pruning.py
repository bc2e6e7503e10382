"""What pruning by quality does to labels and to rewards, on synthetic trajectories: the tables of `docs/pruning.md`.

    python -m benchmarks.pruning

The first table: what chances are worth that were calibrated by few labels, as published and made monotone. The second:
errors of prior and chances where the survivors' labels are taken as they are, and with inverse propensity weights. The
third: the mean variance of rewards within a group, for each way to prune.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.calibration import Calibration, Calibrator, Label
from darts_server.policy.diagnostics import auc, calibration_error
from darts_server.policy.survival import Aim, Pruning

Floats = NDArray[np.float64]

OURS = Calibration(cold_steps=0)
SEPARATIONS = {"weak": 0.4, "strong": 1.5}
"""How far apart the scores of right and wrong ones are, as log-odds, in standard deviations of either."""
WORLDS = 20
TRAJECTORIES = 30_000
PROMPTS = 4_000
CANDIDATES = 16
SEEN = 1.5
"""Spread of the log-odds that the score at a detection point tells."""
MOST_RIGHT = 0.7
"""Log-odds of the middle trajectory: six in ten are right."""
DIFFICULTY, WITHIN = 1.2, 2.5
"""Spread of the log-odds over prompts, and over the trajectories of one prompt."""


def main() -> None:
    print(
        "| score | labels | AUC of the score | of q, published | monotone | calibration error, published | monotone |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, separation in SEPARATIONS.items():
        for labels in (256, 1024, 4096):
            print(f"| {name} | {labels:,} | " + " | ".join(f"{x:.3f}" for x in calibrated(separation, labels)) + " |")
    print()
    print("| lambda | error of the prior, plain | corrected | calibration error, plain | corrected |")
    print("|---|---|---|---|---|")
    for strength in (0.5, 1.0, 2.0):
        priors, errors = zip(*(labelled(strength, corrected) for corrected in (False, True)), strict=True)
        print(f"| {strength:g} | {priors[0]:+.3f} | {priors[1]:+.3f} | {errors[0]:.3f} | {errors[1]:.3f} |")
    print()
    print("| share right | at random | paper's, by all q | aimed by all q | aimed by the group's q |")
    print("|---|---|---|---|---|")
    for middle in (-1.5, 0.0, 1.5):
        print("| " + " | ".join(rewards(middle)) + " |")


def calibrated(separation: float, labels: int) -> list[float]:
    """AUC of the score, AUC of q for both ways to calibrate, calibration error of both; means over synthetic worlds."""
    found = []
    for seed in range(WORLDS):
        rng = np.random.default_rng(seed)
        right = (rng.random(labels + TRAJECTORIES // 10) < sigmoid(MOST_RIGHT)).astype(np.float64)
        scores = sigmoid(rng.normal(size=right.size) + separation * right)
        told = [scores[labels:]]
        for calibration in (OURS.as_published, OURS):
            calibrator = Calibrator(calibration)
            for score, target in zip(scores[:labels], right[:labels], strict=True):
                calibrator.add(Label(score, target))
            told.append(np.asarray([calibrator.probability(s) for s in scores[labels:]]))
        unseen = right[labels:]
        found.append([*(auc(q, unseen) or 0.0 for q in told), *(calibration_error(q, unseen) or 0.0 for q in told[1:])])
    return [fmean(each) for each in zip(*found, strict=True)]


def labelled(strength: float, corrected: bool) -> tuple[float, float]:
    """Errors of prior and chances over all trajectories, pruned at one detection point and calibrated at the next."""
    rng = np.random.default_rng(0)
    seen_early, seen_late = rng.normal(0, SEEN, (2, TRAJECTORIES))
    right = (rng.random(TRAJECTORIES) < sigmoid(seen_early + seen_late + MOST_RIGHT)).astype(np.float64)
    early, late = sigmoid(seen_early + MOST_RIGHT), sigmoid(seen_late + MOST_RIGHT)
    aim = Pruning(balance_strength=strength).aim(early)
    survivals = [aim.survival(q) for q in early]
    kept = rng.random(TRAJECTORIES) < survivals
    calibrator = Calibrator(replace(OURS.as_published, buffer=TRAJECTORIES, corrected=corrected))
    for i in np.flatnonzero(kept):
        calibrator.add(Label(late[i], right[i], survivals[i]))
    error = calibration_error([calibrator.probability(s) for s in late], right)
    return calibrator.prior - float(right.mean()), error or 0.0


def rewards(middle: float) -> list[str]:
    """Share of right ones, and the mean variance of rewards within a group for each way to prune."""
    rng = np.random.default_rng(0)
    prompts = rng.normal(middle, DIFFICULTY, (PROMPTS, 1))
    q = sigmoid(prompts + WITHIN * rng.normal(size=(PROMPTS, CANDIDATES)))
    right, lots = rng.random(q.shape) < q, rng.random(q.shape)
    ways: list[Callable[[Floats], Aim]] = [
        by_all(Pruning(balance_strength=0.0), q),
        by_all(Pruning(), q),
        by_all(Pruning(aimed=True), q),
        Pruning(aimed=True).aim,
    ]
    return [f"{right.mean():.2f}", *(f"{variance(way, q, right, lots):.3f}" for way in ways)]


def by_all(pruning: Pruning, q: Floats) -> Callable[[Floats], Aim]:
    aim = pruning.aim(q.ravel())
    return lambda _: aim


def variance(way: Callable[[Floats], Aim], q: Floats, right: NDArray[np.bool_], lots: Floats) -> float:
    survivals = np.asarray([[aim.survival(x) for x in group] for group in q for aim in [way(group)]])
    kept = lots < survivals
    some = kept.any(axis=1)
    shares = (right & kept).sum(axis=1)[some] / kept.sum(axis=1)[some]
    return float((shares * (1 - shares)).mean())


def sigmoid(x: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float64)


if __name__ == "__main__":
    main()
