"""Simulate some steps of a training run under each policy, all on the same candidates."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from darts_server.policy.auto.chooser import (
    Choice,
    Measured,
    begin,
    begin_with,
    choose,
    choose_by_size,
    hindsight,
    learn,
    learn_training,
    needs_hindsight,
    next_ahead,
)
from darts_server.policy.auto.options import Auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.candidate import Candidate
from darts_server.policy.deadline import RecentCompletionLengths
from darts_server.policy.length_profile import LengthProfile, ratios_to_mean
from darts_server.policy.lengths import Observation, PromptStats, estimate_lengths, update_stats
from darts_server.policy.simulation.batch import Batch, BatchPlan, Floats, Ints
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.forecast import RATIOS, Expectation
from darts_server.policy.simulation.rollout import Rollout, simulate
from darts_server.simulation.policies import Policy
from darts_server.simulation.workload import Workload
from darts_server.types import SelectedAs

MAX_STALENESS = 4
"""Of the server by default: a prompt that goes on in more steps than so many starts again."""
LEARNING = 20
"""Steps before those that are measured under `auto`."""
WARM_UP = 2
"""Steps before those that are measured, where prompts are carried from step to step."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated: ``steps`` of ``prompts``, groups of ``size``.

    ``knows_prompts``: whether a group of each prompt was seen before, so that mean and std of its lengths are known.
    """

    machine: Machine
    size: int
    prompts: int
    steps: int
    knows_prompts: bool = True
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt of a step. ``carried``: tokens that its candidates already have; ``None`` if it starts afresh.

    ``since``: the step that has generated the first of them.
    """

    number: int
    attempt: int = 0
    carried: Ints | None = None
    since: int = 0

    def left_over(self, step: int, tokens: Ints, resumes: bool) -> "Prompt":
        """Return the prompt for a later step than this one, which has generated ``tokens`` of its candidates."""
        if not tokens.any():
            return self
        since = step if self.carried is None else self.since
        if resumes and step + 1 - since <= MAX_STALENESS:
            return Prompt(self.number, self.attempt, tokens, since)
        return Prompt(self.number, self.attempt + 1)


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


