"""The compared policies, and predictions of the cost model for each."""

from collections.abc import Sequence

import numpy as np

from benchmarks.cost_model import rollout_seconds
from benchmarks.gpu.traces import Prompt, Trace
from darts_server.policy.allocation import allocate_by_std
from darts_server.policy.candidate import Candidate, State
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.lengths import Observation, PromptStats, update_stats
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
MEANING = (
    f"All give {SIZE} trajectories a prompt. `{PLAIN}` is vLLM's `AsyncLLM` itself, measured twice; `{OFF}` "
    "is the same through our code with nothing shaped."
)


def statistics(prompt: Prompt, trace: Trace) -> PromptStats:
    """Return a prompt's statistics after one earlier group of it."""
    observations = [Observation(n, censored=trace.reason(n) is FinishReason.LENGTH) for n in prompt.earlier]
    return update_stats(None, observations, 0)


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
    batch = []
    for number, (prompt, count) in enumerate(zip(trace.prompts, counts(shaping, trace), strict=True)):
        draws = np.random.default_rng(tail_seed(number)).random(count).tolist()
        ends = [(length, trace.reason(length)) for length in prompt.lengths[:count]]
        batch.append([Candidate(i, draws[i], State.FINISHED, *end) for i, end in enumerate(ends)])
    limit = None
    if shaping.deadline is not None:
        needs = [need for candidates in batch if (need := _needed(candidates)) is not None]
        limit = shaping.deadline.from_lengths(needs, len(needs))
    return [
        replay(shaping.selection_rule(SIZE, shaping.is_saturated(SIZE, len(candidates))), candidates, limit)
        for candidates in batch
    ]


def counts(shaping: Shaping, trace: Trace) -> list[int]:
    """Return the number of candidates of each prompt."""
    if not shaping.adaptive:
        return [shaping.candidates(SIZE)] * len(trace.prompts)
    stds = [statistics(prompt, trace).std_ema for prompt in trace.prompts]
    low, high = shaping.bounds(SIZE)
    return allocate_by_std(stds, budget=shaping.candidates(SIZE) * len(stds), low=low, high=high)


def predict_seconds(curve: LatencyCurve, lengths: Sequence[int], divisor: int, capacity: int | None) -> float:
    """Predict the time of a rollout with these lengths divided by ``divisor``, by the paper's cost model."""
    return rollout_seconds(curve, [length / divisor for length in lengths], capacity)


def _needed(candidates: Sequence[Candidate]) -> int | None:
    lengths = sorted(c.tokens for c in candidates if c.valid)
    return lengths[SIZE - 1] if len(lengths) >= SIZE else None
