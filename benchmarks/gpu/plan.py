"""The compared policies, what the cost model predicts of each, and the size of rollouts that fits the time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from time import monotonic

import numpy as np

from benchmarks.gpu.traces import Prompt, Trace
from darts_server.estimates.latency import LatencyCurve
from darts_server.estimates.lengths import Observation, PromptStats, estimate_lengths, update_stats
from darts_server.group.candidate import Candidate, State
from darts_server.policy.allocation import allocate_by_std
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.types import FinishReason
from examples.tiny_rl.replay import Replay, replay

SIZE = 8
TAIL_SEED = 1
PLAIN, OFF, AGAIN = "plain", "off", "plain again"
UNSHAPED = (PLAIN, OFF, AGAIN)

SHAPED: dict[str, Shaping] = build_policies(Shaping(), Deadline(exploration=0.0))
ESSENTIAL = (OFF, "uniform", "cap")
"""Lengths are divided until these fit the time; the others get the remaining time."""
ORDER = (*ESSENTIAL, "darts_cut", "darts")
MARGIN, EXTRA_SECONDS = 1.2, 0.5
"""Time of a rollout beyond the prediction, which ignores growing contexts and prefill: a factor, and seconds."""
TIMEOUT_FACTOR = 3.0
"""A rollout that takes this many times its estimate is stopped, so that others have a chance."""
MIN_PROMPTS = 64
"""A smaller batch says little about large ones, so it is not halved further."""


class Budget:
    """An amount of time, counted from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds

    @property
    def remaining(self) -> float:
        """The remaining seconds, at least 0."""
        return max(0.0, self._ends_at - self._clock())

    def fits(self, seconds: float) -> bool:
        """Return whether something that takes this long would end in time."""
        return seconds <= self.remaining

    def split(self, weights: Mapping[str, float]) -> Iterator[tuple[str, "Budget"]]:
        """Yield a budget for each name, in order; time that one does not use goes to those after it.

        Each is created when it is requested: its share of the remaining time is its weight against those of the rest.
        """
        rest = sum(weights.values())
        for name, weight in weights.items():
            yield name, Budget(self.remaining * weight / rest, self._clock)
            rest -= weight


# --- what is predicted --------------------------------------------------------


def statistics(prompt: Prompt, trace: Trace) -> PromptStats:
    """Return a prompt's statistics after one earlier group of it."""
    observations = [Observation(n, censored=trace.reason(n) is FinishReason.LENGTH) for n in prompt.earlier]
    return update_stats(None, observations, estimate_lengths(observations), 0)


def tail_seed(prompt: int) -> tuple[int, int]:
    """Return the seed of a prompt's sampled tail, the same under every policy."""
    return (TAIL_SEED, prompt)


def predict_tokens(policy: str, trace: Trace) -> list[int]:
    """Return the tokens of each candidate, in order of arrival, if all candidates of a prompt run side by side."""
    if policy in UNSHAPED:
        return [length for prompt in trace.prompts for length in prompt.lengths[:SIZE]]
    return [length for group in replay_all(SHAPED[policy], trace) for length in group.lengths]


def replay_all(shaping: Shaping, trace: Trace) -> list[Replay]:
    """Replay each prompt, with all of its candidates side by side."""
    counts = [shaping.candidates(SIZE)] * len(trace.prompts)
    if shaping.adaptive:
        low, high = shaping.candidate_limits(SIZE)
        stds = [statistics(prompt, trace).std_ema for prompt in trace.prompts]
        counts = allocate_by_std(stds, budget=sum(counts), low=low, high=high)
    batch, limit = [], None
    for number, (prompt, count) in enumerate(zip(trace.prompts, counts, strict=True)):
        draws = np.random.default_rng(tail_seed(number)).random(count).tolist()
        ends = [(length, trace.reason(length)) for length in prompt.lengths[:count]]
        batch.append([Candidate(i, draws[i], State.FINISHED, *end) for i, end in enumerate(ends)])
    if shaping.deadline is not None:
        valid = (sorted(one.tokens for one in candidates if one.is_valid) for candidates in batch)
        needs = [lengths[SIZE - 1] for lengths in valid if len(lengths) >= SIZE]
        limit = shaping.deadline.from_lengths(needs, len(needs))
    return [
        replay(shaping.selection_rule(SIZE, shaping.is_saturated(SIZE, len(candidates))), candidates, limit)
        for candidates in batch
    ]


# --- what fits the time -------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The trace, shortened and with as many prompts as fit, and the predicted seconds of each policy."""

    trace: Trace
    predicted: dict[str, float]

    def estimate(self, policy: str) -> float:
        """Return the seconds that it may take, with a margin."""
        return MARGIN * self.predicted[policy] + EXTRA_SECONDS

    def limit(self, policy: str, least: float, remaining: float) -> float:
        """Return the seconds after which it is stopped, at least ``least`` where so many remain."""
        return min(max(TIMEOUT_FACTOR * self.estimate(policy), least), remaining)


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
    counts = [len(trace.prompts)]
    while counts[-1] // 2 >= MIN_PROMPTS:
        counts.append(counts[-1] // 2)
    tokens: dict[int, dict[str, list[int]]] = {}
    for divisor, count in product(divisors, counts):
        part = trace.first(count)
        if count not in tokens:  # the replays take seconds
            tokens[count] = {policy: predict_tokens(policy, part) for policy in (*must, *may)}
        times = {
            policy: float(max(curve.completion_seconds([length / divisor for length in lengths], capacity)))
            for policy, lengths in tokens[count].items()
        }
        plan = Plan(part.shortened(divisor), times)
        if budget.fits(sum(map(plan.estimate, must))):
            break
    return plan
