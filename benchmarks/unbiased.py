"""Check that weighted groups estimate what the policy generates: its mean length and its mean reward.

    python -m benchmarks.unbiased

In every round each policy samples the same prompts on one server, and its estimates are compared with those of ``off``,
prompt by prompt. Rewards are reported, so that policies that prune by quality learn; the first rounds do not count. The
table has each policy's plain mean over returned trajectories, its weighted estimate, and how many standard errors the
weighted one is away from ``off``. A weighted estimate is more than 2 away in one case of twenty by chance.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from darts_client import Client
from darts_client.advantages import weighted_mean
from darts_server.demo.problems import Problem, reward, sample_problem
from darts_server.demo.server import DARTS, serving

SIZE = 8
MAX_TOKENS = 250
BASE = "off"
POLICIES: Mapping[str, Mapping[str, object]] = {
    BASE: {"name": "off"},
    "uniform": {"name": "uniform"},
    "uniform, redundancy 2": {"name": "uniform", "redundancy": 2.0},
}
QUANTITIES = ("length", "reward")


@dataclass
class Estimates:
    """Means over the trajectories of each group, in the order of the groups, of one policy and one quantity."""

    plain: list[float] = field(default_factory=list)
    weighted: list[float] = field(default_factory=list)


Results = Mapping[str, Mapping[str, Estimates]]
"""By policy and quantity. All policies have the same groups, one of each prompt in each round."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.unbiased", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before these (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=100, help="groups of a round (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/unbiased"), help="for the server's log")
    options = parser.parse_args(argv)
    with serving(DARTS, options.out / "server.log") as server, Client(server.url, timeout=600) as client:
        print(report(measure(client, options.rounds, options.warm_up, options.prompts)))
    return 0


def measure(client: Client, rounds: int, warm_up: int, prompts: int) -> Results:
    """Sample all prompts under all policies in each round."""
    rng = Random(5)
    problems = [sample_problem(rng) for _ in range(prompts)]
    results = {policy: {quantity: Estimates() for quantity in QUANTITIES} for policy in POLICIES}
    for number in range(warm_up + rounds):
        for policy in POLICIES:
            sample(client, policy, problems, results[policy] if number >= warm_up else None)
        print(f"round {number + 1}/{warm_up + rounds}", file=sys.stderr)
    return results


def sample(client: Client, policy: str, problems: Sequence[Problem], estimates: Mapping[str, Estimates] | None) -> None:
    """Sample a group for each problem, and add its means to ``estimates``."""
    texts = [problem.prompt for problem in problems]
    options = POLICIES[policy]
    got = list(client.rollouts(texts, group_size=SIZE, max_tokens=MAX_TOKENS, policy=options, logprobs=False))
    groups = sorted(got, key=lambda group: group.number)
    rewards = [[reward(problems[group.number], t.text) for t in group.trajectories] for group in groups]
    client.rewards(groups, rewards)
    for group, values in zip(groups, rewards, strict=True):
        for quantity, each in (("length", [float(n) for n in group.lengths]), ("reward", values)):
            if estimates is not None:
                estimates[quantity].plain.append(fmean(each))
                estimates[quantity].weighted.append(weighted_mean(group, each))


def paired_difference(estimates: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference, and its standard error from the spread over groups."""
    differences = [one - other for one, other in zip(estimates, base, strict=True)]
    return fmean(differences), stdev(differences) / sqrt(len(differences))


def report(results: Results) -> str:
    """Format the table."""
    head = ["policy", "groups"]
    for quantity in QUANTITIES:
        head += [f"{quantity}, plain mean", "weighted", "weighted - off", "standard errors"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for policy, by_quantity in results.items():
        row = [policy, str(len(by_quantity["length"].plain))]
        for quantity in QUANTITIES:
            estimates = by_quantity[quantity]
            row += [f"{fmean(estimates.plain):.3f}", f"{fmean(estimates.weighted):.3f}"]
            if policy == BASE:
                row += ["", ""]
            else:
                difference, error = paired_difference(estimates.weighted, results[BASE][quantity].weighted)
                row += [f"{difference:+.3f} ± {error:.3f}", f"{difference / error:+.1f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
