"""Baselines that are no policies: they need to know the lengths, or cannot be reached.

The last of them is a lower bound on the time of a rollout that returns M whole trajectories of each prompt.

**Claim.** Let every prompt have C candidates, and let a schedule return at least M of them for each prompt, each
generated to its own end. It may know all lengths beforehand, start and stop what it likes, move sequences between
engines and delay them. Then its rollout takes at least `rollout_bound` seconds.

**Proof.** Let S be the M shortest candidates of each prompt, with l tokens after a prompt of p tokens. Engine r takes
n_r steps; a step in which b sequences run takes decode(b) + kappa * (tokens in their KV caches) + pi * (prefilled
tokens) + sigma * (admitted sequences). Take any alpha, beta >= 0 with alpha + beta b <= decode(b) for all b from 1 to
B = ``max_num_seqs``.

1. Each token is generated in some step of some engine, while its sequence has at least p + (tokens before it) in the
   cache, and one sequence gets at most one token a step. So the whole schedule takes, summed over engines,

       sum_r T_r >= alpha sum_r n_r + sum over generated trajectories of v + pi * (prompts, once each),
       v = sigma + beta l + kappa (p l + l (l - 1) / 2).

   since each is admitted at least once. v grows with l, so the sum over what is generated is at least the sum over S.
   At most B sequences get a token in a step, so sum_r n_r >= (sum of l over S) / B; and the trajectory with the most
   tokens in S, or one at least as long, takes a step for each, so sum_r n_r >= max l. All engines have ended when the
   rollout has, so R T >= sum_r T_r.
2. Each trajectory of S, or one of its prompt at least as long, is generated alone or among others. Its l steps are one
   after the other, on whatever engines: T >= alpha l + v + pi p for it.

The bound is the largest of these over several alpha, beta. What is truncated at ``max_tokens`` is whole, as it is under
plain sampling; what is cut earlier is not, and may beat the bound. QED
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from darts_server.policy.simulation.batch import Batch, BatchPlan, Ints
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.rollout import simulate
from darts_server.simulation.summary import COLUMNS, Summary, summarise
from darts_server.simulation.training import Candidates, Step, trained_tokens

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

    # The lower bound.
    rollouts, trainings, generated = [], [], 0
    for number in range(len(off)):
        batch = candidates.batch(candidates.step_prompts(number), candidates.most)
        rollouts.append(rollout_bound(batch, size, machine))
        shortest = int(shortest_lengths(batch, size).sum())
        generated += shortest
        trainings.append(machine.training_seconds(shortest + size * int(batch.prompt_tokens.sum())))
    rollout_seconds, training_seconds = float(np.mean(rollouts)), float(np.mean(trainings))
    bound = dict.fromkeys(COLUMNS) | {
        "policy": f"bound, best {size} of {candidates.most}",
        "rollout_seconds": rollout_seconds,
        "training_seconds": training_seconds,
        "step_seconds": rollout_seconds + training_seconds,
        "tokens_generated": generated / len(off),
        "tokens_returned": generated / len(off),
        "tokens_wasted": 0.0,
        "length_bias": generated / (size * candidates.prompts * len(off)),
        "stale_share": 0.0,
        "notes": "whole trajectories of every prompt",
    }
    return [*found, bound]


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


def rollout_bound(batch: Batch, size: int, machine: Machine) -> float:
    """Return the seconds that a rollout takes at least if it returns ``size`` whole trajectories of each prompt.

    All candidates of the batch may be started.
    """
    lengths, prompts = shortest_lengths(batch, size).astype(np.float64), batch.prompt_tokens.astype(np.float64)
    times = machine.step_time
    context = times.per_context_token * (prompts[:, None] * lengths + lengths * (lengths - 1) / 2)
    prefill = times.per_prefill_token * prompts
    bounds = []
    for alpha, beta in _lines_below(machine):
        alone = times.per_start + beta * lengths + context
        steps = max(lengths.sum() / machine.max_num_seqs, lengths.max())
        bounds.append((alpha * steps + alone.sum() + prefill.sum()) / machine.replicas)
        bounds.append((alpha * lengths + alone + prefill[:, None]).max())
    return float(max(bounds))


def shortest_lengths(batch: Batch, size: int) -> Ints:
    """Return the lengths of the ``size`` shortest candidates of each prompt, in tokens, shape (G, size)."""
    return np.sort(batch.ends, axis=1)[:, :size]


def _lines_below(machine: Machine) -> list[tuple[float, float]]:
    """Return alpha and beta, at least 0, of lines alpha + beta b that are nowhere above the time of a decode step."""
    curve, most = machine.step_time.decode, float(machine.max_num_seqs)
    batches = np.asarray(sorted({1.0, most, *(b for b in curve.batches if 1 < b < most)}))
    seconds = curve.step_seconds_array(batches)
    lines = [(float(seconds[0]), 0.0), (0.0, float((seconds / batches).min()))]
    for i, j in combinations(range(len(batches)), 2):
        beta = float((seconds[j] - seconds[i]) / (batches[j] - batches[i]))
        # The highest line of this slope: between two points the curve is straight, so the points decide.
        alpha = float((seconds - beta * batches).min())
        if alpha >= 0:
            lines.append((alpha, beta))
    return lines
