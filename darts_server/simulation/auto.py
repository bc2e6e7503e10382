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
from darts_server.policy.simulation.forecast import Expectation
from darts_server.simulation.policies import Policy
from darts_server.simulation.training import LEARNING, Candidates, Prompt, Setting, Step, run_step

RATIOS = 4096
"""Quantiles of the ratios of lengths to their prompt's mean: the longest of a batch is one in thousands."""


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
        by_size = choose_by_size(self.auto, self.setting.size, len(prompts))
        choice = by_size or self._choose(prompts, num_groups or len(prompts), min_groups)
        self.state = begin(self.state, choice)
        policy = Policy(choice.option.name, choice.option.shaping)
        step = run_step(policy, prompts, choice.enough or num_groups, self.candidates, self.setting)
        self._learn(choice, step, prompts, num_groups or len(prompts))
        return choice, step

    def _choose(self, prompts: Sequence[Prompt], enough: int, min_groups: int | None) -> Choice:
        rng = np.random.default_rng([self.setting.seed, self.state.batches, 3])
        expectation, size, machine = self._expect(prompts, rng), self.setting.size, self.setting.machine
        return choose(self.auto, self.state, size, expectation, machine, enough, rng, min_groups=min_groups)

    def _expect(self, prompts: Sequence[Prompt], rng: np.random.Generator) -> Expectation | None:
        earlier = [self.candidates.earlier(prompt.number) for prompt in prompts]
        batch = self.candidates.batch(prompts, 1)
        return Expectation.of(
            [None if stats is None else stats.mean_ema for stats in earlier],
            [None if stats is None else stats.std_ema for stats in earlier],
            self.profile.quantiles(RATIOS),
            self.state.means,
            rng,
            round(float(batch.prompt_tokens.mean())),
            batch.max_tokens,
        )

    def _learn(self, choice: Choice, step: Step, prompts: Sequence[Prompt], enough: int) -> None:
        rollout, batch = step.rollout, step.batch
        ended = batch.valid & (rollout.generated == batch.ends)
        means = []
        for row, prompt in enumerate(prompts):
            earlier = self.candidates.earlier(prompt.number)
            if np.isinf(rollout.completed_at[row]):  # deferred: nothing is learned from it
                means += [] if earlier is None else [earlier.mean_ema]
                continue
            observed = [
                Observation(int(tokens), censored=not end)
                for tokens, end in zip(rollout.generated[row], ended[row], strict=True)
                if tokens > 0
            ]
            self.profile.observe(ratios_to_mean(observed, earlier))
            means.append(estimate_lengths(observed).mean)
        lengths = rollout.lengths
        cut = int((rollout.truncated & (rollout.returned < batch.ends)).sum())
        returned = float(lengths.sum())
        measured = Measured(
            rollout.seconds,
            returned,
            float(lengths.mean()),
            cut / lengths.size,
            batch.max_tokens if (rollout.generated == batch.max_tokens).any() else None,
            int(rollout.generated.max()),
            means,
            float((lengths >= batch.max_tokens).mean()),
        )
        state, size = learn(self.state, choice, measured), self.setting.size
        if needs_hindsight(state, choice) and choose_by_size(self.auto, size, len(prompts)) is None:
            self.state = state
            rng = np.random.default_rng([self.setting.seed, state.batches, 4])
            choice = hindsight(choice, size, self._expect(prompts, rng), self.setting.machine, enough, rng)
            state = learn(state, choice, replace(measured, means=()))
        self.state = learn_training(state, returned, step.training_seconds)
