"""Compare what policies return with what the model generates: lengths, rewards, long tails, answers without an end.

    python -m benchmarks.unbiased
    python -m benchmarks.unbiased --policies MODEL:raw uniform "uniform, redundancy 2"

In every round each policy samples the same prompts on one server. They are compared with ``MODEL:raw``, the unshaped
alias of the model on ``/v1/completions``, whose requests are vLLM's own. Rewards are reported, so that policies that
prune by quality learn; the first rounds do not count. The first table has each policy's plain means over returned
trajectories, which are what a trainer sees. The second has the weighted estimates of the policies whose groups all have
weights, with their difference from ``MODEL:raw``, prompt by prompt, and its standard error. Such a difference is beyond
2 of them in one case of twenty by chance.
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
BASE = "MODEL:raw"
RAW_MODEL = "tiny:raw"
CUT = {"exploration": 0.0}
POLICIES: Mapping[str, Mapping[str, object]] = {
    BASE: {},
    "off": {"name": "off"},
    "uniform": {"name": "uniform"},
    "uniform, redundancy 2": {"name": "uniform", "redundancy": 2.0},
    "uniform, longest tail": {"name": "uniform", "tail": "longest"},
    "uniform, no tail": {"name": "uniform", "num_longest": 0},
    "darts": {"name": "darts"},
    "darts_deadline": {"name": "darts_deadline", **CUT},
    "darts_cut": {"name": "darts_cut", **CUT},
    "cap": {"name": "cap", **CUT},
    "first_finish": {"name": "first_finish"},
    "arrol": {"name": "arrol"},
    "roulette": {"name": "roulette"},
    "roulette, sequence": {"name": "roulette", "roulette_loss": "sequence"},
    "roulette, sequence, exactly 8": {"name": "roulette", "roulette_loss": "sequence"},
    "darts+arrol": {"name": "darts+arrol"},
}
EXACT = {"roulette, sequence, exactly 8"}
"""Of all survivors exactly `SIZE` are returned."""
# Most answers of the tiny model are shorter than the default detection point.
PRUNING_FLAGS = ("--detect-at", "10", "--cold-steps", "1")
LONG = 96
"""Tokens beyond which a trajectory counts as long: one in ten here."""
QUANTITIES = ("length", "right", f"longer than {LONG}", "without an end")


@dataclass
class Estimates:
    """Means over the trajectories of each group, in the order of the groups, of one policy and one quantity.

    ``weighted``: None for a group without weights.
    """

    plain: list[float] = field(default_factory=list)
    weighted: list[float | None] = field(default_factory=list)

    @property
    def known(self) -> list[float]:
        """The weighted estimates if all groups have one, else none."""
        known = [value for value in self.weighted if value is not None]
        return known if len(known) == len(self.weighted) else []


Results = Mapping[str, Mapping[str, Estimates]]
"""By policy and quantity. All policies have the same groups, one of each prompt in each round."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.unbiased", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before these (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=100, help="groups of a round (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/unbiased"), help="for the server's log")
    names = list(POLICIES)
    help_policies = f"of: {'; '.join(names)} (default: all)"
    parser.add_argument("--policies", nargs="+", choices=names, default=names, metavar="NAME", help=help_policies)
    options = parser.parse_args(argv)
    if BASE not in options.policies:
        parser.error(f"--policies must include {BASE}, which the others are compared with")
    log = options.out / "server.log"
    with serving(DARTS, log, *PRUNING_FLAGS) as server, Client(server.url, timeout=600) as client:
        print(report(measure(client, options.policies, options.rounds, options.warm_up, options.prompts)))
    return 0


def measure(client: Client, policies: Sequence[str], rounds: int, warm_up: int, prompts: int) -> Results:
    """Sample all prompts under all of these policies in each round."""
    rng = Random(5)
    problems = [sample_problem(rng) for _ in range(prompts)]
    results = {policy: {quantity: Estimates() for quantity in QUANTITIES} for policy in policies}
    for number in range(warm_up + rounds):
        for policy in policies:
            sample(client, policy, problems, results[policy] if number >= warm_up else None)
        print(f"round {number + 1}/{warm_up + rounds}", file=sys.stderr)
    return results


def sample(client: Client, policy: str, problems: Sequence[Problem], estimates: Mapping[str, Estimates] | None) -> None:
    """Sample a group for each problem, and add its means to ``estimates``."""
    texts = [problem.prompt for problem in problems]
    if policy == BASE:
        groups = client.completions(texts, model=RAW_MODEL, group_size=SIZE, max_tokens=MAX_TOKENS, logprobs=False)
    else:
        survivors = False if policy in EXACT else None
        with client.rollouts(
            texts, group_size=SIZE, max_tokens=MAX_TOKENS, policy=POLICIES[policy], survivors=survivors, logprobs=False
        ) as got:
            groups = sorted(got, key=lambda group: group.number)
    rewards = [
        [reward(problem, t.text) for t in group.trajectories] for problem, group in zip(problems, groups, strict=True)
    ]
    if policy != BASE:
        client.rewards(groups, rewards)
    if estimates is None:
        return
    for group, values in zip(groups, rewards, strict=True):
        is_weighted = all(t.weight is not None for t in group.trajectories)
        lengths, ends = group.lengths, [t.finish_reason for t in group.trajectories]
        quantities = ([float(n) for n in lengths], values, [float(n > LONG) for n in lengths])
        for quantity, each in zip(QUANTITIES, (*quantities, [float(end == "length") for end in ends]), strict=True):
            estimates[quantity].plain.append(fmean(each))
            weighted = weighted_mean(group, each) if is_weighted else fmean(each) if policy == BASE else None
            estimates[quantity].weighted.append(weighted)


def paired_difference(estimates: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference, and its standard error from the spread over groups."""
    differences = [one - other for one, other in zip(estimates, base, strict=True)]
    return fmean(differences), stdev(differences) / sqrt(len(differences))


def report(results: Results) -> str:
    """Format the tables."""
    groups = len(results[BASE][QUANTITIES[0]].plain)
    plain = {policy: [f"{fmean(each.plain):.3f}" for each in results[policy].values()] for policy in results}
    weighted = {
        policy: [compare(each, results[BASE][quantity]) for quantity, each in by_quantity.items()]
        for policy, by_quantity in results.items()
        if by_quantity[QUANTITIES[0]].known
    }
    return f"Plain means of {groups} groups\n\n{table(plain)}\n\nWeighted, and minus {BASE}\n\n{table(weighted)}"


def compare(estimates: Estimates, base: Estimates) -> str:
    """Format the weighted estimate, and its difference from the base's."""
    mean = f"{fmean(estimates.known):.3f}"
    if estimates is base:
        return mean
    difference, error = paired_difference(estimates.known, base.known)
    return f"{mean}, {difference:+.3f} ± {error:.3f}"


def table(rows: Mapping[str, Sequence[str]]) -> str:
    head = ["policy", *QUANTITIES]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join([policy, *row])} |" for policy, row in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
