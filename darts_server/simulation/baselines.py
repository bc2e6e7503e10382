"""Baselines that are no policies: they need to know the lengths, mix weight versions, or cannot be reached."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from darts_server.policy.simulation.batch import Batch, Plan
from darts_server.policy.simulation.bound import rollout_bound, shortest_lengths
from darts_server.policy.simulation.prediction import predict
from darts_server.policy.simulation.rollout import simulate
from darts_server.simulation.training import Candidates, Setting, Step, Summary, run_partial, summarise, trained_tokens

LOST_SHARES = (0.02, 0.1)
PARTIAL_START = 1.25
"""Prompts that partial rollouts start, over those that they return."""


def baselines(off: Sequence[Step], candidates: Candidates, setting: Setting) -> list[Summary]:
    """Compute all baselines for the batches of ``off``."""
    found = [_fixed_limit(off, share, setting) for share in LOST_SHARES]
    partial = run_partial(PARTIAL_START, candidates, setting)
    found.append(summarise(f"partial rollout, {PARTIAL_START:g} N", partial, setting.size))
    if setting.machine.replicas > 1:
        found.append(_one_step_off(off, setting))
    found.append(_bound(off, candidates, setting))
    return found


def _fixed_limit(off: Sequence[Step], share: float, setting: Setting) -> Summary:
    """Set the smallest ``max_tokens`` that truncates at most this share besides those that are truncated anyway."""
    lengths = np.concatenate([step.batch.ends.ravel() for step in off])
    whole = np.sort(lengths[lengths < off[0].batch.max_tokens])[::-1]
    limit = int(whole[min(int(share * lengths.size), whole.size - 1)]) + 1 if whole.size else off[0].batch.max_tokens
    steps = [_run_off(replace(step.batch, max_tokens=limit), setting) for step in off]
    return summarise(f"hindsight max_tokens {limit}", steps, setting.size, f"cuts {share:.0%}")


def _run_off(batch: Batch, setting: Setting) -> Step:
    rollout = simulate(batch, Plan(setting.size, [setting.size] * batch.groups), setting.machine)
    training = setting.machine.training_seconds(trained_tokens(batch, rollout.returned))
    return Step(batch, rollout, training, rollout.seconds + training)


def _one_step_off(off: Sequence[Step], setting: Setting) -> Summary:
    """Roll out one step ahead of training, on GPUs of their own: the best division in hindsight.

    With r of the R engines' GPUs for rollouts, training takes R / (R - r) times as long; a step takes the longer of the
    two, and the synchronisation of weights.
    """
    machine = setting.machine
    plan = Plan(setting.size, [setting.size] * off[0].batch.groups)
    training = float(np.mean([step.training_seconds for step in off])) - machine.between_rollouts

    def seconds(replicas: int, rollout: float, trained: float) -> float:
        return max(rollout, trained * machine.replicas / (machine.replicas - replicas)) + machine.between_rollouts

    best = min(
        range(1, machine.replicas),
        key=lambda r: seconds(r, predict(off[0].batch, plan, replace(machine, replicas=r)).seconds, training),
    )
    steps = []
    for step in off:
        rollout = simulate(step.batch, plan, replace(machine, replicas=best))
        trained = step.training_seconds - machine.between_rollouts
        total = seconds(best, rollout.seconds, trained)
        steps.append(Step(step.batch, rollout, total - machine.between_rollouts, total))
    found = summarise("async one-step-off", steps, setting.size, f"{best} of {machine.replicas} engines roll out")
    trains = float(np.mean([s.training_seconds for s in off])) - machine.between_rollouts
    share = machine.replicas / (machine.replicas - best)
    return replace(found, training_seconds=trains * share + machine.between_rollouts, stale_share=1.0)


def _bound(off: Sequence[Step], candidates: Candidates, setting: Setting) -> Summary:
    """Compute the lower bound for whole trajectories of each prompt, see ``policy/simulation/bound.py``."""
    rollouts, trainings, generated = [], [], 0
    for number in range(len(off)):
        batch = candidates.batch(candidates.step_prompts(number), candidates.most)
        rollouts.append(rollout_bound(batch, setting.size, setting.machine))
        shortest = shortest_lengths(batch, setting.size)
        generated += int(shortest.sum())
        tokens = int(shortest.sum() + setting.size * batch.prompt_tokens.sum())
        trainings.append(setting.machine.training_seconds(tokens))
    rollout, training = float(np.mean(rollouts)), float(np.mean(trainings))
    return Summary(
        f"bound, best {setting.size} of {candidates.most}",
        rollout,
        training,
        rollout + training,
        tokens_generated=generated / len(off),
        tokens_returned=generated / len(off),
        length_bias=generated / (setting.size * setting.prompts * len(off)),
        notes="whole trajectories of every prompt",
    )
