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
    first_token_step: int = 0
    """Step that generated the first of the carried tokens."""

    def is_too_old(self, step: int) -> bool:
        """Return whether the server would not continue the carried tokens in this step."""
        return self.carried is not None and step - self.first_token_step > MAX_STALENESS

    def restarted(self) -> "Prompt":
        return Prompt(self.number, self.attempt + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    batch: Batch
    plan: BatchPlan
    rollout: Rollout
    training_seconds: float
    seconds: float
    """Seconds of the whole step. Rollout and training may overlap."""

    @classmethod
    def after(
        cls,
        rollout: Rollout,
        batch: Batch,
        plan: BatchPlan,
        machine: Machine,
    ) -> "Step":
        """Return a step that trains on the returned trajectories and their prompts after the rollout."""
        is_returned = rollout.returned > 0
        tokens = rollout.returned.sum() + (is_returned * batch.prompt_tokens[:, None]).sum()
        training = machine.training_seconds(int(tokens))
        return cls(batch, plan, rollout, training, rollout.seconds + training)

    @property
    def stale_tokens(self) -> int:
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
    _earlier_stats: dict[int, PromptStats] = field(default_factory=dict)

    def build_batch(self, prompts: Sequence[Prompt], count: int) -> Batch:
        prompt_tokens = []
        lengths = []
        tail_draws = []
        generated_before = np.zeros((len(prompts), count), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            key = (prompt.number, prompt.attempt)
            if key not in self._drawn:
                # Draw as many candidates as any policy starts, so that all policies get the same candidates. The last
                # number of the seed begins with 2, because `earlier_stats` uses 1.
                rng = np.random.default_rng([self.seed, prompt.number, 2 + prompt.attempt])
                drawn_lengths = self.workload.lengths(prompt.number, self.most, rng, prompt.attempt)
                self._drawn[key] = (self.workload.prompt_tokens(prompt.number), drawn_lengths, rng.random(self.most))
            tokens, all_lengths, all_draws = self._drawn[key]
            prompt_tokens.append(tokens)
            lengths.append(all_lengths[:count])
            tail_draws.append(all_draws[:count])
            if prompt.carried is not None:
                generated_before[row, : prompt.carried.size] = prompt.carried
        return Batch(
            np.asarray(prompt_tokens),
            np.asarray(lengths),
            np.asarray(tail_draws),
            self.workload.max_tokens,
            generated_before,
        )

    def earlier_stats(self, number: int) -> PromptStats | None:
        """Return the statistics of a prompt after one earlier group, or None for a new prompt."""
        if not self.knows_prompts:
            return None
        if number not in self._earlier_stats:
            rng = np.random.default_rng([self.seed, number, 1])
            # Attempt 0 would return a trace's samples, which `build_batch` returns.
            lengths = self.workload.lengths(
                number,
                self.size,
                rng,
                attempt=1,
            ).tolist()
            limit = self.workload.max_tokens
            observations = [Observation(min(tokens, limit), censored=tokens >= limit) for tokens in lengths]
            self._earlier_stats[number] = update_stats(None, observations, estimate_lengths(observations), 0)
        return self._earlier_stats[number]

    def in_server_order(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return left-over prompts first, then prompts with long groups."""

        def sort_key(prompt: Prompt) -> tuple[bool, float]:
            is_new = prompt.carried is None and prompt.attempt == 0
            stats = self.earlier_stats(prompt.number)
            return is_new, 0.0 if stats is None else -stats.mean_ema

        return sorted(prompts, key=sort_key)


def run_policy(policy: Policy, candidates: Candidates) -> list[Step]:
    """Simulate the measured steps under a policy."""
    needed = candidates.prompts
    recent = RecentCompletionLengths()
    state = AheadState()
    limits = AutoLimits()
    first_step = 0
    # A cycle is some usual steps and one long round. Whole cycles are measured.
    cycle = policy.steps_per_long_round
    if policy.most_stale is not None:
        limits = AutoLimits(most_stale=policy.most_stale)
    if policy.start == 1:
        # Without left-over prompts the warm-up would change nothing, so only its prompts are skipped.
        warm_up = WARM_UP
        first_step = WARM_UP
    elif policy.most_stale is not None:
        warm_up = LEARNING
    else:
        warm_up = cycle * ceil(WARM_UP / cycle)
    measured_steps = cycle * ceil(candidates.steps / cycle)

    steps: list[Step] = []
    left_over: list[Prompt] = []
    next_new = first_step * needed
    for number in range(first_step, warm_up + measured_steps):
        prompts = [prompt.restarted() if prompt.is_too_old(number) else prompt for prompt in left_over]
        left_over = []
        num_new = round(policy.start * needed) - len(prompts)
        if policy.long_rounds and len(prompts) < needed:
            # Set left-over prompts aside until they fill a long round, a step without new prompts.
            left_over = prompts
            prompts = []
            num_new = round(policy.start * needed)
        elif policy.long_rounds:
            left_over = prompts[needed:]
            prompts = prompts[:needed]
            num_new = 0
        prompts = [*prompts, *map(Prompt, range(next_new, next_new + num_new))]
        next_new += num_new
        if policy.long_first:
            prompts = candidates.in_server_order(prompts)
        if policy.most_stale is not None:
            choice = choose_ahead(limits, state, needed, len(prompts))
            left_over = [*prompts[choice.started :], *left_over]
            prompts = prompts[: choice.started]

        needed_groups = needed if len(prompts) > needed else None
        step = run_step(policy, prompts, needed_groups, candidates, recent)
        steps.append(step)

        # Left-over prompts start again, or continue.
        tokens = step.rollout.generated.astype(np.int64) + step.batch.generated_before
        for row in np.flatnonzero(np.isinf(step.rollout.completed_at)).tolist():
            prompt = prompts[row]
            generated = tokens[row, : step.plan.candidates[row]]
            first_token_step = number if prompt.carried is None else prompt.first_token_step
            if not generated.any():
                left_over.append(prompt)
            elif policy.resumes:
                left_over.append(Prompt(prompt.number, prompt.attempt, generated, first_token_step))
            else:
                left_over.append(prompt.restarted())
        if policy.most_stale is not None:
            state = learn_ahead(limits, state, choice, measure_outcome(step, candidates.machine))
    return steps[-measured_steps:]


def measure_outcome(step: Step, machine: Machine) -> AheadOutcome:
    returned = step.rollout.returned[step.rollout.returned.any(axis=1)]
    # As on the server, the longest groups come first.
    longest_first = returned[np.argsort(-returned.sum(axis=1), kind="stable")]
    # The server learns the time of a decode step by the number of sequences, whose contexts have the usual length:
    # over all steps of all trajectories, the mean number of generated tokens is sum(length²) / sum(length) / 2.
    mean_context = step.batch.prompt_tokens.mean() + (returned**2).sum() / returned.sum() / 2
    times = machine.step_time
    batch_sizes = np.asarray(times.decode.batches)
    if times.drafts:
        # With drafts, the seconds are not linear between two batch sizes of the curve.
        batch_sizes = np.union1d(batch_sizes, np.geomspace(1, machine.max_num_seqs, CURVE_POINTS).round())
    seconds, _ = times.seconds_per_token(batch_sizes, batch_sizes * mean_context)
    per_sequence = times.decode.per_sequence + float(times.per_context_token * mean_context)
    curve = LatencyCurve(tuple(batch_sizes.tolist()), tuple(seconds.tolist()), per_sequence)
    curve = curve.scaled(1 / machine.replicas)
    capacity = machine.replicas * machine.max_num_seqs
    seconds_without_others = curve.completion_seconds(longest_first.ravel().tolist(), capacity)
    seconds_without_others = seconds_without_others.reshape(longest_first.shape)
    return AheadOutcome(
        returned=int(returned.sum()),
        stale=step.stale_tokens,
        generated=int(step.rollout.generated.sum()),
        seconds=step.rollout.seconds,
        alone=seconds_without_others.max(axis=1).tolist(),
    )


def run_step(
    policy: Policy,
    prompts: Sequence[Prompt],
    needed_groups: int | None,
    candidates: Candidates,
    recent: RecentCompletionLengths,
) -> Step:
    """Simulate a step with these prompts in their order, and add its completion lengths to ``recent``.

    Raises:
        ValueError: a sequence does not fit into an engine's KV cache.
    """
    machine = candidates.machine
    stats_of_prompts = [candidates.earlier_stats(prompt.number) for prompt in prompts]
    stds = [None if stats is None else stats.std_ema for stats in stats_of_prompts]
    means = [stats.mean_ema for stats in stats_of_prompts if stats is not None]
    mean_length = fmean(means) if means else None
    plan = BatchPlan.of(
        policy.shaping,
        candidates.size,
        stds,
        needed_groups=needed_groups,
        mean_length=mean_length,
    )
    # Carried prompts keep their candidates.
    counts = list(plan.candidates)
    for row, prompt in enumerate(prompts):
        if prompt.carried is not None:
            counts[row] = prompt.carried.size
    plan = replace(plan, candidates=counts)

    batch = candidates.build_batch(prompts, max(counts))
    longest = int((batch.prompt_tokens[:, None] + batch.capped_lengths).max())
    if machine.kv_blocks is not None and longest > machine.kv_blocks * machine.block_size:
        raise ValueError(f"{machine.kv_blocks} KV blocks are too few for a sequence of {longest} tokens")

    rollout = simulate(batch, plan.with_recent(recent), machine)
    for tokens in rollout.completion_lengths:
        recent.add(tokens)
    return Step.after(rollout, batch, plan, machine)
