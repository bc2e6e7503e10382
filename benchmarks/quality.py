"""Measure quality scores on the tiny task: how well they predict right answers, and what pruning by them does.

    python -m benchmarks.quality

For each kind of score a server of its own learns from rewards while nothing is pruned; the policy's weights never
change. On other problems it is then measured how well the scores separate right trajectories from wrong ones (AUC; 1/2
is a guess). After that groups are pruned by the scores, in turns with groups that are not pruned.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, pvariance
from typing import Any

import numpy as np
from tqdm import trange

from benchmarks.tables import markdown
from darts_client import Client, Group
from darts_server.estimates.score_metrics import auc, brier_score, calibration_error
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Difficulty, Problem, sample_problem
from darts_server.offline.demo.server import DARTS, MODEL, serving
from examples.tiny_rl.remote import TIMEOUT_SECONDS
from examples.tiny_rl.train import score

KINDS = ("head", "logprob", "head+logprob")
DETECT_AT = 10
SIZE = 8
BATCH = 32
"""Prompts in a batch."""
UNPRUNED = {"name": "arrol", "keep_ratio": 1.0}
"""Score all candidates, prune none."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {"name": "off"},
    "paper": {"name": "arrol"},
    "darts+arrol": {"name": "darts+arrol", "redundancy": 3.0, "max_redundancy": 4.0},
}
COLD_STEPS = 20
"""Steps before the first pruning: changes of the weights with a rewarded group after each."""
RESAMPLES = 400


@dataclass
class Scored:
    """Scored trajectories: the calibrated score, whether the answer is right, difficulty and number of the problem."""

    qualities: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    kinds: list[Difficulty] = field(default_factory=list)
    problems: list[int] = field(default_factory=list)

    def auc(self, difficulty: Difficulty | None) -> str:
        """Format the AUC with its standard error, from a bootstrap over problems."""
        is_chosen = np.asarray([difficulty in (None, kind) for kind in self.kinds])
        qualities = np.asarray(self.qualities)[is_chosen]
        right = np.asarray(self.right)[is_chosen]
        problems = np.asarray(self.problems)[is_chosen]
        rows_of_problem = {problem: np.flatnonzero(problems == problem) for problem in np.unique(problems)}
        rng = np.random.default_rng(0)
        aucs = []
        for _ in range(RESAMPLES):
            resampled_problems = rng.choice(list(rows_of_problem), len(rows_of_problem))
            rows = np.concatenate([rows_of_problem[problem] for problem in resampled_problems])
            value = auc(qualities[rows], right[rows])
            # Without both right and wrong answers there is no AUC.
            if value is not None:
                aucs.append(value)
        return f"{auc(qualities, right):.3f} ({np.std(aucs):.3f})"


@dataclass
class Groups:
    """Groups under one way to prune, batch by batch."""

    variance: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    generated: list[int] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--learned", type=int, default=16, help=f"batches of {BATCH} problems to learn from (default: %(default)s)")
    add("--tested", type=int, default=12, help="batches to measure, for each kind (default: %(default)s)")
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="NAME", help="kinds of scores (default: all)")
    options = parser.parse_args(argv)
    scored: dict[str, Scored] = {}
    groups: dict[str, dict[str, Groups]] = {}
    for kind in options.kinds:
        flags = ("--detect-at", str(DETECT_AT))
        with (
            serving(DARTS, Path(f"out/quality/{kind}.log"), *flags, "--quality", kind) as server,
            Client(server.url, timeout=TIMEOUT_SECONDS) as client,
        ):
            learn(client, options.learned, kind)
            end_cold_start(client)
            if server.metric("darts_quality_status", status="ready") != 1:
                sys.exit(f"{kind}: not ready after {options.learned} batches; see out/quality/{kind}.log")
            scored[kind] = test(client, options.tested, kind)
            groups[kind] = prune(client, options.tested, kind)
    print(report(scored, groups))
    return 0


def batches(count: int, seed: int) -> Iterator[list[Problem]]:
    rng = Random(seed)
    return ([sample_problem(rng) for _ in range(BATCH)] for _ in range(count))