class Candidates:
    """Lengths and tail draws of prompts' candidates, the same under every policy. ``most``: of one prompt."""

    def __init__(self, workload: Workload, setting: Setting, most: int) -> None:
        self.setting = setting
        self.most = most
        self._workload = workload
        self._drawn: dict[tuple[int, int], tuple[int, Ints, Floats]] = {}
        self._earlier: dict[int, PromptStats] = {}

    def batch(self, prompts: Sequence[Prompt], count: int) -> Batch:
        """Build a batch with up to ``count`` candidates for each prompt."""
        drawn, done = [], np.zeros((len(prompts), count), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            key = prompt.number, prompt.attempt
            if key not in self._drawn:
                rng = np.random.default_rng([self.setting.seed, prompt.number, 2 + prompt.attempt])
                lengths = self._workload.lengths(prompt.number, self.most, rng, prompt.attempt)
                self._drawn[key] = self._workload.prompt_tokens(prompt.number), lengths, rng.random(self.most)
            drawn.append(self._drawn[key])
            if prompt.carried is not None:
                done[row, : prompt.carried.size] = prompt.carried
        return Batch(
            np.asarray([tokens for tokens, _, _ in drawn]),
            np.stack([lengths[:count] for _, lengths, _ in drawn]),
            np.stack([draws[:count] for _, _, draws in drawn]),
            self._workload.max_tokens,
            done if done.any() else None,
        )

    def step_prompts(self, step: int) -> list[Prompt]:
        """Return the prompts of a measured step, from 0, where nothing is carried from step to step."""
        first = (WARM_UP + step) * self.setting.prompts
        return [Prompt(number) for number in range(first, first + self.setting.prompts)]

    def earlier(self, number: int) -> PromptStats | None:
        """Return what is known of a prompt, from an earlier group of it; ``None`` for a new one."""
        if not self.setting.knows_prompts:
            return None
        if number not in self._earlier:
            rng = np.random.default_rng([self.setting.seed, number, 1])
            lengths = self._workload.lengths(number, self.setting.size, rng, attempt=1).tolist()
            most = self._workload.max_tokens
            observed = [Observation(min(tokens, most), censored=tokens >= most) for tokens in lengths]
            self._earlier[number] = update_stats(None, observed, 0)
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
    setting, recent = candidates.setting, RecentCompletionLengths()
    if policy.start == 1:
        batches = [candidates.step_prompts(step) for step in range(setting.steps)]
        if policy.long_first:
            batches = [candidates.longest_first(batch) for batch in batches]
        return [run_step(policy, batch, None, candidates, recent) for batch in batches]
    count = policy.cycle * ceil(setting.steps / policy.cycle)
    warm_up = LEARNING if policy.most_stale is not None else policy.cycle * ceil(WARM_UP / policy.cycle)
    steps, waiting, fresh, ahead = [], list[Prompt](), 0, 1.0
    for number in range(warm_up + count):
        # Those that start again, those that go on waiting, and how many new ones start.
        again, waiting, more = waiting, [], round(policy.start * setting.prompts) - len(waiting)
        if policy.long_rounds and len(again) < setting.prompts:
            again, waiting, more = [], again, round(policy.start * setting.prompts)
        elif policy.long_rounds:
            again, waiting, more = again[: setting.prompts], again[setting.prompts :], 0
        batch = [*again, *(Prompt(new) for new in range(fresh, fresh + more))]
        fresh += more
        if policy.long_first:
            batch = candidates.longest_first(batch)
        if policy.most_stale is not None:
            begun = begin_with(setting.prompts, len(batch), ahead)
            batch, waiting = batch[:begun], [*batch[begun:], *waiting]
        enough = setting.prompts if len(batch) > setting.prompts else None
        step = run_step(policy, batch, enough, candidates, recent)
        steps.append(step)
        tokens = step.rollout.generated.astype(np.int64) + (0 if step.batch.done is None else step.batch.done)
        for row in np.flatnonzero(np.isinf(step.rollout.completed_at)).tolist():
            part = tokens[row, : step.plan.candidates[row]]
            waiting.append(batch[row].left_over(number, part, policy.resumes))
        if policy.most_stale is not None:
            stale = step.stale_tokens / max(1.0, float(step.rollout.returned.sum()))
            ahead = next_ahead(ahead, stale, policy.most_stale)
    return steps[warm_up:]


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
    machine, earlier = candidates.setting.machine, [candidates.earlier(prompt.number) for prompt in prompts]
    stds = [None if stats is None else stats.std_ema for stats in earlier]
    plan = BatchPlan.of(policy.shaping, candidates.setting.size, stds, enough=enough)
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
    run, steps = AutoRun(auto, candidates), candidates.setting.steps
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

    def run(
        self, prompts: Sequence[Prompt], *, num_groups: int | None = None, min_groups: int | None = None
    ) -> tuple[Choice, Step]:
        """Run one batch. ``num_groups``, ``min_groups``: groups with which it ends, or may end, as of a request."""
        size, machine = self.candidates.setting.size, self.candidates.setting.machine
        choice, enough = choose_by_size(self.auto, size, len(prompts)), num_groups or len(prompts)
        is_forecast = choice is None
        if choice is None:
            expectation, rng = self._expect(prompts, 3)
            choice = choose(self.auto, self.state, size, expectation, machine, enough, rng, min_groups=min_groups)
        self.state = begin(self.state, choice)
        policy = Policy(choice.option.name, choice.option.shaping)
        step = run_step(policy, prompts, choice.enough or num_groups, self.candidates)
        measured = self._measure(step, prompts)
        self.state = learn(self.state, choice, measured)
        if needs_hindsight(self.state, choice) and is_forecast:
            expectation, rng = self._expect(prompts, 4)
            late = hindsight(choice, size, expectation, machine, enough, rng)
            self.state = learn(self.state, late, replace(measured, means=()))
        self.state = learn_training(self.state, float(step.rollout.lengths.sum()), step.training_seconds)
        return choice, step

    def _expect(self, prompts: Sequence[Prompt], stream: int) -> tuple[Expectation | None, np.random.Generator]:
        """Return what is known of a batch now, and the random numbers to forecast it with."""
        rng = np.random.default_rng([self.candidates.setting.seed, self.state.batches, stream])
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

    def _measure(self, step: Step, prompts: Sequence[Prompt]) -> Measured:
        """Measure a batch as the server does, and learn the lengths of its groups."""
        rollout, batch, means = step.rollout, step.batch, list[float]()
        ended = batch.valid & (rollout.generated == batch.ends)
        for row, prompt in enumerate(prompts):
            earlier = self.candidates.earlier(prompt.number)
            if np.isinf(rollout.completed_at[row]):  # deferred: nothing is learned from it
                means += [] if earlier is None else [earlier.mean_ema]
                continue
            pairs = zip(rollout.generated[row], ended[row], strict=True)
            observed = [Observation(int(tokens), censored=not end) for tokens, end in pairs if tokens > 0]
            self.profile.observe(ratios_to_mean(observed, earlier))
            means.append(estimate_lengths(observed).mean)
        lengths = rollout.lengths
        return Measured(
            rollout.seconds,
            float(lengths.mean()),
            int((rollout.truncated & (rollout.returned < batch.ends)).sum()) / lengths.size,
            batch.max_tokens if (rollout.generated == batch.max_tokens).any() else None,
            int(rollout.generated.max()),
            means,
            float((lengths >= batch.max_tokens).mean()),
        )


# --- what the steps come to ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What a policy comes to, over all steps; shares are in [0, 1].

    ``step_speedup``, ``rollout_speedup``: seconds of ``off`` over those of the policy. ``tokens_*``: over those that
    ``off`` generates. ``idle_share``: of the places that an engine used at its peak. ``length_bias``: relative, of the
    mean length of what is returned against that of ``off``. ``effective_sample_size``: of the weights, (sum w)² / sum
    w², over the group size; ``None`` without weights. ``truncated_share``: of what is returned. ``stale_share``: of the
    returned tokens, those that older weights have generated.
    """

    policy: str
    rollout_seconds: float
    training_seconds: float
    step_seconds: float
    step_speedup: float = 1.0
    rollout_speedup: float = 1.0
    tokens_generated: float = 1.0
    tokens_returned: float = 1.0
    tokens_wasted: float = 0.0
    idle_share: float | None = None
    length_bias: float = 0.0
    effective_sample_size: float | None = None
    truncated_share: float | None = None
    stale_share: float = 0.0
    notes: str = ""


def summarise(name: str, steps: Sequence[Step], size: int, notes: str = "") -> Summary:
    """Sum up steps. Seconds and token counts are means over steps, until `relative_to` divides them."""
    lengths = np.concatenate([step.rollout.lengths for step in steps])
    tokens = float(lengths.sum()) / len(steps)
    generated = float(np.mean([step.rollout.generated.sum() for step in steps]))
    stale = sum(step.stale_tokens for step in steps) / len(steps)
    return Summary(
        policy=name,
        rollout_seconds=float(np.mean([step.rollout.seconds for step in steps])),
        training_seconds=float(np.mean([step.training_seconds for step in steps])),
        step_seconds=float(np.mean([step.seconds for step in steps])),
        tokens_generated=generated,
        tokens_returned=tokens,
        tokens_wasted=max(0.0, generated - tokens),
        idle_share=1 - float(np.mean([step.rollout.busy for step in steps])),
        length_bias=float(lengths.mean()),
        effective_sample_size=_effective_sample_size(steps, size),
        truncated_share=sum(int(step.rollout.truncated.sum()) for step in steps) / lengths.size,
        stale_share=stale / tokens,
        notes=notes,
    )


def relative_to(off: Summary, summary: Summary) -> Summary:
    """Relate a summary of `summarise` to that of ``off``."""
    return replace(
        summary,
        step_speedup=off.step_seconds / summary.step_seconds,
        rollout_speedup=off.rollout_seconds / summary.rollout_seconds,
        tokens_generated=summary.tokens_generated / off.tokens_generated,
        tokens_returned=summary.tokens_returned / off.tokens_generated,
        tokens_wasted=summary.tokens_wasted / off.tokens_generated,
        length_bias=summary.length_bias / off.length_bias - 1,
    )


def _effective_sample_size(steps: Sequence[Step], size: int) -> float | None:
    """Return the mean over groups; ``None`` if one has no weights, see `SelectionRule.weights`."""
    sizes = []
    for step in steps:
        batch, rollout = step.batch, step.rollout
        ends = batch.ends if batch.done is None else batch.ends - batch.done
        for group in np.flatnonzero(np.isfinite(rollout.completed_at)).tolist():
            rule, count = step.plan.rule(group), step.plan.candidates[group]
            whole = np.flatnonzero((batch.valid[group] & (rollout.generated[group] == ends[group]))[:count])
            short = set(whole[np.argsort(batch.lengths[group][whole], kind="stable")][: rule.num_shortest].tolist())
            returned = np.flatnonzero(rollout.returned[group]).tolist()
            places = {i: SelectedAs.SHORT if i in short else SelectedAs.LONG for i in returned}
            found = rule.weights([Candidate(i, 0.0, selected_as=places.get(i)) for i in range(count)])
            if not found:
                return None
            weights = list(found.values())
            sizes.append(sum(weights) ** 2 / sum(weight * weight for weight in weights) / size)
    return float(np.mean(sizes))
