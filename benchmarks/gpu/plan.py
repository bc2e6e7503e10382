"""Choose the size of rollouts so that those under all policies fit the time."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.policies import AGAIN, ESSENTIAL, PLAIN, predict_seconds, predict_tokens
from benchmarks.gpu.traces import Trace
from darts_server.policy.latency import LatencyCurve

MARGIN, EXTRA_SECONDS = 1.2, 0.5
"""Time of a rollout beyond the prediction, which ignores growing contexts and prefill: a factor, and seconds."""
TIMEOUT_FACTOR = 3.0
"""A rollout that takes this many times its estimate is stopped, so that others have a chance."""
MIN_TIMEOUT_SECONDS = 10.0
"""The timeout of very short rollouts, whose time is mostly other load on the machine."""
MIN_PROMPTS = 64
"""A smaller batch says little about large ones, so it is not halved further."""


@dataclass(frozen=True)
class Plan:
    """The trace, shortened and with as many prompts as fit, and the predicted seconds of each policy."""

    trace: Trace
    predicted: dict[str, float]

    def estimate(self, policy: str) -> float:
        """Return the seconds that it may take, with a margin."""
        return MARGIN * self.predicted[policy] + EXTRA_SECONDS

    def limit(self, policy: str, remaining: float) -> float:
        """Return the seconds after which it is stopped."""
        return min(max(TIMEOUT_FACTOR * self.estimate(policy), MIN_TIMEOUT_SECONDS), remaining)


def order_policies(policies: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the policies that must fit, with plain vLLM before and after them, and those for the remaining time."""
    must = [PLAIN, *(policy for policy in policies if policy in ESSENTIAL), AGAIN]
    return must, [policy for policy in policies if policy not in ESSENTIAL]


def make_plan(
    curve: LatencyCurve,
    trace: Trace,
    policies: Sequence[str],
    divisors: Sequence[int],
    capacity: int | None,
    budget: Budget,
) -> Plan:
    """Choose the longest lengths that fit, and for these the most prompts; the smallest rollout if none fits."""
    must, may = order_policies(policies)
    tokens: dict[int, dict[str, list[int]]] = {}
    for divisor in divisors:
        for prompts in prompt_counts(len(trace.prompts)):
            part = trace.first(prompts)
            if prompts not in tokens:
                tokens[prompts] = {policy: predict_tokens(policy, part) for policy in (*must, *may)}
            times = {
                name: predict_seconds(curve, lengths, divisor, capacity) for name, lengths in tokens[prompts].items()
            }
            plan = Plan(part.shortened(divisor), times)
            if budget.fits(sum(map(plan.estimate, must))):
                return plan
    return plan


def prompt_counts(largest: int) -> list[int]:
    """Return the numbers of prompts to try, largest first."""
    counts = [largest]
    while counts[-1] // 2 >= MIN_PROMPTS:
        counts.append(counts[-1] // 2)
    return counts
