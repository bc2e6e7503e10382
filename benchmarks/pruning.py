"""Simulate pruning by quality on synthetic trajectories; print the tables of `docs/pruning.md`.

    python -m benchmarks.pruning

The first table compares calibrations from few labels: as published, and made monotone. The second shows the errors of
the prior and of the calibrated probabilities if survivors' labels are used as they are, and with inverse propensity
weights. The third has the mean variance of rewards within a group, for each way to prune.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import Calibration, Calibrator, Label
from darts_server.policy.pruning.score_metrics import auc, calibration_error
from darts_server.policy.pruning.survival import Pruning, SurvivalCurve

Floats = NDArray[np.float64]

OURS = Calibration(cold_steps=0)
SEPARATIONS = {"weak": 0.4, "strong": 1.5}
"""Distance between the mean scores (log-odds) of right and wrong trajectories, in standard deviations of either."""
DATA_SETS = 20
TRAJECTORIES = 30_000
PROMPTS = 4_000
CANDIDATES = 16
VISIBLE = 1.5
"""Spread of the part of the log-odds that the score at a detection point contains."""
MEDIAN_LOG_ODDS = 0.7
"""Of a trajectory: six in ten are right."""
DIFFICULTY, WITHIN = 1.2, 2.5
"""Spread of the log-odds over prompts, and over the trajectories of one prompt."""


def main() -> None:
    print(
        "| score | labels | AUC of the score | of q, published | monotone | calibration error, published | monotone |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, separation in SEPARATIONS.items():
        for labels in (256, 1024, 4096):
            print(
                f"| {name} | {labels:,} | "
                + " | ".join(f"{x:.3f}" for x in compare_calibrations(separation, labels))
                + " |"
            )
    print()
    print("| lambda | error of the prior, plain | corrected | calibration error, plain | corrected |")
    print("|---|---|---|---|---|")
    for strength in (0.5, 1.0, 2.0):
        priors, errors = zip(*(label_errors(strength, corrected) for corrected in (False, True)), strict=True)
        print(f"| {strength:g} | {priors[0]:+.3f} | {priors[1]:+.3f} | {errors[0]:.3f} | {errors[1]:.3f} |")
    print()
    print("| share right | at random | paper's, by all q | aimed by all q | aimed by the group's q |")
    print("|---|---|---|---|---|")
    for middle in (-1.5, 0.0, 1.5):
        print("| " + " | ".join(reward_variances(middle)) + " |")


def compare_calibrations(separation: float, labels: int) -> list[float]:
    """Return AUC of the score, AUC of q and calibration error for both calibrations; means over synthetic data sets."""
    found = []
    for seed in range(DATA_SETS):
        rng = np.random.default_rng(seed)
        right = (rng.random(labels + TRAJECTORIES // 10) < sigmoid(MEDIAN_LOG_ODDS)).astype(np.float64)
        scores = sigmoid(rng.normal(size=right.size) + separation * right)
        estimates = [scores[labels:]]
        for calibration in (OURS.as_published, OURS):
            calibrator = Calibrator(calibration)
            for score, target in zip(scores[:labels], right[:labels], strict=True):
                calibrator.add(Label(score, target))
            estimates.append(np.asarray([calibrator.probability(s) for s in scores[labels:]]))
        unseen = right[labels:]
        found.append(
            [*(auc(q, unseen) or 0.0 for q in estimates), *(calibration_error(q, unseen) or 0.0 for q in estimates[1:])]
        )
    return [fmean(each) for each in zip(*found, strict=True)]


def label_errors(strength: float, corrected: bool) -> tuple[float, float]:
    """Return the errors of prior and probabilities, pruned at one detection point and calibrated at the next."""
    rng = np.random.default_rng(0)
    seen_early, seen_late = rng.normal(0, VISIBLE, (2, TRAJECTORIES))
    right = (rng.random(TRAJECTORIES) < sigmoid(seen_early + seen_late + MEDIAN_LOG_ODDS)).astype(np.float64)
    early, late = sigmoid(seen_early + MEDIAN_LOG_ODDS), sigmoid(seen_late + MEDIAN_LOG_ODDS)
    aim = Pruning(balance_strength=strength).fit(early)
    survivals = [aim.survival(q) for q in early]
    kept = rng.random(TRAJECTORIES) < survivals
    calibrator = Calibrator(replace(OURS.as_published, buffer=TRAJECTORIES, corrected=corrected))
    for i in np.flatnonzero(kept):
        calibrator.add(Label(late[i], right[i], survivals[i]))
    error = calibration_error([calibrator.probability(s) for s in late], right)
    return calibrator.prior - float(right.mean()), error or 0.0


def reward_variances(middle: float) -> list[str]:
    """Return the share of right trajectories, and the mean reward variance within a group for each way to prune."""
    rng = np.random.default_rng(0)
    prompts = rng.normal(middle, DIFFICULTY, (PROMPTS, 1))
    q = sigmoid(prompts + WITHIN * rng.normal(size=(PROMPTS, CANDIDATES)))
    right, draws = rng.random(q.shape) < q, rng.random(q.shape)
    ways: list[Callable[[Floats], SurvivalCurve]] = [
        shared_aim(Pruning(balance_strength=0.0), q),
        shared_aim(Pruning(), q),
        shared_aim(Pruning(aimed=True), q),
        Pruning(aimed=True).fit,
    ]
    return [f"{right.mean():.2f}", *(f"{variance(way, q, right, draws):.3f}" for way in ways)]


def shared_aim(pruning: Pruning, q: Floats) -> Callable[[Floats], SurvivalCurve]:
    aim = pruning.fit(q.ravel())
    return lambda _: aim


def variance(way: Callable[[Floats], SurvivalCurve], q: Floats, right: NDArray[np.bool_], draws: Floats) -> float:
    survivals = np.asarray([[aim.survival(x) for x in group] for group in q for aim in [way(group)]])
    kept = draws < survivals
    some = kept.any(axis=1)
    shares = (right & kept).sum(axis=1)[some] / kept.sum(axis=1)[some]
    return float((shares * (1 - shares)).mean())


def sigmoid(x: Floats | float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), dtype=np.float64)


if __name__ == "__main__":
    main()
