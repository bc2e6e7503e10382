"""Simulate some steps of a training run under each policy, with the same candidates under all policies."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import fmean

import numpy as np

from darts_server.estimates.latency import LatencyCurve
from darts_server.estimates.lengths import Observation, PromptStats, estimate_lengths, update_stats
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats, Ints
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.model.rollout import Rollout, simulate
from darts_server.offline.simulation.policies import Policy
from darts_server.offline.simulation.workload import Workload
from darts_server.policy.auto import AheadOutcome, AheadState, AutoLimits, choose_ahead, learn_ahead
from darts_server.policy.deadline import RecentCompletionLengths

MAX_STALENESS = 4
"""The server's default."""
LEARNING = 20
"""Steps in which `auto` learns before the measured steps."""
CURVE_POINTS = 24
"""Points of the curve that `auto` learns with drafts."""
WARM_UP = 2
"""Steps before the measured steps, if prompts are carried over."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    number: int
    attempt: int = 0
    """Number of restarts."""
    carried: Ints | None = None
    """Tokens that each candidate already has, if any."""
    since: int = 0
    """Step that generated the first of the carried tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    batch: Batch
    plan: BatchPlan
    rollout: Rollout
    training_seconds: float
    seconds: float
    """Seconds of the whole step. Rollout and training may overlap."""

    @classmethod
    def after(cls, rollout: Rollout, batch: Batch, plan: BatchPlan, machine: Machine) -> "Step":
        """Return a step that trains on the returned trajectories and their prompts after the rollout."""
        is_returned = rollout.returned > 0
        tokens = rollout.returned.sum() + (is_returned * batch.prompt_tokens[:, None]).sum()
        training = machine.training_seconds(int(tokens))
        return cls(batch, plan, rollout, training, rollout.seconds + training)

    @property
    def stale_tokens(self) -> int:
        """Number of returned tokens that an earlier step has generated."""
        return int(self.batch.generated_before[self.rollout.returned > 0].sum())


