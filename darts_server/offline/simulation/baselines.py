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
    found = [_fixed_limit(off, plan, machine, share) for share in LOST_SHARES]
    if machine.replicas > 1:
        found.append(_one_step_off(off, plan, machine))
    return found


def _fixed_limit(off: Sequence[Step], plan: BatchPlan, machine: Machine, share: float) -> Summary:
    """Roll out with the smallest limit that truncates at most ``share`` more of the trajectories."""
    lengths = np.concatenate([step.batch.capped_lengths.ravel() for step in off])
    limit = off[0].batch.max_tokens
    longest_first = np.sort(lengths[lengths < limit])[::-1]
    if longest_first.size:
        limit = int(longest_first[min(int(share * lengths.size), longest_first.size - 1)]) + 1
    steps = []
    for step in off:
        batch = replace(step.batch, max_tokens=limit)
        rollout = simulate(batch, plan, machine)
        steps.append(Step.after(rollout, batch, plan, machine))
    return summarise(f"hindsight max_tokens {limit}", steps, plan.size, f"cuts {share:.0%}")


def _one_step_off(off: Sequence[Step], plan: BatchPlan, machine: Machine) -> Summary:
    """Roll out one step ahead of training, with the best division of the GPUs in hindsight.

    If r of R engines roll out, training takes R / (R - r) times as long. A step takes the longer of rollout and
    training, and then the synchronisation of weights.
    """
    between = machine.between_rollouts
    training = float(np.mean([step.training_seconds for step in off])) - between

    def seconds(replicas: int, rollout: float, trained: float) -> float:
        return max(rollout, trained * machine.replicas / (machine.replicas - replicas)) + between

    def first_step(replicas: int) -> float:
        rollout = simulate(off[0].batch, plan, replace(machine, replicas=replicas))
        return seconds(replicas, rollout.seconds, training)

    best = min(range(1, machine.replicas), key=first_step)
    steps = []
    for step in off:
        rollout = simulate(step.batch, plan, replace(machine, replicas=best))
        total = seconds(best, rollout.seconds, step.training_seconds - between)
        steps.append(Step(step.batch, plan, rollout, total - between, total))
    share = machine.replicas / (machine.replicas - best)
    found = summarise("async one-step-off", steps, plan.size, f"{best} of {machine.replicas} engines roll out")
    return found | {"training_seconds": training * share + between, "stale_share": 1.0}