def rollouts(
    client: Client, problems: Sequence[Problem], policy: Mapping[str, Any], seed: int
) -> tuple[list[Group], Any]:
    batch = client.rollouts(
        [problem.prompt for problem in problems],
        group_size=SIZE,
        max_tokens=MAX_RESPONSE_TOKENS,
        policy=policy,
        seed=seed,
        survivors=False,
    )
    return sorted(batch, key=lambda group: group.number), batch.usage


def learn(client: Client, count: int, kind: str) -> None:
    """Let the server score trajectories, and report their rewards."""
    for number, problems in zip(trange(count, desc=f"{kind}: learning"), batches(count, seed=1), strict=True):
        groups, _ = rollouts(client, problems, UNPRUNED, seed=1_000_000 + number * 10_000)
        client.rewards(groups, [rewards(problem, group) for problem, group in zip(problems, groups, strict=True)])


def end_cold_start(client: Client) -> None:
    """Make the first steps: in each, the same weights are loaded again, and one group is rewarded."""
    for number, problems in enumerate(batches(COLD_STEPS, seed=4)):
        client.weights.push(MODEL / "model.safetensors")
        groups, _ = rollouts(client, problems[:1], UNPRUNED, seed=4_000_000 + number)
        client.rewards(groups, [rewards(problems[0], groups[0])])


def test(client: Client, count: int, kind: str) -> Scored:
    """Score trajectories of other problems; report no rewards, so that nothing is learned."""
    scored = Scored()
    for number, problems in zip(trange(count, desc=f"{kind}: testing"), batches(count, seed=2), strict=True):
        groups, _ = rollouts(client, problems, UNPRUNED, seed=2_000_000 + number * 10_000)
        for problem, group in zip(problems, groups, strict=True):
            for trajectory, right in zip(group.trajectories, rewards(problem, group), strict=True):
                if trajectory.quality is not None:
                    scored.qualities.append(trajectory.quality)
                    scored.right.append(right)
                    scored.kinds.append(problem.difficulty)
                    scored.problems.append(number * BATCH + group.number)
    return scored


def prune(client: Client, count: int, kind: str) -> dict[str, Groups]:
    """Run the same problems under each way to prune, in turns."""
    results = {way: Groups() for way in WAYS}
    for number, problems in zip(trange(count, desc=f"{kind}: pruning"), batches(count, seed=3), strict=True):
        for way, policy in WAYS.items():
            groups, usage = rollouts(client, problems, policy, seed=3_000_000 + number * 10_000)
            group_rewards = [rewards(problem, group) for problem, group in zip(problems, groups, strict=True)]
            result = results[way]
            result.variance.append(fmean(map(pvariance, group_rewards)))
            result.right.append(fmean(map(fmean, group_rewards)))
            result.length.append(fmean(length for group in groups for length in group.lengths))
            result.generated.append(usage.generated)
    return results


def rewards(problem: Problem, group: Group) -> list[float]:
    return [score(problem, trajectory) for trajectory in group.trajectories]


def report(scored: Mapping[str, Scored], groups: Mapping[str, Mapping[str, Groups]]) -> str:
    rows, pruned = [], []
    for kind, each in scored.items():
        aucs = (each.auc(difficulty) for difficulty in (None, "easy", "hard"))
        brier, error = brier_score(each.qualities, each.right), calibration_error(each.qualities, each.right)
        rows.append([kind, *aucs, f"{brier:.3f}", f"{error:.3f}", str(len(each.right))])
    for kind, ways in groups.items():
        for way, result in ways.items():
            error = np.std(result.variance, ddof=1) / np.sqrt(len(result.variance))
            cells = [f"{fmean(result.variance):.3f} ({error:.3f})", f"{fmean(result.right):.3f}"]
            generated = sum(result.generated) / sum(ways["none"].generated)
            pruned.append([kind, way, *cells, f"{fmean(result.length):.1f}", f"{generated:.2f}"])
    head = ["score", "AUC", "easy", "hard", "Brier score", "calibration error", "trajectories"]
    pruned_head = ["score", "pruned", "reward variance", "right", "length mean", "generated / none"]
    return f"{markdown(head, rows)}\n\n{markdown(pruned_head, pruned)}"


if __name__ == "__main__":
    sys.exit(main())
