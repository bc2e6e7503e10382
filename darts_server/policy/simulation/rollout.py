"""Simulate a rollout: what becomes of the groups of a batch, and when.

Usage::

    rollout = simulate(batch, BatchPlan(8, [12] * batch.groups, shaping), machine)
    rollout.seconds, rollout.generated.sum()

No group is driven event by event: the candidates of a group are taken for side by side, as if they started together and
each got a token in every step. Then which ones are stopped, and after how many tokens, follows from the order of their
lengths, for all groups at once (`groups`); and from the tokens, when each engine does what (`engines`). Where an engine
runs all sequences at once that is exact. Where they queue or are preempted, candidates of one group are not side by
side: those that are ahead of others are stopped a little later than here.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.deadline import CohortDeadline, Deadline
from darts_server.policy.simulation.batch import Batch, BatchPlan
from darts_server.policy.simulation.engines import TOLERANCE, Clocks
from darts_server.policy.simulation.groups import Ends, Groups, Known
from darts_server.policy.simulation.machine import Machine

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Outcome of a rollout of G prompts with C candidates each.

    ``seconds``: until all groups are complete, or enough of them. ``generated``: tokens of each candidate, shape
    (G, C), without those of earlier rollouts. ``returned``: tokens of each returned trajectory, 0 for the others, shape
    (G, C). ``truncated``: whether it is returned truncated, shape (G, C). ``completed_at``: seconds at which each group
    is complete; infinite if it is not. ``deadline``: the cohort's, in tokens. ``completion_lengths``: of complete
    groups, in the order of their ends, for `RecentCompletionLengths`. ``clocks``: of the engines.
    """

    seconds: float
    generated: Floats
    returned: Floats
    truncated: Bools
    completed_at: Floats
    deadline: int | None
    completion_lengths: tuple[int, ...]
    clocks: Clocks

    @property
    def lengths(self) -> Floats:
        """Tokens of all returned trajectories."""
        return self.returned[self.returned > 0]

    @property
    def busy(self) -> float:
        """Share of places that were taken, of the most that each engine ever ran, over the whole rollout."""
        peak = sum(float(clock.count.max()) for _, clock in self.clocks.clocks)
        busy = sum(clock.busy_until(self.seconds) for _, clock in self.clocks.clocks)
        return min(1.0, busy / (peak * self.seconds))

    def times(self) -> tuple[Floats, Floats]:
        """Return the seconds at which each candidate ran first, and at which it ended or was stopped, shape (G, C).

        Infinite if it did not run.
        """
        started, ended = np.full(self.generated.shape, inf), np.full(self.generated.shape, inf)
        for rows, clock in self.clocks.clocks:
            runs = self.generated[rows] > 0
            started[rows] = np.where(runs, clock.at(clock.starts), inf)
            ended[rows] = np.where(runs, np.minimum(clock.at(clock.ends), self.seconds), inf)
        return started, ended


def simulate(batch: Batch, plan: BatchPlan, machine: Machine) -> Rollout:
    """Simulate one rollout, in which all prompts are submitted at once.

    Raises:
        ValueError: the batch does not fit the plan.
    """
    if len(plan.candidates) != batch.groups or max(plan.candidates) > batch.lengths.shape[1]:
        raise ValueError("the batch must have the plan's prompts, and as many candidates as the plan starts")
    counts, saturated = np.asarray(plan.candidates), np.asarray(plan.saturated or [False] * len(plan.candidates))
    # A policy has one rule for saturated prompts and one for the others.
    parts = [Groups.of(batch, plan, rows) for rows in map(np.flatnonzero, (~saturated, saturated)) if rows.size]
    ends = _merge([(part.rows, part.ends(None, None)) for part in parts])
    clocks = Clocks.of(batch, plan, machine, ends.run)
    known, rule, needs, reported = None, plan.deadline, np.full(batch.groups, inf), np.full(batch.groups, inf)
    if rule is not None:
        for part in parts:
            needs[part.rows] = part.needs(plan.mean_candidates, counts[part.rows])
            reported[part.rows] = part.steps_to(needs[part.rows])
        if rule.fixed is not None:
            known = clocks.known(rule.fixed, rule.bound_of(rule.fixed), 0.0, -1)
        else:
            known = _determine(rule, needs, reported, ends.completed, clocks)
    if known is not None:
        # What is complete before the deadline is known stays as it is.
        late = known.comes_before(ends.completed)
        ends = _merge([(part.rows, part.ends(known.of(part.rows), late[part.rows])) for part in parts])
        clocks = Clocks.of(batch, plan, machine, ends.run)
    completed_at, generated, returned, truncated = np.zeros(batch.groups), ends.run, ends.returned, ends.truncated
    for rows, clock in clocks.clocks:
        completed_at[rows] = clock.completion(ends.completed[rows])
    order = np.argsort(completed_at, kind="stable")[: plan.enough]
    seconds = float(completed_at[order[-1]])
    if plan.enough is not None:
        chosen = np.zeros(batch.groups, dtype=bool)
        chosen[order] = True
        returned, truncated = np.where(chosen[:, None], returned, 0.0), truncated & chosen[:, None]
        completed_at = np.where(chosen, completed_at, inf)
        generated = np.zeros_like(ends.run)
        for rows, clock in clocks.clocks:
            generated[rows] = clock.generated_until(seconds)
    has_need = reported <= ends.completed
    lengths = (int(needs[group]) if has_need[group] else 0 for group in order if has_need[group] or ends.cut[group])
    deadline = known.tokens if known is not None and known.seconds <= seconds * (1 + TOLERANCE) else None
    return Rollout(seconds, generated, returned, truncated, completed_at, deadline, tuple(lengths), clocks)


def _merge(parts: list[tuple[Ints, Ends]]) -> Ends:
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))

    def in_order(name: str) -> NDArray[Any]:
        return np.asarray(np.concatenate([getattr(ends, name) for _, ends in parts])[order])

    return Ends(*map(in_order, ("run", "returned", "truncated", "completed", "cut")))


def _determine(rule: Deadline, needs: Floats, reported: Floats, completed: Floats, clocks: Clocks) -> Known | None:
    """Return the deadline that the cohort computes from its groups' reports, in the order in which these come.

    ``reported``, ``completed``: steps after which each group reports what it ``needs``, and is complete, shape (G,).
    """
    cohort, has_need = CohortDeadline(rule, needs.size), reported <= completed
    ends = clocks.seconds_at(np.where(has_need, reported, completed))
    # Steps, and their seconds, at which groups report that they need more than the limit.
    steps, passes = np.full(needs.size, inf), np.full(needs.size, inf)
    limit, now = None, 0.0
    while True:
        if cohort.waits_beyond not in (None, limit):
            limit = cohort.waits_beyond
            steps = np.maximum(clocks.steps_at(now), limit)
            passes = np.where(ends < inf, clocks.seconds_at(steps), inf)
        group = int(np.minimum(ends, passes).argmin())  # of several at once, the first
        now = float(min(ends[group], passes[group]))
        if now == inf:
            return None
        if passes[group] < ends[group]:
            cohort.report_minimum(group, int(steps[group]) + 1)
        elif has_need[group]:
            cohort.report_need(group, int(needs[group]))
            ends[group] = inf
        else:
            if limit is not None:
                cohort.report_minimum(group, None)
            cohort.remove(group)
            ends[group] = inf
        passes[group] = inf
        if cohort.tokens is not None:
            return clocks.known(cohort.tokens, rule.bound_of(cohort.tokens), now, group)
