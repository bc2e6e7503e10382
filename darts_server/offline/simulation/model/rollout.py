"""Simulate a rollout: what becomes of the groups of a batch, and when.

Usage::

    rollout = simulate(batch, BatchPlan(8, [12] * batch.groups, shaping), machine)
    rollout.seconds, rollout.generated.sum()

No group is driven event by event: the candidates of a group are taken for side by side, as if they started together and
each got a token in every step. So a length is also the step of its end, and which candidates are stopped, and after how
many tokens, follows from the order of their lengths, for all groups at once (`Groups`); and from the tokens, when each
engine does what (`engines`). Candidates of earlier rollouts go on from what they have: then the order is that of all
their tokens, and the steps are those that are left.

Where an engine runs all sequences at once that is exact. Where they queue or are preempted, candidates of one group are
not side by side: those that are ahead of others are stopped a little later than here.
"""

from dataclasses import dataclass, fields, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import DualEnd, InOrder, SelectionRule
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats, Ints
from darts_server.offline.simulation.model.engines import TOLERANCE, Clocks, Machine
from darts_server.policy.deadline import CohortDeadline, Deadline, place_of_need

Bools = NDArray[np.bool_]


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
        peak = sum(float(clock.count.max()) for clock in self.clocks.clocks)
        busy = sum(clock.busy_until(self.seconds) for clock in self.clocks.clocks)
        return min(1.0, busy / (peak * self.seconds))

    def times(self) -> tuple[Floats, Floats]:
        """Return the seconds at which each candidate ran first, and at which it ended or was stopped, shape (G, C).

        Infinite if it did not run.
        """
        started, ended = np.full(self.generated.shape, inf), np.full(self.generated.shape, inf)
        for clock in self.clocks.clocks:
            runs = self.generated[clock.rows] > 0
            started[clock.rows] = np.where(runs, clock.at(clock.starts), inf)
            ended[clock.rows] = np.where(runs, np.minimum(clock.at(clock.ends), self.seconds), inf)
        return started, ended


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The deadline and the bound in tokens, and the ``seconds`` at which they become known.

    ``steps``: the steps that each group's candidates have run until then, shape (G, 1). ``late``: the groups that hear
    of it before they are complete, shape (G, 1).
    """

    tokens: int
    bound: int
    seconds: float
    steps: Floats
    late: Bools


@dataclass(slots=True, eq=False)
class Ends:
    """How candidates end: the steps that each ``run``s, and what of it is returned. Each has the shape (G, C).

    ``completed``: the step in which each group is complete, shape (G,). ``cut``: whether it cut any, shape (G,).
    """

    run: Floats
    returned: Floats
    truncated: Bools
    completed: Floats
    cut: Bools


def simulate(batch: Batch, plan: BatchPlan, machine: Machine) -> Rollout:
    """Simulate one rollout, in which all prompts are submitted at once."""
    counts, saturated = np.asarray(plan.candidates), np.asarray(plan.saturated or [False] * len(plan.candidates))
    # A policy has one rule for saturated prompts and one for the others.
    parts = [Groups.of(batch, plan, rows) for rows in map(np.flatnonzero, (~saturated, saturated)) if rows.size]
    ends = _end(parts, None)
    clocks = Clocks.of(batch, plan, machine, ends.run)
    known, rule, needs, reported = None, plan.deadline, np.full(batch.groups, inf), np.full(batch.groups, inf)
    if rule is not None:
        for part in parts:
            needs[part.rows], reported[part.rows] = part.needs(plan.mean_candidates, counts[part.rows])
        known = _determine(rule, needs, reported, ends.completed, clocks)
    if known is not None:
        ends = _end(parts, known)
        clocks = Clocks.of(batch, plan, machine, ends.run)

    completed_at, generated, returned, truncated = np.zeros(batch.groups), ends.run, ends.returned, ends.truncated
    for clock in clocks.clocks:
        completed_at[clock.rows] = clock.completion(ends.completed[clock.rows])
    order = np.argsort(completed_at, kind="stable")[: plan.enough]
    seconds = float(completed_at[order[-1]])
    if plan.enough is not None:
        chosen = np.zeros(batch.groups, dtype=bool)
        chosen[order] = True
        returned, truncated = np.where(chosen[:, None], returned, 0.0), truncated & chosen[:, None]
        completed_at = np.where(chosen, completed_at, inf)
        generated = np.zeros_like(ends.run)
        for clock in clocks.clocks:
            generated[clock.rows] = clock.generated_until(seconds)
    has_need = reported <= ends.completed
    lengths = (int(needs[group]) if has_need[group] else 0 for group in order if has_need[group] or ends.cut[group])
    deadline = known.tokens if known is not None and known.seconds <= seconds * (1 + TOLERANCE) else None
    return Rollout(seconds, generated, returned, truncated, completed_at, deadline, tuple(lengths), clocks)


def _determine(rule: Deadline, needs: Floats, reported: Floats, completed: Floats, clocks: Clocks) -> Known | None:
    """Return the deadline that the cohort computes from its groups' reports, in the order in which these come.

    ``reported``, ``completed``: steps after which each group reports what it ``needs``, and is complete, shape (G,).
    """
    cohort, has_need, group, now = CohortDeadline(rule, needs.size), reported <= completed, -1, 0.0
    ends = clocks.seconds_at(np.where(has_need, reported, completed))
    # Steps, and their seconds, at which groups report that they need more than the limit.
    steps, passes, limit = np.full(needs.size, inf), np.full(needs.size, inf), None
    while cohort.tokens is None:
        if cohort.pending_bound not in (None, limit):
            limit = cohort.pending_bound
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
    # What is complete before the deadline is known stays as it is. In the step in which it becomes known, groups before
    # the one that reports last have been looked at already.
    run = clocks.steps_at(now)
    late = (completed > run) | ((completed == run) & (np.arange(needs.size) > group))
    return Known(cohort.tokens, rule.bound_of(cohort.tokens), now, run[:, None], late[:, None])


def _end(parts: "list[Groups]", known: Known | None) -> Ends:
    """Return how the candidates of all groups end."""
    found = [part.ends(known) for part in parts]
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    return Ends(*(np.concatenate([getattr(ends, each.name) for ends in found])[order] for each in fields(Ends)))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups under one rule. ``lengths``: at which candidates end, infinite if they are not started, shape (G, C).

    ``done``: those of their tokens that earlier rollouts have generated, shape (G, C).

    The rules are here once more, for arrays: 64 groups of 12 take 0.25 ms, and 40 ms as `Group`s that get events.
    """

    rows: Ints
    rule: SelectionRule
    lengths: Floats
    valid: Bools
    draws: Floats
    done: Floats

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, rows: Ints) -> "Groups":
        started = np.arange(batch.lengths.shape[1]) < np.asarray(plan.candidates)[rows][:, None]
        done = np.zeros(started.shape) if batch.done is None else np.where(started, batch.done[rows], 0.0)
        lengths = np.where(started, batch.ends[rows], inf)
        valid = batch.valid[rows] & started
        return Groups(rows, plan.rule(int(rows[0])), lengths, valid, batch.tail_draws[rows], done)

    def needs(self, mean_candidates: float, counts: Ints) -> tuple[Floats, Floats]:
        """Return how many tokens each group needs, see `place_of_need`, and after how many steps it has them.

        Shape (G,); infinite if a group has too few valid candidates.
        """
        ordered = np.sort(np.where(self.valid, self.lengths, inf), axis=1)
        places = [place_of_need(self.rule.completion_place, int(count), mean_candidates) for count in counts]
        needs = ordered[np.arange(len(places)), np.asarray(places) - 1]
        left = np.where(self.valid & (self.lengths <= needs[:, None]), self.lengths - self.done, 0.0).max(axis=1)
        return needs, np.where(np.isfinite(needs), left, inf)

    def ends(self, known: Known | None) -> Ends:
        """Return how candidates end with a deadline, which is ``known`` to the whole batch, or without one."""
        lengths = self.lengths
        if known is not None:
            known = replace(known, steps=known.steps[self.rows] + self.done, late=known.late[self.rows])
            # With a deadline of earlier groups, candidates may have run beyond the bound before it is known.
            end = np.where(known.late & np.isfinite(lengths), np.maximum(known.bound, known.steps), inf)
            lengths = np.minimum(lengths, end)
        is_cut = lengths < self.lengths
        ends = self._by_rule(lengths, self.valid & ~is_cut, known)
        if known is not None:
            ends.returned = np.where(is_cut, np.minimum(ends.returned, known.bound), ends.returned)
            ends.cut |= (is_cut & (ends.run == lengths)).any(axis=1)
        if self.done.any():  # earlier rollouts have generated that
            ends.run = np.maximum(ends.run - self.done, 0.0)
            ends.completed = ends.run.max(axis=1)
        return ends

    def _by_rule(self, lengths: Floats, valid: Bools, known: Known | None) -> Ends:
        """Return how candidates of these ``lengths`` end, by all of their tokens. ``known.steps``: shape (G, C)."""
        # The order of selection: valid ones first, shorter ones first, then by index. Those that are not started have
        # an infinite length, and come last.
        order, started = np.lexsort((lengths, ~valid), axis=1), np.isfinite(lengths)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(lengths.shape[1])[None], axis=1)
        ordered, count = np.sort(np.where(valid, lengths, inf), axis=1), valid.sum(axis=1, keepdims=True)

        def nth(place: int) -> Floats:
            """Return the length of the ``place``-th shortest valid one, shape (G, 1); infinite if there are fewer."""
            return ordered[:, place - 1 : place]

        def whole(run: Floats, returned: Bools) -> Ends:
            """Return what is returned as long as it is."""
            run = np.where(started, np.minimum(run, lengths), 0.0)
            tokens = np.where(returned, run, 0.0)
            return Ends(run, tokens, returned & ~valid, run.max(axis=1), np.zeros(run.shape[0], dtype=bool))

        rule, shortest, longest = self.rule, self.rule.num_shortest, self.rule.num_longest
        if isinstance(rule, InOrder):
            return whole(lengths, started)
        short = valid & (rank < shortest)
        if isinstance(rule, DualEnd) and longest:
            tail = (rank >= np.maximum(count - longest, shortest)) & (rank < count)
            fill = (count < rule.size) & (rank < rule.size) & started
            return whole(lengths, short | tail | fill)
        if not isinstance(rule, SampledTail):
            return whole(nth(rule.size), (rank < rule.size) & started)

        # Of a sampled tail the lowest draws win the places.
        rest = started & ~short
        lowest = np.argsort(np.argsort(np.where(rest, self.draws, inf), axis=1, kind="stable"), axis=1)
        winners = rest & (lowest < shortest + longest - short.sum(axis=1, keepdims=True))
        last_short = nth(shortest)
        if not isinstance(rule, CutTail):
            return whole(np.where(winners, lengths, last_short), short | winners)

        needed = nth(rule.completion_place)
        tail_end = np.where(winners, lengths, 0.0).max(axis=1, keepdims=True)
        own, known_at, tokens = np.full_like(needed, inf), np.full_like(needed, inf), inf
        if known is not None:
            known_at, tokens = known.steps, known.tokens
            own = np.where(known.late, np.minimum(np.maximum(tokens, needed), known.bound), inf)
        # Once the K shortest and the tail have ended, the group is complete, although longer ones still run, unless it
        # may turn out that the tail is to be cut.
        early = np.maximum(last_short, tail_end)
        is_early = (early < needed) & ((early < known_at.max(axis=1, keepdims=True)) | (tail_end <= tokens))
        run = np.where(winners, np.maximum(own, known_at), np.where(is_early, early, needed))
        ends = whole(run, short | winners)
        cut = winners & (lengths > own) & ~is_early
        ends.returned = np.where(cut, np.broadcast_to(own, cut.shape), ends.returned)
        ends.truncated |= cut
        ends.cut = cut.any(axis=1)
        return ends
