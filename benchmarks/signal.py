"""Groups with signal, and the error of the gradient, in simulation without an engine.

    python -m benchmarks.signal [--repetitions 20]

Rewards are 1 for right and 0 for wrong. A group has signal if its rewards are not all equal. Four tables:

1. The share of groups with signal for groups of 8: with 8 and with 16 candidates for every prompt, and with 16 on
   average (8 to 24) that are allocated by the true pass rates, and by the posteriors of earlier epochs. An epoch has 60
   weight versions. In 600 versions, the log-odds of each pass rate rise by 3 and walk at random, with a standard
   deviation of 1.5.
2. How many prompts have a probability of signal below a limit after three epochs, how many of them really have signal,
   and the variance of the gradient at equal numbers of candidates if they run with a probability of .25 or .5, relative
   to all running. It decides `signal.UNINFORMATIVE`.
3. The share of groups with signal by the half-life of rewards, for slow, usual and fast drift, as the difference to 16
   candidates for every prompt. It decides `pass_rates.HALF_LIFE`.
4. The mean squared error of the gradient, relative to `off` with 8, and in brackets the bias relative to the true
   gradient's length. A trajectory's gradient is Gaussian: right and wrong answers have means (1 - p) u and -p u, so
   that the mean of all is 0, and the noise of each is six times as long as u. Gradients are divided by M' - 1, so that
   centred rewards do not shrink them; those of max_variance by 8, as its paper has it.

Expected before the first run: allocation by true pass rates finds .03 to .04 more groups with signal than 16 candidates
for every prompt, and one epoch of posteriors half of that; ageing matters only for fast drift; a limit of .05 skips a
fifth of the prompts late in training; the fourth table is that of issue #58 within .03.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

import darts_server.estimates.pass_rates as pass_rates
from benchmarks.tables import markdown
from darts_server.estimates.pass_rates import Beta, PassCounts, RecentPassRates, count_answers
from darts_server.policy.signal import allocate_by_signal, signal_chances

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SIZE, MEAN, MOST = 8, 16, 24
EPOCH, BATCH = 60, 64
HORIZON = 600
"""Versions of a whole training."""
STAGES = {"early": (0.3, 1.2), "middle": (0.4, 0.4), "late": (1.5, 0.25)}
"""Beta distributions of the pass rates: .2, .5 and .86 on average, most of them near 0 or 1."""
DRIFTS = {"slow": (1.0, 0.5), "usual": (3.0, 1.5), "fast": (6.0, 3.0)}
"""Rise of the log-odds in `HORIZON` versions, and the standard deviation of their random walk."""
HALF_LIVES = (5, 10, 20, 40, 80, 160, 320, 10**9)
KNOWN = 1e9
"""Strength of a Beta distribution that stands for a known pass rate."""
GROUPS = 6000
NOISE = 6.0
RATES = (0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.signal", description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=20, help="of each row (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=GROUPS, help="of each pass rate (default: %(default)s)")
    options = parser.parse_args(argv)
    print(report_stages(options.repetitions))
    print()
    print(report_skipping(options.repetitions))
    print()
    print(report_half_lives(max(1, options.repetitions // 7)))
    print()
    print(report_gradients(options.groups))
    return 0


# --- groups with signal -------------------------------------------------------


def signal(rates: Floats, candidates: Ints | int) -> float:
    """Return the mean probability of signal."""
    return float((1 - rates**candidates - (1 - rates) ** candidates).mean())


def allocate(posteriors: Sequence[Beta]) -> Ints:
    return np.array(allocate_by_signal(posteriors, MEAN * len(posteriors), SIZE, MOST))


def known(rates: Floats) -> list[Beta]:
    return [Beta(KNOWN * rate + 1e-9, KNOWN * (1 - rate) + 1e-9) for rate in rates.tolist()]


def pass_rate(log_odds: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-log_odds)))


class Memory:
    """What is known about prompts by their rewards."""

    def __init__(self) -> None:
        self.recent = RecentPassRates()
        self.prompts: dict[int, PassCounts] = {}

    def posteriors(self, prompts: Sequence[int], version: int) -> list[Beta]:
        prior = self.recent.prior
        return [self.prompts.get(prompt, PassCounts()).posterior(prior, version) for prompt in prompts]

    def learn(self, prompts: Sequence[int], right: Sequence[int], version: int) -> None:
        for prompt, count in zip(prompts, right, strict=True):
            answers = count_answers([(True, 1.0)] * count + [(False, 1.0)] * (MEAN - count))
            self.recent = self.recent.with_group(answers, version)
            self.prompts[prompt] = self.prompts.get(prompt, PassCounts()).with_answers(answers, version)


def sample_stage(stage: str, epochs: int, epoch: int, rng: np.random.Generator) -> tuple[Floats, list[Beta]]:
    """Return pass rates of a stage, and what is known about them after some epochs of so many versions."""
    number = BATCH * 8
    now = np.clip(rng.beta(*STAGES[stage], size=number), 1e-9, 1 - 1e-9)
    # Walk back in time, epoch by epoch.
    rise, walk = DRIFTS["usual"]
    past = [np.log(now / (1 - now))]
    for _ in range(epochs):
        step = rise * epoch / HORIZON + walk * np.sqrt(epoch / HORIZON) * rng.normal(size=number)
        past.append(past[-1] - step)
    memory = Memory()
    prompts = range(number)
    for ago in range(epochs, 0, -1):
        memory.learn(prompts, rng.binomial(MEAN, pass_rate(past[ago])).tolist(), epoch * (epochs - ago))
    # The prior is that of other prompts, which ran in the versions just before.
    others = Memory()
    others.learn(prompts, rng.binomial(MEAN, now).tolist(), epoch * epochs)
    memory.recent = others.recent
    return now, memory.posteriors(prompts, epoch * epochs)


def measure_stage(stage: str, epochs: int, seed: int) -> list[float]:
    """Return the share of groups with signal with 8, with 16, by true pass rates, and after 1, 2, ... epochs."""
    shares: list[float] = []
    for seen in range(1, epochs + 1):
        now, posteriors = sample_stage(stage, seen, EPOCH, np.random.default_rng(seed))
        if not shares:
            shares = [signal(now, SIZE), signal(now, MEAN), signal(now, allocate(known(now)))]
        shares.append(signal(now, allocate(posteriors)))
    return shares


def report_stages(repetitions: int) -> str:
    epochs = 4
    rows = []
    for stage, (right, wrong) in STAGES.items():
        measured = np.array([measure_stage(stage, epochs, seed) for seed in range(repetitions)])
        # Differences to 16 for every prompt, in the same repetition.
        gains = measured[:, 2:] - measured[:, 1:2]
        error = float((gains.std(axis=0) / np.sqrt(repetitions)).max())
        cells = [f"{share:.3f}" for share in measured.mean(axis=0)]
        rows.append([f"{stage}: Beta({right}, {wrong})", *cells, f"{error:.4f}"])
    head = ["pass rates", "8 each", "16 each", "true pass rates"]
    head += [f"{seen} epochs" for seen in range(1, epochs + 1)] + ["error of gains"]
    return markdown(head, rows)


def report_skipping(repetitions: int) -> str:
    """Report prompts that are skipped below some probabilities of signal.

    The variance of the gradient at equal numbers of candidates is the product of its variance and the candidates.
    """
    rows = []
    for stage in STAGES:
        for epoch in (15, 60, 200):
            samples = [sample_stage(stage, 3, epoch, np.random.default_rng(seed)) for seed in range(repetitions)]
            rates = np.concatenate([now for now, _ in samples])
            chances = np.concatenate([signal_chances(posteriors, SIZE) for _, posteriors in samples])
            counts = np.concatenate([allocate(posteriors) for _, posteriors in samples])
            variances = rates * (1 - rates) / (counts - 1)
            for limit in (0.05, 0.1, 0.2, 0.3):
                below = chances < limit
                if not below.any():
                    continue
                cells = []
                for floor in (0.25, 0.5):
                    runs = np.where(below, floor, 1.0)
                    product = (variances / runs).sum() * (counts * runs).sum()
                    cells.append(f"{product / variances.sum() / counts.sum():.2f}")
                share = signal(rates[below], SIZE)
                rows.append([stage, str(epoch), f"{limit}", f"{below.mean():.2f}", f"{share:.3f}", *cells])
    head = ["pass rates", "versions per epoch", "skipped below", "such prompts", "with signal"]
    return markdown([*head, "variance, floor .25", "floor .5"], rows)


def measure_drift(rise: float, walk: float, epoch: int, rng: np.random.Generator) -> list[float]:
    """Measure a whole training: shares with 16 for every prompt, by true pass rates, and by posteriors."""
    number = epoch * BATCH
    log_odds = 2.5 * rng.normal(size=number) - 1
    slopes = rise / HORIZON * (1 + 0.5 * rng.normal(size=number))
    memory = Memory()
    shares = []
    for version in range(HORIZON):
        prompts = np.arange(BATCH) + BATCH * (version % epoch)
        if version >= epoch:
            log_odds[prompts] += slopes[prompts] * epoch + walk * np.sqrt(epoch / HORIZON) * rng.normal(size=BATCH)
        rates = pass_rate(log_odds[prompts])
        right = rng.binomial(MEAN, rates).tolist()
        if version >= epoch:
            counts = allocate(memory.posteriors(prompts.tolist(), version))
            shares.append([signal(rates, MEAN), signal(rates, allocate(known(rates))), signal(rates, counts)])
        memory.learn(prompts.tolist(), right, version)
    return [float(share) for share in np.mean(shares, axis=0)]


def report_half_lives(repetitions: int) -> str:
    rows = []
    chosen = pass_rates.HALF_LIFE
    try:
        for drift, (rise, walk) in DRIFTS.items():
            for epoch in (15, 60, 200):
                cells = []
                for half_life in HALF_LIVES:
                    pass_rates.HALF_LIFE = half_life
                    runs = [
                        measure_drift(rise, walk, epoch, np.random.default_rng(seed)) for seed in range(repetitions)
                    ]
                    even, true, learned = np.mean(runs, axis=0)
                    cells.append(f"{learned - even:+.3f}")
                rows.append([drift, str(epoch), f"{even:.3f}", f"{true - even:+.3f}", *cells])
    finally:
        pass_rates.HALF_LIFE = chosen
    names = [*(f"{half_life}" for half_life in HALF_LIVES[:-1]), "none"]
    return markdown(["drift", "versions per epoch", "16 each", "true pass rates", *names], rows)


# --- the gradient -------------------------------------------------------------

Rule = Callable[[Floats, np.random.Generator], Floats]
"""From the rewards of a group to the coefficient of each candidate's gradient."""


