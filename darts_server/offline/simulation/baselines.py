"""Baselines that are no policies, because they need to know the lengths."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from darts_server.offline.simulation.model.batch import BatchPlan
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.model.rollout import simulate
from darts_server.offline.simulation.summary import Summary, summarise
from darts_server.offline.simulation.training import Candidates, Step

LOST_SHARES = (0.02, 0.1)
"""Shares of trajectories that a fixed limit additionally truncates."""


def simulate_baselines(off: Sequence[Step], candidates: Candidates) -> list[Summary]:
    machine = candidates.machine
    plan = BatchPlan(candidates.size, [candidates.size] * candidates.prompts)
    summaries = [_simulate_fixed_limit(off, plan, machine, share) for share in LOST_SHARES]
    if machine.replicas > 1:
        summaries.append(_simulate_one_step_off(off, plan, machine))
    return summaries


def _simulate_fixed_limit(
    off: Sequence[Step],
    plan: BatchPlan,
    machine: Machine,
    share: float,
) -> Summary:
    """Roll out with the smallest limit that truncates at most ``share`` more of the trajectories."""
    lengths = np.concatenate([step.batch.capped_lengths.ravel() for step in off])
    limit = off[0].batch.max_tokens
    # Answers at the present limit are truncated anyway, so the share is cut in addition.
    longest_first = np.sort(lengths[lengths < limit])[::-1]
    if longest_first.size:
        first_kept = min(int(share * lengths.size), longest_first.size - 1)
        limit = int(longest_first[first_kept]) + 1
    steps = []
    for step in off:
        batch = replace(step.batch, max_tokens=limit)
        rollout = simulate(batch, plan, machine)
        steps.append(Step.after(rollout, batch, plan, machine))
    return summarise(f"hindsight max_tokens {limit}", steps, plan.size, f"cuts {share:.0%}")


def _simulate_one_step_off(off: Sequence[Step], plan: BatchPlan, machine: Machine) -> Summary:
    """Roll out one step ahead of training, with the best division of the GPUs in hindsight."""
    between = machine.between_rollouts
    mean_training = float(np.mean([step.training_seconds for step in off])) - between

    def step_seconds(rollout_engines: int, rollout: float, training: float) -> float:
        # Only the other engines train. Rollout and training overlap, and then the weights are synchronised.
        return max(rollout, training * machine.replicas / (machine.replicas - rollout_engines)) + between

    def first_step_seconds(rollout_engines: int) -> float:
        rollout = simulate(off[0].batch, plan, replace(machine, replicas=rollout_engines))
        return step_seconds(rollout_engines, rollout.seconds, mean_training)

    best = min(range(1, machine.replicas), key=first_step_seconds)
    steps = []
    for step in off:
        rollout = simulate(step.batch, plan, replace(machine, replicas=best))
        seconds = step_seconds(best, rollout.seconds, step.training_seconds - between)
        # Training overlaps with the rollout. The summary gets the mean of its seconds below.
        steps.append(
            Step(
                step.batch,
                plan,
                rollout,
                training_seconds=seconds - between,
                seconds=seconds,
            )
        )
    summary = summarise("async one-step-off", steps, plan.size, f"{best} of {machine.replicas} engines roll out")
    slowdown = machine.replicas / (machine.replicas - best)
    return summary | {"training_seconds": mean_training * slowdown + between, "stale_share": 1.0}
