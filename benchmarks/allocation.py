"""Allocation of candidates: compare it with brute force, and time it by the number of prompts.

    python -m benchmarks.allocation

The first part compares the sum of w/m with the smallest one over all ways to share the budget, in exact fractions. The
second part times batches of log-normal length stds, all different, with a budget of 1.5 M and bounds M and 2 M.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from darts_server.policy.allocation.optimum import allocate, weights_from_stds
from darts_server.policy.allocation.shadow_price import ShadowPrice

GROUP_SIZE = 8
MEAN_CANDIDATES = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.allocation", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="random cases for brute force (default: %(default)s)")
    parser.add_argument("--max-exponent", type=int, default=6, help="up to 10^this prompts (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each size; the shortest counts (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.cases < 1 or options.max_exponent < 3 or options.repeats < 1:
        parser.error("--cases and --repeats must be at least 1, --max-exponent at least 3")
    rng = np.random.default_rng(options.seed)
    worst = max(gap(rng) for _ in range(options.cases))
    seconds = {}
    for exponent in range(2, options.max_exponent + 1):
        seconds[10**exponent] = batch_time(rng, 10**exponent, options.repeats)
        print(f"10^{exponent} prompts: {seconds[10**exponent]:.4f} s", file=sys.stderr)
    print(report(options.cases, worst, seconds, single_time(rng)))
    return 0


def gap(rng: np.random.Generator) -> Fraction:
    """Allocate one small random case, with many ties and zeros; return its relative gap to the optimum."""
    weights = [int(w) for w in rng.integers(0, 8, size=rng.integers(1, 6))]
    low = int(rng.integers(1, 4))
    high = low + int(rng.integers(0, 5))
    budget = int(rng.integers(low * len(weights), high * len(weights) + 1))
    ways = itertools.product(range(low, high + 1), repeat=len(weights))
    smallest = min(cost(weights, way) for way in ways if sum(way) == budget)
    counts = allocate(weights, budget, low, high)
    if sum(counts) != budget or not all(low <= m <= high for m in counts):
        raise AssertionError(f"{weights}, {budget} in [{low}, {high}]: {counts} breaks the bounds")
    return cost(weights, counts) / smallest - 1 if smallest else cost(weights, counts)


def cost(weights: Sequence[int], counts: Sequence[int]) -> Fraction:
    return sum((Fraction(w, m) for w, m in zip(weights, counts, strict=True)), Fraction(0))


def batch_time(rng: np.random.Generator, prompts: int, repeats: int) -> float:
    stds = np.exp(rng.normal(4, 1, size=prompts)).tolist()
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        allocate(weights_from_stds(stds), MEAN_CANDIDATES * prompts, GROUP_SIZE, 2 * GROUP_SIZE)
        timings.append(time.perf_counter() - start)
    return min(timings)


def single_time(rng: np.random.Generator, requests: int = 2000) -> float:
    price = ShadowPrice(MEAN_CANDIDATES, GROUP_SIZE, 2 * GROUP_SIZE)
    stds = np.exp(rng.normal(4, 1, size=requests)).tolist()
    start = time.perf_counter()
    for std in stds:
        price.candidates(std)
    return (time.perf_counter() - start) / requests


def growth(seconds: dict[int, float]) -> float:
    """Fit the exponent k of time ~ N^k, by least squares."""
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])


def report(cases: int, worst: Fraction, seconds: dict[int, float], single: float) -> str:
    large = {n: t for n, t in seconds.items() if n >= 10**4}  # fixed costs are negligible there
    rows = [
        ("cases against brute force", f"{cases}"),
        ("largest gap to the optimum", f"{float(worst):.1e}" if worst else "0 (exact)"),
        *((f"time for {n:,} prompts", f"{t * 1000:.2f} ms") for n, t in seconds.items()),
        ("growth exponent", f"{growth(seconds):.2f}"),
        *([("growth exponent, 10^4 prompts and more", f"{growth(large):.2f}")] if len(large) > 1 else []),
        ("one request at a time", f"{single * 1e6:.0f} us"),
    ]
    return "\n".join(["| measured | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