def off(rewards: Floats, _: np.random.Generator) -> Floats:
    return np.asarray((rewards - rewards.mean()) / (len(rewards) - 1))


def informative(rewards: Floats, rng: np.random.Generator) -> Floats:
    """Sample 8 systematically in the order of rewards, with probabilities proportional to |A|, and weigh them."""
    advantages = rewards - rewards.mean()
    if not advantages.any():
        return np.zeros(len(rewards))
    shares = np.full(len(rewards), 0.0)
    free = np.ones(len(rewards), dtype=bool)
    # Probabilities above 1 are 1, and the others share the other places.
    while True:
        sizes = np.abs(advantages) * free
        shares = np.where(free, (SIZE - (~free).sum()) * sizes / sizes.sum(), 1.0)
        above = free & (shares > 1 + 1e-12)
        if not above.any():
            break
        free &= ~above
    shuffled = rng.permutation(len(rewards))
    order = shuffled[np.argsort(rewards[shuffled], kind="stable")]
    ends = np.cumsum(shares[order])
    points = rng.random() + np.arange(SIZE)
    chosen = order[np.minimum(np.searchsorted(ends, points, side="right"), len(order) - 1)]
    coefficients = np.zeros(len(rewards))
    coefficients[chosen] = advantages[chosen] / shares[chosen]
    return coefficients / (len(rewards) - 1)


