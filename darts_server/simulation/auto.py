"""`auto` in a simulated training run, which learns from batch to batch as the server does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from darts_server.policy.auto.chooser import (
    Choice,
    Measured,
    begin,
    choose,
    choose_by_size,
    hindsight,
    learn,
    learn_training,
    needs_hindsight,
)
from darts_server.policy.auto.options import Auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.length_profile import LengthProfile, ratios_to_mean
from darts_server.policy.lengths import Observation, estimate_lengths
from darts_server.policy.simulation.forecast import RATIOS, Expectation
from darts_server.simulation.policies import Policy
from darts_server.simulation.training import LEARNING, Candidates, Prompt, Setting, Step, run_step


def run_auto(auto: Auto, candidates: Candidates, setting: Setting) -> tuple[list[Step], str]:
    """Simulate the measured steps after `LEARNING` others, from which it learns. Returns what it did, too."""
    run = AutoRun(auto, candidates, setting)
    for step in range(LEARNING):
        run.run(candidates.step_prompts(setting.steps + step))
    measured = [run.run(candidates.step_prompts(step)) for step in range(setting.steps)]
    names = dict.fromkeys(choice.option.name for choice, _ in measured)
    return [step for _, step in measured], ", ".join(names)


@dataclass(slots=True)
class AutoRun:
    """What `auto` has learned so far. The machine is known to it, except for the training."""

    auto: Auto
    candidates: Candidates
    setting: Setting
    state: AutoState = field(default_factory=AutoState)
    profile: LengthProfile = field(default_factory=LengthProfile)

    def run(
        self, prompts: Sequence[Prompt], *, num_groups: int | None = None, min_groups: int | None = None
    ) -> tuple[Choice, Step]:
        """Run one batch. ``num_groups``, ``min_groups``: groups with which it ends, or may end, as of a request."""
        size, machine, enough = self.setting.size, self.setting.machine, num_groups or len(prompts)
        choice = by_size = choose_by_size(self.auto, size, len(prompts))
        if choice is None:
            expectation, rng = self._expect(prompts, 3)
            choice = choose(self.auto, self.state, size, expectation, machine, enough, rng, min_groups=min_groups)
        self.state = begin(self.state, choice)
        policy = Policy(choice.option.name, choice.option.shaping)
        step = run_step(policy, prompts, choice.enough or num_groups, self.candidates, self.setting)
        measured = self._measure(step, prompts)
        self.state = learn(self.state, choice, measured)
        if needs_hindsight(self.state, choice) and by_size is None:
            expectation, rng = self._expect(prompts, 4)
            late = hindsight(choice, size, expectation, machine, enough, rng)
            self.state = learn(self.state, late, replace(measured, means=()))
        self.state = learn_training(self.state, measured.returned, step.training_seconds)
        return choice, step

    def _expect(self, prompts: Sequence[Prompt], stream: int) -> tuple[Expectation | None, np.random.Generator]:
        """Return what is known of a batch now, and the random numbers to forecast it with."""
        rng = np.random.default_rng([self.setting.seed, self.state.batches, stream])
        earlier, batch = (
            [self.candidates.earlier(prompt.number) for prompt in prompts],
            self.candidates.batch(prompts, 1),
        )
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
        rollout, batch = step.rollout, step.batch
        ended = batch.valid & (rollout.generated == batch.ends)
        means = []
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
            float(lengths.sum()),
            float(lengths.mean()),
            int((rollout.truncated & (rollout.returned < batch.ends)).sum()) / lengths.size,
            batch.max_tokens if (rollout.generated == batch.max_tokens).any() else None,
            int(rollout.generated.max()),
            means,
            float((lengths >= batch.max_tokens).mean()),
        )
