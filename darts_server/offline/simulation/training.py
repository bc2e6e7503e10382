"""Simulate some steps of a training run under each policy, all on the same candidates."""

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
"""Of the server by default: a prompt that goes on in more steps than so many starts again."""
LEARNING = 20
"""Steps before those that are measured under `auto`."""
WARM_UP = 2
"""Steps before those that are measured, where prompts are carried from step to step."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt of a step. ``carried``: tokens that its candidates already have; ``None`` if it starts afresh.

    ``since``: the step that has generated the first of them.
    """

    number: int
    attempt: int = 0
    carried: Ints | None = None
    since: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step: the ``batch`` that was rolled out, by which ``plan``, and seconds of ``rollout`` and training.

    ``seconds``: of the whole step, which is less than both together where they overlap.
    """

    batch: Batch
    plan: BatchPlan
    rollout: Rollout
    training_seconds: float
    seconds: float

    @property
    def stale_tokens(self) -> int:
        """Returned tokens that an earlier step has generated."""
        if self.batch.done is None:
            return 0
        return int(self.batch.done[self.rollout.returned > 0].sum())


@dataclass(slots=True)
class Candidates:
    """What is simulated: ``steps`` of ``prompts``, groups of ``size``, with the same candidates under every policy.

    ``most``: candidates of one prompt. ``knows_prompts``: whether a group of each prompt was seen before, so that mean
    and std of its lengths are known.
    """

    workload: Workload
    machine: Machine
    size: int
    prompts: int
    steps: int
    most: int
    knows_prompts: bool = True
    seed: int = 0
    _drawn: dict[tuple[int, int], tuple[int, Ints, Floats]] = field(default_factory=dict)
    _earlier: dict[int, PromptStats] = field(default_factory=dict)

    def batch(self, prompts: Sequence[Prompt], count: int) -> Batch:
        """Build a batch with up to ``count`` candidates for each prompt."""
        drawn, done = [], np.zeros((len(prompts), count), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            key = prompt.number, prompt.attempt
            if key not in self._drawn:
                rng = np.random.default_rng([self.seed, prompt.number, 2 + prompt.attempt])
                lengths = self.workload.lengths(prompt.number, self.most, rng, prompt.attempt)
                self._drawn[key] = self.workload.prompt_tokens(prompt.number), lengths, rng.random(self.most)
            drawn.append(self._drawn[key])
            if prompt.carried is not None:
                done[row, : prompt.carried.size] = prompt.carried
        tokens, lengths, draws = map(np.asarray, zip(*drawn, strict=True))
        return Batch(
            tokens, lengths[:, :count], draws[:, :count], self.workload.max_tokens, done if done.any() else None
        )

    def step_prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of a measured step, from 0, where nothing is carried from step to step."""
        first = (WARM_UP + step) * self.prompts
        return [Prompt(number) for number in range(first, first + self.prompts)]

    def earlier(self, number: int) -> PromptStats | None:
        """Return what is known of a prompt, from an earlier group of it; ``None`` for a new one."""
        if not self.knows_prompts:
            return None
        if number not in self._earlier:
            rng = np.random.default_rng([self.seed, number, 1])
            lengths = self.workload.lengths(number, self.size, rng, attempt=1).tolist()
            most = self.workload.max_tokens
            observed = [Observation(min(tokens, most), censored=tokens >= most) for tokens in lengths]
            self._earlier[number] = update_stats(None, observed, estimate_lengths(observed), 0)
        return self._earlier[number]

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Order prompts as a batch does: those of earlier steps, then by the mean length that is known, longest first.

        New ones stay in their order.
        """

        def key(prompt: Prompt) -> tuple[bool, float]:
            earlier = self.earlier(prompt.number)
            return prompt.carried is None and prompt.attempt == 0, 0.0 if earlier is None else -earlier.mean_ema

        return sorted(prompts, key=key)


def run_policy(policy: Policy, candidates: Candidates) -> list[Step]:
    """Simulate the measured steps under a policy.

    Prompts that are not complete in their step come first in the next one, or in a long round; of these steps whole
    cycles are measured, which may be more steps. They start again, or go on from what they have. Completion lengths are
    remembered from step to step. Where `auto` says how many are started, the first steps are those that it learns in.
    """
    recent, needed = RecentCompletionLengths(), candidates.prompts
    warm_up = LEARNING if policy.most_stale is not None else policy.cycle * ceil(WARM_UP / policy.cycle)
    first = 0
    if policy.start == 1:  # nothing is carried over
        first = warm_up = WARM_UP
    count = policy.cycle * ceil(candidates.steps / policy.cycle)
    steps, waiting, fresh, state = [], list[Prompt](), first * needed, AheadState()
    limits = AutoLimits() if policy.most_stale is None else AutoLimits(most_stale=policy.most_stale)
    for number in range(first, warm_up + count):
        # Those that start again, those that go on waiting, and how many new ones start.
        again, waiting, more = waiting, [], round(policy.start * needed) - len(waiting)
        if policy.long_rounds and len(again) < needed:
            again, waiting, more = [], again, round(policy.start * needed)
        elif policy.long_rounds:
            again, waiting, more = again[:needed], again[needed:], 0
        batch = [*again, *map(Prompt, range(fresh, fresh + more))]
        fresh += more
        if policy.long_first:
            batch = candidates.longest_first(batch)
        if policy.most_stale is not None:
            choice = choose_ahead(limits, state, needed, len(batch))
            batch, waiting = batch[: choice.begun], [*batch[choice.begun :], *waiting]
        enough = needed if len(batch) > needed else None
        step = run_step(policy, batch, enough, candidates, recent)
        steps.append(step)
        # Those that are left over.
        tokens = step.rollout.generated.astype(np.int64) + (0 if step.batch.done is None else step.batch.done)
        for row in np.flatnonzero(np.isinf(step.rollout.completed_at)).tolist():
            prompt, part = batch[row], tokens[row, : step.plan.candidates[row]]
            since = number if prompt.carried is None else prompt.since
            if not part.any():
                waiting.append(prompt)
            elif policy.resumes and number + 1 - since <= MAX_STALENESS:
                waiting.append(Prompt(prompt.number, prompt.attempt, part, since))
            else:
                waiting.append(Prompt(prompt.number, prompt.attempt + 1))
        if policy.most_stale is not None:
            state = learn_ahead(limits, state, choice, outcome_of(step, candidates.machine))
    return steps[-count:]


def outcome_of(step: Step, machine: Machine) -> AheadOutcome:
    """Return what `auto` learns from a step.

    The server learns the time of a decode step by the number of sequences, with contexts of the usual length.
    """
    returned = step.rollout.returned[step.rollout.returned.any(axis=1)]
    longest_first = returned[np.argsort(-returned.sum(axis=1), kind="stable")]
    context = step.batch.prompt_tokens.mean() + (returned**2).sum() / returned.sum() / 2
    per_sequence = float(machine.step_time.per_context_token * context)
    decode = machine.step_time.decode
    curve = LatencyCurve(
        decode.batches,
        tuple(seconds + per_sequence * count for count, seconds in zip(decode.batches, decode.seconds, strict=True)),
        decode.per_sequence + per_sequence,
    ).scaled(1 / machine.replicas)
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
    recent: RecentCompletionLengths | None = None,
) -> Step:
    """Simulate one step, with its prompts in this order.

    ``recent``: completion lengths of earlier steps, to which those of this step are added.

    Raises:
        ValueError: a sequence does not fit into an engine's KV cache.
    """
    machine, earlier = candidates.machine, [candidates.earlier(prompt.number) for prompt in prompts]
    stds = [None if stats is None else stats.std_ema for stats in earlier]
    means = [stats.mean_ema for stats in earlier if stats is not None]
    mean_length = fmean(means) if means else None
    plan = BatchPlan.of(policy.shaping, candidates.size, stds, enough=enough, mean_length=mean_length)
    counts = zip(prompts, plan.candidates, strict=True)
    plan = replace(plan, candidates=[n if prompt.carried is None else prompt.carried.size for prompt, n in counts])
    batch = candidates.batch(prompts, max(plan.candidates))
    longest = int((batch.prompt_tokens[:, None] + batch.ends).max())
    if machine.kv_blocks is not None and longest > machine.kv_blocks * machine.block_size:
        raise ValueError(f"{machine.kv_blocks} KV blocks are too few for a sequence of {longest} tokens")
    planned = plan
    if recent is not None and plan.shaping is not None and plan.deadline is not None:
        # The deadline of earlier groups, as `rollout.allocation` adds it for cohorts that are large enough.
        deadline = replace(plan.deadline, recent=recent.quantile(plan.deadline))
        planned = replace(plan, shaping=replace(plan.shaping, deadline=deadline))
    rollout = simulate(batch, planned, machine)
    if recent is not None:
        for tokens in rollout.completion_lengths:
            recent.add(tokens)
    training = machine.training_seconds(trained_tokens(batch, rollout))
    return Step(batch, plan, rollout, training, rollout.seconds + training)


def trained_tokens(batch: Batch, rollout: Rollout) -> int:
    """Return the tokens of the returned trajectories, with their prompts."""
    is_returned = rollout.returned > 0
    return int(rollout.returned.sum() + (is_returned * batch.prompt_tokens[:, None]).sum())