def max_variance(rewards: Floats, _: np.random.Generator) -> Floats:
    """Keep the 8 whose rewards vary most (PODS), centred among themselves and divided by their number."""
    order = np.argsort(rewards, kind="stable")
    right = int(rewards.sum())
    # Half of each kind, as far as there are as many.
    kept = min(max(SIZE // 2, SIZE - (len(rewards) - right)), right)
    chosen = np.concatenate([order[: SIZE - kept], order[len(order) - kept :]])
    coefficients = np.zeros(len(rewards))
    coefficients[chosen] = (rewards[chosen] - rewards[chosen].mean()) / SIZE
    return coefficients


def measure_gradient(rate: float, candidates: int, rule: Rule, groups: int, seed: int) -> tuple[float, float]:
    """Return the mean squared error and the bias, in units of |u|."""
    rng = np.random.default_rng(seed)
    along = []
    noise = []
    for _ in range(groups):
        rewards = (rng.random(candidates) < rate).astype(np.float64)
        coefficients = rule(rewards, rng)
        # Right answers push by 1 - p along u, wrong answers by -p.
        along.append(float((coefficients * (rewards - rate)).sum()))
        noise.append(float((coefficients**2).sum()))
    true = rate * (1 - rate)
    errors = np.array(along) - true
    return float((errors**2).mean() + NOISE**2 * np.mean(noise)), float(errors.mean() / true)


def report_gradients(groups: int) -> str:
    columns: dict[str, tuple[int, Rule]] = {
        "off 16": (16, off),
        "8 of 16 by |A|": (16, informative),
        "max_variance 8 of 16": (16, max_variance),
        "8 of 24 by |A|": (24, informative),
    }
    rows = []
    for place, rate in enumerate(RATES):
        base, _ = measure_gradient(rate, SIZE, off, groups, place)
        cells = []
        for number, (candidates, rule) in enumerate(columns.values(), 1):
            error, bias = measure_gradient(rate, candidates, rule, groups, 100 * number + place)
            cells.append(f"{error / base:.2f} ({bias:+.2f})")
        rows.append([f"{rate}", *cells])
    return markdown(["pass rate", *columns], rows)


if __name__ == "__main__":
    raise SystemExit(main())
