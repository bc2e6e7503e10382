"""Simulate `roulette`: how much its weighted groups teach per token, beside plain sampling and a fixed length limit.

    python -m benchmarks.roulette

Efficiency is the variance of a policy-gradient estimate times its tokens, that of plain sampling divided by that of the
policy: 1.1 means the same variance at a tenth fewer tokens. Survival is computed by the server's own code from its
length profile, which learns from 4,096 lengths. What the simulation takes for granted: the trainer's baseline is the
prompt's true pass rate, and so is the server's; the gradients of trajectories are independent, spread evenly over
their tokens, and as large as `--roulette-loss` says; right and wrong trajectories are equally long; a score comes at a
quarter of the prompt's mean length, and its q is exact for the prompt. Most of this favours the policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.lengths.profile import MEMORY, LengthProfile
from darts_server.policy.pruning.roulette import RATIOS, GroupRoulette, Loss, PromptForecast, Roulette
from darts_server.policy.pruning.survival import Pruning

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """Lengths relative to their prompt's median: log-normal, of which a share is ``shift`` times as long.

    ``spread``, ``between``: stds of the logarithm, within a prompt and between prompts. ``limit``: in medians over all
    prompts.
    """

    spread: float
    between: float
    share: float = 0.0
    shift: float = 1.0
    limit: float = 1e6

    def sample(self, medians: Floats, count: int, rng: np.random.Generator) -> Floats:
        ratios = np.exp(rng.normal(0, self.spread, (medians.size, count)))
        ratios *= np.where(rng.random(ratios.shape) < self.share, self.shift, 1.0)
        return np.asarray(np.minimum(TOKENS * medians[:, None] * ratios, TOKENS * self.limit))


TOKENS = 1000.0
"""Median length. The unit of lengths; nothing depends on it."""
# The first two are fitted to lengths of real rollouts: Qwen2.5-32B on mathematics, where one answer in eight is far
# shorter than the others, and DeepCoder 14B, of whose samples 16 % end at the limit.
LENGTHS: Mapping[str, Lengths] = {
    "DAPO-like": Lengths(spread=0.55, between=0.22, share=0.12, shift=0.2),
    "DeepCoder-like": Lengths(spread=0.2, between=0.75, limit=1.5),
    "runaways: 6 % ten times as long": Lengths(spread=0.4, between=0.5, share=0.06, shift=10.0),
    "heavy tail: log-normal, 1.2": Lengths(spread=1.2, between=0.3),
    "heavier: log-normal, 1.6": Lengths(spread=1.6, between=0.3),
}
SCORES: Mapping[str, float | None] = {"none": None, "AUC .70": 0.7, "AUC .85": 0.85}
PASS_RATES = (0.5, 1.8)
"""Mean and std of the log-odds of prompts' pass rates: a third of the prompts are below .2 or above .9."""
SCORED_AT = 0.25
"""Of the prompt's mean length."""
SIZE, STARTED = 8, 12
BATCHES, PROMPTS = 20, 60
CAP = 2.0
"""The fixed limit, in mean lengths over all prompts."""


class NoRecord:
    """Roulette needs no record of earlier scores."""

    def survival(self, quality: float, pruning: Pruning) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Path:
    """A trajectory: its length, whether it is right, and (tokens, survival, predicted value) at its checkpoints."""

    length: float
    right: float
    checkpoints: Sequence[tuple[int, float, float]]

    @property
    def survival(self) -> float:
        return float(np.prod([p for _, p, _ in self.checkpoints]))

    @property
    def expected_tokens(self) -> float:
        tokens, before, survival = 0.0, 0.0, 1.0
        for at, p, _ in self.checkpoints:
            tokens, before, survival = tokens + survival * (at - before), at, survival * p
        return tokens + survival * (self.length - before)

    def with_control_variates(self, b: float) -> float:
        """The expected square of its weighted advantage where stopped prefixes are used, averaged over its tokens."""
        square, after = (self.right - b) ** 2, self.length
        survivals = np.cumprod([1.0, *(p for _, p, _ in self.checkpoints)])
        total = 0.0
        for k in reversed(range(len(self.checkpoints))):
            at, p, value = self.checkpoints[k]
            total += (after - at) / self.length * square / survivals[k + 1]
            square = square / p + (1 / p - 1) * ((value - b) ** 2 - 2 * (value - b) * (self.right - b))
            after = at
        return total + after / self.length * square


def main() -> None:
    print("| | | `--roulette-loss token` | | | | `sequence` | | | |")
    print("|---" * 10 + "|")
    of_each = "tokens | efficiency | with `partial`"
    print(f"| lengths | score | {of_each} | exactly 8 of 12 | {of_each} | if gradients grow after all |")
    for name, lengths in LENGTHS.items():
        for score, auc in SCORES.items():
            token, sequence = (run(partial(simulate, lengths, auc, loss)) for loss in (Loss.TOKEN, Loss.SEQUENCE))
            print(f"| {name} | {score} | {' | '.join([*token[:4], *sequence[:3], sequence[4]])} |")
    print()
    print("| lengths | `max_tokens` of 2 mean lengths: tokens | efficiency | right answers lost |")
    print("|---|---|---|---|")
    for name, lengths in LENGTHS.items():
        print(f"| {name} | {' | '.join(run(partial(simulate_cap, lengths)))} |")


def run(simulate_batch: Callable[[int], Sequence[float]]) -> list[str]:
    """Simulate all batches, and format each figure's mean and standard error."""
    figures = zip(*map(simulate_batch, range(BATCHES)), strict=True)
    return [f"{fmean(each):.2f} ± {stdev(each) / sqrt(BATCHES):.2f}" for each in figures]


