"""How large a rollout may be, that those under all policies fit the time."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.policies import AGAIN, ESSENTIAL, PLAIN, foretold, seconds
from benchmarks.gpu.traces import Trace
from darts_server.policy.latency.curve import LatencyCurve

MARGIN, EXTRA_SECONDS = 1.2, 0.5
"""What a rollout may take beyond what is foretold: contexts grow, and there are prompts to read."""
PATIENCE = 3.0
"""A rollout that takes this many times what it may is stopped, so that others have a chance."""
LEAST_SECONDS = 10.0
"""But not before: of a rollout of a second, what else the machine does is the most."""
FEWEST_PROMPTS = 64
"""With fewer a batch says little of large ones; it is halved no further."""


@dataclass(frozen=True)
class Plan:
    """The trace, shortened and with as many prompts as fit, the policies in their order, and the seconds of each."""

    trace: Trace
    foretold: dict[str, float]

    def needs(self, policy: str) -> float:
        """Seconds that it may well take."""
        return MARGIN * self.foretold[policy] + EXTRA_SECONDS

    def limit(self, policy: str, left: float) -> float:
        """Seconds after which it is stopped."""
        return min(max(PATIENCE * self.needs(policy), LEAST_SECONDS), left)


def ordered(policies: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those that must fit, vLLM's own engine before and after them, and those that get what time is left."""
    must = [PLAIN, *(policy for policy in policies if policy in ESSENTIAL), AGAIN]
    return must, [policy for policy in policies if policy not in ESSENTIAL]


def planned(
    curve: LatencyCurve,
    trace: Trace,
    policies: Sequence[str],
    divisors: Sequence[int],
    capacity: int | None,
    budget: Budget,
) -> Plan:
    """The longest lengths that fit, and for these the most prompts; the smallest of all if none fits."""
    must, may = ordered(policies)
    tokens: dict[int, dict[str, list[int]]] = {}
    for divisor in divisors:
        for prompts in sizes(len(trace.prompts)):
            part = trace.first(prompts)
            if prompts not in tokens:
                tokens[prompts] = {policy: foretold(policy, part) for policy in (*must, *may)}
            times = {name: seconds(curve, lengths, divisor, capacity) for name, lengths in tokens[prompts].items()}
            plan = Plan(part.shortened(divisor), times)
            if budget.fits(sum(map(plan.needs, must))):
                return plan
    return plan


def sizes(most: int) -> list[int]:
    """Numbers of prompts that may be tried, largest first."""
    tried = [most]
    while tried[-1] // 2 >= FEWEST_PROMPTS:
        tried.append(tried[-1] // 2)
    return tried
