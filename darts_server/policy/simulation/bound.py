"""A lower bound on the time of a rollout that returns M whole trajectories of each prompt.

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

import numpy as np

from darts_server.policy.simulation.batch import Batch, Ints
from darts_server.policy.simulation.machine import Machine


def rollout_bound(batch: Batch, size: int, machine: Machine) -> float:
    """Return the seconds that a rollout takes at least if it returns ``size`` whole trajectories of each prompt.

    All candidates of the batch may be started.
    """
    lengths = shortest_lengths(batch, size).astype(np.float64)
    prompts = batch.prompt_tokens.astype(np.float64)
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
    """Return lines alpha + beta b, both at least 0, that are nowhere above the time of a decode step."""
    curve, most = machine.step_time.decode, float(machine.max_num_seqs)
    batches = np.asarray(sorted({1.0, most, *(b for b in curve.batches if 1 < b < most)}))
    seconds = curve.step_seconds_array(batches)
    lines = [(float(seconds[0]), 0.0), (0.0, float((seconds / batches).min()))]
    for i in range(len(batches)):
        for j in range(i + 1, len(batches)):
            beta = float((seconds[j] - seconds[i]) / (batches[j] - batches[i]))
            # The highest line of this slope: between two points the curve is straight, so the points decide.
            alpha = float((seconds - beta * batches).min())
            if alpha >= 0:
                lines.append((alpha, beta))
    return lines