def simulate(lengths: Lengths, auc: float | None, loss: Loss, seed: int) -> list[float]:
    """Return, relative to plain sampling, the tokens and four efficiencies.

    Of all survivors; with the prefixes of the others; of exactly `SIZE`; and of all survivors if squared gradients grow
    with length whatever the loss.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for b, mean, paths in sample_paths(lengths, auc, loss, rng):
        squares = np.asarray([(path.right - b) ** 2 for path in paths])
        weights = np.asarray([1 / path.survival for path in paths])
        grown = np.asarray([path.length / mean for path in paths])
        sizes = grown if loss is Loss.TOKEN else np.ones(len(paths))
        variates = np.asarray([path.with_control_variates(b) for path in paths])
        exact, exact_tokens = play(squares * sizes, paths, rng)
        rows.append(
            [
                fmean(path.length for path in paths),
                fmean(path.expected_tokens for path in paths),
                exact_tokens / SIZE,
                (squares * sizes).mean(),
                (squares * sizes * weights).mean(),
                (variates * sizes).mean(),
                exact * SIZE,
                (squares * grown).mean(),
                (squares * grown * weights).mean(),
            ]
        )
    plain_tokens, tokens, exact_tokens, plain, ours, partial, exact, plain_grown, ours_grown = np.mean(rows, axis=0)
    share = tokens / plain_tokens
    of_exact = plain / exact / (exact_tokens / plain_tokens)
    return [share, plain / ours / share, plain / partial / share, of_exact, plain_grown / ours_grown / share]


def simulate_cap(lengths: Lengths, seed: int) -> list[float]:
    """Return tokens, efficiency and share of right answers lost of a fixed limit; who reaches it earns nothing."""
    runs = list(sample_paths(lengths, None, Loss.TOKEN, np.random.default_rng(seed)))
    limit = CAP * fmean(mean for _, mean, _ in runs)
    everyone = [(b, mean, path, min(path.length, limit)) for b, mean, paths in runs for path in paths]
    plain = fmean((path.right - b) ** 2 * path.length / mean for b, mean, path, _ in everyone)
    cut = fmean((path.right * (path.length <= limit) - b) ** 2 * left / mean for b, mean, path, left in everyone)
    share = sum(left for *_, left in everyone) / sum(path.length for *_, path, _ in everyone)
    right = [path for *_, path, _ in everyone if path.right]
    return [share, plain / cut / share, sum(path.length > limit for path in right) / len(right)]


def sample_paths(
    lengths: Lengths, auc: float | None, loss: Loss, rng: np.random.Generator
) -> Iterator[tuple[float, float, list[Path]]]:
    """Yield pass rate, mean length and ``STARTED`` trajectories for each prompt."""
    medians = np.exp(rng.normal(0, lengths.between, PROMPTS))
    means = lengths.sample(medians, 4000, rng).mean(axis=1)
    ratios = learn_ratios(lengths, rng)
    separation = 0.0 if auc is None else sqrt(2) * NormalDist().inv_cdf(auc)
    for mean, row in zip(means, lengths.sample(medians, STARTED, rng), strict=True):
        b = 1 / (1 + np.exp(-rng.normal(*PASS_RATES)))
        roulette = GroupRoulette(Roulette(loss=loss), PromptForecast(mean, ratios, b))
        paths = []
        for index, length in enumerate(row):
            right = float(rng.random() < b)
            evidence = separation * (rng.normal(separation * right) - separation / 2)
            quality = b / (b + (1 - b) * np.exp(-evidence))
            scored_at = None if auc is None else round(SCORED_AT * mean)
            paths.append(Path(length, right, follow(roulette, index, length, scored_at, quality, b)))
        yield b, mean, paths


def learn_ratios(lengths: Lengths, rng: np.random.Generator) -> Floats | None:
    """Learn the length profile as the server does, from groups of ``STARTED``."""
    profile = LengthProfile()
    medians = np.exp(rng.normal(0, lengths.between, MEMORY // STARTED))
    for row in lengths.sample(medians, STARTED, rng):
        profile.observe([(length / row.mean(), length >= TOKENS * lengths.limit) for length in row])
    return profile.quantiles(RATIOS)


def follow(
    roulette: GroupRoulette, index: int, length: float, scored_at: int | None, quality: float, b: float
) -> list[tuple[int, float, float]]:
    """Take a trajectory past its checkpoints, and return those at which it may be stopped."""
    points = sorted({*roulette.checkpoints, *([] if scored_at is None else [scored_at])})
    passed, value = [], b
    for tokens in (point for point in points if point < length):
        if tokens == scored_at:
            survival, value = roulette.at_score(index, tokens, quality, NoRecord()), quality
        else:
            survival = roulette.at_checkpoint(index, tokens)
        if survival < 1:
            passed.append((tokens, survival, value))
    return passed


def play(squares: Floats, paths: Sequence[Path], rng: np.random.Generator) -> tuple[float, float]:
    """Play a group that returns exactly `SIZE`; return its squared weighted gradients, and its tokens.

    All run side by side, and at least `SIZE` are kept.
    """
    alive, survivals = set(range(len(paths))), np.ones(len(paths))
    spent = [path.length for path in paths]
    events = sorted((at, i, p) for i, path in enumerate(paths) for at, p, _ in path.checkpoints)
    for at, i, p in events:
        if i in alive and len(alive) > SIZE:
            survivals[i] *= p
            if rng.random() >= p:
                alive.remove(i)
                spent[i] = at
    chosen = rng.permutation(sorted(alive))[:SIZE]
    weights = len(alive) / SIZE / survivals[chosen]
    return float((weights**2 * squares[chosen]).sum()) / len(paths) ** 2, sum(spent)


if __name__ == "__main__":
    main()
