"""Simulate some steps of a training run under each policy, all on the same candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import fmean

import numpy as np

from darts_server.policy.auto import chooser
from darts_server.policy.auto.chooser import Choice
from darts_server.policy.auto.options import Auto, AutoLimits
from darts_server.policy.auto.state import AutoState
from darts_server.policy.deadline import RecentCompletionLengths
from darts_server.policy.length_profile import LengthProfile, ratios_to_mean
from darts_server.policy.lengths import Observation, PromptStats, estimate_lengths, update_stats
from darts_server.policy.simulation.batch import Batch, BatchPlan, Floats, Ints
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.forecast import RATIOS, Expectation
from darts_server.policy.simulation.rollout import Rollout, simulate
from darts_server.simulation.policies import Policy
from darts_server.simulation.workload import Workload

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
    steps, waiting, fresh, state = [], list[Prompt](), first * needed, AutoState()
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
            limits = AutoLimits(most_stale=policy.most_stale)
            choice = chooser.choose_resuming(Auto(limits, ()), state, needed, len(batch))
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
            rows = np.flatnonzero(step.rollout.returned.any(axis=1))
            lengths = step.rollout.returned[rows].astype(np.int64).tolist()
            measured = chooser.MeasuredResuming(
                lengths,
                round(float(step.batch.prompt_tokens.mean())),
                step.stale_tokens,
                int(step.rollout.generated.sum()),
                step.rollout.seconds,
            )
            state = chooser.learn_resuming(state, choice, measured, candidates.machine)
    return steps[-count:]


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


# --- auto, which learns from batch to batch as the server does ----------------


def run_auto(auto: Auto, candidates: Candidates) -> tuple[list[Step], str]:
    """Simulate the measured steps after `LEARNING` others, from which it learns. Returns what it did, too."""
    run, steps = AutoRun(auto, candidates), candidates.steps
    for step in range(LEARNING):
        run.run(candidates.step_prompts(steps + step))
    measured = [run.run(candidates.step_prompts(step)) for step in range(steps)]
    names = dict.fromkeys(choice.option.name for choice, _ in measured)
    return [step for _, step in measured], ", ".join(names)


@dataclass(slots=True)
class AutoRun:
    """What `auto` has learned so far. The machine is known to it, except for the training."""

    auto: Auto
    candidates: Candidates
    state: AutoState = field(default_factory=AutoState)
    profile: LengthProfile = field(default_factory=LengthProfile)

    def run(self, prompts: Sequence[Prompt]) -> tuple[Choice, Step]:
        """Run one batch."""
        size, machine = self.candidates.size, self.candidates.machine
        choice = chooser.choose_by_size(self.auto, size, len(prompts))
        is_forecast = choice is None
        if choice is None:
            expectation, rng = self._expect(prompts, 3)
            choice = chooser.choose(self.auto, self.state, size, expectation, machine, len(prompts), rng)
        self.state = chooser.begin(self.state, choice)
        step = run_step(Policy(choice.option.name, choice.option.shaping), prompts, None, self.candidates)
        # It is measured as the server does, and the lengths of its groups are learned.
        rollout, batch, means = step.rollout, step.batch, []
        ended = batch.valid & (rollout.generated == batch.ends)
        for row, prompt in enumerate(prompts):
            pairs = zip(rollout.generated[row], ended[row], strict=True)
            observed = [Observation(int(tokens), censored=not end) for tokens, end in pairs if tokens > 0]
            estimate = estimate_lengths(observed)
            self.profile.observe(ratios_to_mean(observed, estimate, self.candidates.earlier(prompt.number)))
            means.append(estimate.mean)
        lengths = rollout.lengths
        measured = chooser.Measured(
            rollout.seconds,
            float(lengths.mean()),
            int((rollout.truncated & (rollout.returned < batch.ends)).sum()) / lengths.size,
            batch.max_tokens if (rollout.generated == batch.max_tokens).any() else None,
            int(rollout.generated.max()),
            means,
            float((lengths >= batch.max_tokens).mean()),
        )
        self.state = chooser.learn(self.state, choice, measured)
        if chooser.needs_hindsight(self.state, choice) and is_forecast:
            expectation, rng = self._expect(prompts, 4)
            late = chooser.hindsight(choice, size, expectation, machine, len(prompts), rng)
            self.state = chooser.learn(self.state, late, replace(measured, means=()))
        self.state = chooser.learn_training(self.state, float(step.rollout.lengths.sum()), step.training_seconds)
        return choice, step

    def _expect(self, prompts: Sequence[Prompt], stream: int) -> tuple[Expectation | None, np.random.Generator]:
        """Return what is known of a batch now, and the random numbers to forecast it with."""
        rng = np.random.default_rng([self.candidates.seed, self.state.batches, stream])
        earlier = [self.candidates.earlier(prompt.number) for prompt in prompts]
        batch = self.candidates.batch(prompts, 1)
        expectation = Expectation.of(
            [None if stats is None else stats.mean_ema for stats in earlier],
            [None if stats is None else stats.std_ema for stats in earlier],
            self.profile.quantiles(RATIOS),
            self.state.means,
            rng,
            round(float(batch.prompt_tokens.mean())),
            batch.max_tokens,
        )
        return expectation, rng