@dataclass(slots=True)
class Candidates:
    """Candidates of a training run, which are the same under every policy."""

    workload: Workload
    machine: Machine
    size: int
    """Group size."""
    prompts: int
    """Prompts of a step."""
    steps: int
    most: int
    """Maximum number of candidates of a prompt."""
    knows_prompts: bool = True
    """Whether mean and std of each prompt's lengths are known from an earlier group."""
    seed: int = 0
    _drawn: dict[tuple[int, int], tuple[int, Ints, Floats]] = field(default_factory=dict)
    _earlier: dict[int, PromptStats] = field(default_factory=dict)

    def batch(self, prompts: Sequence[Prompt], count: int) -> Batch:
        """Build a batch with up to ``count`` candidates of each prompt."""
        prompt_tokens = []
        lengths = []
        draws = []
        generated_before = np.zeros((len(prompts), count), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            key = (prompt.number, prompt.attempt)
            if key not in self._drawn:
                # Draw as many candidates as any policy starts, so that all policies get the same candidates. The last
                # number of the seed begins with 2, because `earlier` uses 1.
                rng = np.random.default_rng([self.seed, prompt.number, 2 + prompt.attempt])
                drawn = self.workload.lengths(prompt.number, self.most, rng, prompt.attempt)
                self._drawn[key] = (self.workload.prompt_tokens(prompt.number), drawn, rng.random(self.most))
            tokens, all_lengths, all_draws = self._drawn[key]
            prompt_tokens.append(tokens)
            lengths.append(all_lengths[:count])
            draws.append(all_draws[:count])
            if prompt.carried is not None:
                generated_before[row, : prompt.carried.size] = prompt.carried
        return Batch(
            np.asarray(prompt_tokens),
            np.asarray(lengths),
            np.asarray(draws),
            self.workload.max_tokens,
            generated_before,
        )

    def earlier(self, number: int) -> PromptStats | None:
        """Return the statistics of a prompt after one earlier group, or None for a new prompt."""
        if not self.knows_prompts:
            return None
        if number not in self._earlier:
            rng = np.random.default_rng([self.seed, number, 1])
            # Attempt 0 would return a trace's samples, which `batch` returns.
            lengths = self.workload.lengths(number, self.size, rng, attempt=1).tolist()
            limit = self.workload.max_tokens
            observed = [Observation(min(tokens, limit), censored=tokens >= limit) for tokens in lengths]
            self._earlier[number] = update_stats(None, observed, estimate_lengths(observed), 0)
        return self._earlier[number]

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Order prompts as the server does: left-over prompts first, then prompts with long groups."""

        def key(prompt: Prompt) -> tuple[bool, float]:
            is_new = prompt.carried is None and prompt.attempt == 0
            earlier = self.earlier(prompt.number)
            return is_new, 0.0 if earlier is None else -earlier.mean_ema

        return sorted(prompts, key=key)


def run_policy(policy: Policy, candidates: Candidates) -> list[Step]:
    """Simulate the measured steps under a policy. With long rounds whole cycles are measured, which may be more."""
    needed = candidates.prompts
    recent = RecentCompletionLengths()
    state = AheadState()
    limits = AutoLimits()
    first = 0
    if policy.most_stale is not None:
        limits = AutoLimits(most_stale=policy.most_stale)
        warm_up = LEARNING
    else:
        warm_up = policy.cycle * ceil(WARM_UP / policy.cycle)
    # Without left-over prompts the warm-up would change nothing.
    if policy.start == 1:
        warm_up = WARM_UP
        first = WARM_UP
    count = policy.cycle * ceil(candidates.steps / policy.cycle)

    steps: list[Step] = []
    waiting: list[Prompt] = []
    next_new = first * needed
    for number in range(first, warm_up + count):
        # The prompts of the step: left-over prompts, and new prompts.
        batch = waiting
        waiting = []
        new = round(policy.start * needed) - len(batch)
        if policy.long_rounds and len(batch) < needed:
            waiting = batch
            batch = []
            new = round(policy.start * needed)
        elif policy.long_rounds:
            waiting = batch[needed:]
            batch = batch[:needed]
            new = 0
        batch = [*batch, *map(Prompt, range(next_new, next_new + new))]
        next_new += new
        if policy.long_first:
            batch = candidates.longest_first(batch)
        if policy.most_stale is not None:
            choice = choose_ahead(limits, state, needed, len(batch))
            waiting = [*batch[choice.started :], *waiting]
            batch = batch[: choice.started]

        enough = needed if len(batch) > needed else None
        step = run_step(policy, batch, enough, candidates, recent)
        steps.append(step)

        # Left-over prompts start again, or continue.
        tokens = step.rollout.generated.astype(np.int64) + step.batch.generated_before
        for row in np.flatnonzero(np.isinf(step.rollout.completed_at)).tolist():
            prompt = batch[row]
            generated = tokens[row, : step.plan.candidates[row]]
            since = number if prompt.carried is None else prompt.since
            if not generated.any():
                waiting.append(prompt)
            elif policy.resumes and number + 1 - since <= MAX_STALENESS:
                waiting.append(Prompt(prompt.number, prompt.attempt, generated, since))
            else:
                waiting.append(Prompt(prompt.number, prompt.attempt + 1))
        if policy.most_stale is not None:
            state = learn_ahead(limits, state, choice, outcome_of(step, candidates.machine))
    return steps[-count:]


def outcome_of(step: Step, machine: Machine) -> AheadOutcome:
    """Return the figures from which `auto` learns."""
    returned = step.rollout.returned[step.rollout.returned.any(axis=1)]
    longest_first = returned[np.argsort(-returned.sum(axis=1), kind="stable")]
    # The server learns the time of a decode step by the number of sequences, whose contexts have the usual length.
    context = step.batch.prompt_tokens.mean() + (returned**2).sum() / returned.sum() / 2
    times = machine.step_time
    batches = np.asarray(times.decode.batches)
    if times.drafts:
        batches = np.union1d(batches, np.geomspace(1, machine.max_num_seqs, CURVE_POINTS).round())
    seconds, _ = times.seconds_per_token(batches, batches * context)
    per_sequence = times.decode.per_sequence + float(times.per_context_token * context)
    curve = LatencyCurve(tuple(batches.tolist()), tuple(seconds.tolist()), per_sequence)
    curve = curve.scaled(1 / machine.replicas)
    capacity = machine.replicas * machine.max_num_seqs
    alone = curve.completion_seconds(longest_first.ravel().tolist(), capacity).reshape(longest_first.shape)
    return AheadOutcome(
        returned=int(returned.sum()),
        stale=step.stale_tokens,
        generated=int(step.rollout.generated.sum()),
        seconds=step.rollout.seconds,
        alone=alone.max(axis=1).tolist(),
    )


def run_step(
    policy: Policy,
    prompts: Sequence[Prompt],
    enough: int | None,
    candidates: Candidates,
    recent: RecentCompletionLengths,
) -> Step:
    """Simulate a step with these prompts in their order, and add its completion lengths to ``recent``.

    Raises:
        ValueError: a sequence does not fit into an engine's KV cache.
    """
    machine = candidates.machine
    earlier = [candidates.earlier(prompt.number) for prompt in prompts]
    stds = [None if stats is None else stats.std_ema for stats in earlier]
    means = [stats.mean_ema for stats in earlier if stats is not None]
    mean_length = fmean(means) if means else None
    plan = BatchPlan.of(policy.shaping, candidates.size, stds, needed_groups=enough, mean_length=mean_length)
    counts = list(plan.candidates)
    for row, prompt in enumerate(prompts):
        if prompt.carried is not None:
            counts[row] = prompt.carried.size
    plan = replace(plan, candidates=counts)

    batch = candidates.batch(prompts, max(counts))
    longest = int((batch.prompt_tokens[:, None] + batch.capped_lengths).max())
    if machine.kv_blocks is not None and longest > machine.kv_blocks * machine.block_size:
        raise ValueError(f"{machine.kv_blocks} KV blocks are too few for a sequence of {longest} tokens")

    rollout = simulate(batch, plan.with_recent(recent), machine)
    for tokens in rollout.completion_lengths:
        recent.add(tokens)
    return Step.after(rollout, batch, plan, machine)
