"""Baselines that are no policies: they need to know the lengths."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from darts_server.offline.simulation.model.batch import BatchPlan
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.model.rollout import simulate
from darts_server.offline.simulation.summary import Summary, summarise
from darts_server.offline.simulation.training import Candidates, Step, trained_tokens

LOST_SHARES = (0.02, 0.1)


def baselines(off: Sequence[Step], candidates: Candidates) -> list[Summary]:
    """Compute all baselines for the batches of ``off``."""
    size, found, lengths = candidates.size, [], np.concatenate([step.batch.ends.ravel() for step in off])
    machine, plan = candidates.machine, BatchPlan(size, [size] * candidates.prompts)
    most = off[0].batch.max_tokens
    whole = np.sort(lengths[lengths < most])[::-1]
    for share in LOST_SHARES:
        # The smallest limit that truncates at most this share besides those that are truncated anyway.
        limit = int(whole[min(int(share * lengths.size), whole.size - 1)]) + 1 if whole.size else most
        steps = []
        for step in off:
            batch = replace(step.batch, max_tokens=limit)
            rollout = simulate(batch, plan, machine)
            training = machine.training_seconds(trained_tokens(batch, rollout))
            steps.append(Step(batch, plan, rollout, training, rollout.seconds + training))
        found.append(summarise(f"hindsight max_tokens {limit}", steps, size, f"cuts {share:.0%}"))
    if machine.replicas > 1:
        found.append(_one_step_off(off, plan, machine))
    return found


def _one_step_off(off: Sequence[Step], plan: BatchPlan, machine: Machine) -> Summary:
    """Roll out one step ahead of training, on GPUs of their own: the best division in hindsight.

    With r of the R engines' GPUs for rollouts, training takes R / (R - r) times as long; a step takes the longer of the
    two, and the synchronisation of weights.
    """
    between = machine.between_rollouts
    training = float(np.mean([step.training_seconds for step in off])) - between

    def seconds(replicas: int, rollout: float, trained: float) -> float:
        return max(rollout, trained * machine.replicas / (machine.replicas - replicas)) + between

    best = min(
        range(1, machine.replicas),
        key=lambda r: seconds(r, simulate(off[0].batch, plan, replace(machine, replicas=r)).seconds, training),
    )
    steps = []
    for step in off:
        rollout = simulate(step.batch, plan, replace(machine, replicas=best))
        total = seconds(best, rollout.seconds, step.training_seconds - between)
        steps.append(Step(step.batch, plan, rollout, total - between, total))
    share = machine.replicas / (machine.replicas - best)
    found = summarise("async one-step-off", steps, plan.size, f"{best} of {machine.replicas} engines roll out")
    return found | {"training_seconds": training * share + between, "stale_share": 1.0}
