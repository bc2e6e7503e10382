"""Policies on the sessions of a trace: what they save, and which sessions they prefer."""

from collections.abc import Sequence

import numpy as np

from darts_server.exceptions import InvalidSetting
from darts_server.group.group import selection_weights
from darts_server.offline.simulation.model.batch import BatchPlan
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.model.sessions import Session, SessionRollout
from darts_server.offline.simulation.policies import Policy, parse_policy
from darts_server.offline.simulation.summary import Summary
from darts_server.policy.deadline import RecentCompletionLengths

FIRST = "first"
"""Returns the first sessions that finish, as Polar does. It has the redundancy of `uniform`."""
SESSION_POLICIES = (FIRST, "uniform", "cap")
"""Policies that are compared with `off` by default."""
COUNTS = (
    "tokens_generated",
    "tokens_recomputed",
    "turns",
    "turns_saved",
    "tool_seconds",
    "tool_seconds_saved",
)
SESSION_COLUMNS = {
    "policy": ("policy", ""),
    "rollout_seconds": ("rollout s", ".1f"),
    "rollout_speedup": ("rollout x", ".2f"),
    "step_speedup": ("step x", ".2f"),
    "tokens_generated": ("generated", ".2f"),
    "tokens_recomputed": ("recomputed", ".2f"),
    "turns": ("turns", ".0f"),
    "turns_saved": ("saved", ".0f"),
    "tool_seconds": ("tools s", ".0f"),
    "tool_seconds_saved": ("saved s", ".1f"),
    "length": ("length", "+.1%"),
    "length_z": ("z", ".1f"),
    "turns_bias": ("turns", "+.1%"),
    "turns_z": ("z", ".1f"),
    "cut_share": ("cut", ".0%"),
}
SESSION_LEGEND = """\
rollout x, step x  times as fast as off; a step is a rollout and its training
generated          tokens, divided by the tokens that off generates
recomputed         tokens that were computed again after an eviction or preemption, divided by the same
turns, tools s     turns that have begun, and seconds in tools, in a step
saved              turns, and seconds in tools, that stopped sessions would have taken
length, turns      weighted mean of the returned sessions, compared with the mean of all sessions of their groups, both
                   as they would be if nothing stopped or cut them; z is the difference over its standard error
cut                share of the returned sessions that are cut at the deadline
first              for comparison: the first sessions that finish, all with weight 1
Prompts are in the order of the trace, and are repeated if it has too few. Sessions beyond a prompt's samples in the
trace are drawn from these samples with replacement."""


def run_sessions(
    text: str,
    workload: Sequence[Sequence[Session]],
    machine: Machine,
    *,
    size: int,
    prompts: int,
    steps: int,
    by_seconds: bool = False,
    seed: int = 0,
) -> Summary:
    """Simulate steps of a training run under a policy, and return its figures.

    Args:
        text: the policy with its options.
        workload: samples of each prompt of a trace. Prompts come in this order, and are repeated as often as needed.
        by_seconds: see `SessionRollout`.

    Raises:
        InvalidSetting: the name or an option is unknown or not for sessions, or a value is invalid.
    """
    is_first = text.partition(",")[0] == FIRST
    # The shortest sessions by the clock are the first that finish.
    policy = parse_policy(text.replace(FIRST, "uniform,longest=0", 1) if is_first else text, size)
    if policy != Policy(policy.name, policy.shaping):
        raise InvalidSetting(f"--policies: {text} is not for sessions; --join-turns simulates a sample as one answer")
    # The lengths of a prompt's earlier groups are not known.
    plan = BatchPlan.of(policy.shaping, size, [None] * prompts)
    recent = RecentCompletionLengths()
    seconds = []
    trained = 0
    # A row for each session, and for each returned session whether it was cut.
    counts = []
    cuts = []
    # Tokens and turns of sessions: means of each group, and weighted means of its returned sessions.
    means = []
    weighted = []
    for step in range(steps):
        rngs = [np.random.default_rng([seed, step, row]) for row in range(prompts)]
        sessions: list[list[Session]] = []
        for number, rng in enumerate(rngs, start=step * prompts):
            samples = workload[number % len(workload)]
            draws = rng.integers(len(samples), size=plan.candidates[len(sessions)])
            sessions.append([*samples, *(samples[index] for index in draws.tolist())][: plan.candidates[len(sessions)]])
        if is_first:
            # Sessions that end at a limit have finished, too.
            sessions = [[session._replace(valid=True) for session in group] for group in sessions]
        rollout = SessionRollout(sessions, rngs, plan.with_recent(recent), machine, by_seconds or is_first)
        rollout.run()
        seconds.append(rollout.seconds)
        for length in rollout.completion_lengths:
            recent.add(length)

        for member in rollout.groups:
            for run in member.runs:
                turns = run.session.turns
                saved = sum(turn.tool_seconds for turn in turns) - run.tool_seconds
                row = (run.tokens, run.recomputed, run.turns, len(turns) - run.turns, run.tool_seconds, saved)
                counts.append(row)
            selected = [candidate for candidate in member.group.candidates if candidate.selected_as is not None]
            for candidate in selected:
                cuts.append(candidate.cut)
                # Training reads the tokens of returned sessions, with prompts and what tools have added.
                run = member.runs[candidate.index]
                trained += run.context + min(0, candidate.tokens - run.tokens)
            by_index = selection_weights(member.group)
            weights = [by_index.get(candidate.index, 1.0) for candidate in selected]
            lengths = np.asarray([[run.session.tokens, len(run.session.turns)] for run in member.runs])
            means.append(lengths.mean(axis=0))
            weighted.append(np.average(lengths[[candidate.index for candidate in selected]], axis=0, weights=weights))

    differences = np.asarray(weighted) - means
    bias = differences.mean(axis=0)
    errors = differences.std(axis=0) / np.sqrt(max(len(differences) - 1, 1))
    z = np.divide(bias, errors, out=np.zeros(2), where=errors > 0)
    bias /= np.mean(means, axis=0)
    found: Summary = dict(zip(COUNTS, (np.sum(counts, axis=0) / steps).tolist(), strict=True))
    return found | {
        "policy": text,
        "rollout_seconds": float(np.mean(seconds)),
        "step_seconds": float(np.mean(seconds)) + machine.training_seconds(trained / steps),
        "length": float(bias[0]),
        "length_z": float(z[0]),
        "turns_bias": float(bias[1]),
        "turns_z": float(z[1]),
        "cut_share": float(np.mean(cuts)),
    }
