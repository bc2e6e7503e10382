"""Simulate a rollout: which candidates of a batch are returned, and when.

Usage::

    rollout = simulate(batch, BatchPlan(8, [12] * batch.groups, shaping), machine)
    rollout.seconds, rollout.generated.sum()

The candidates of a group are assumed to run side by side: they start together, and each gets a token in every step.
Then a length is also the step at which a candidate ends, and the order of the lengths determines which candidates are
stopped and when, for all groups at once (`Groups`). The tokens of all candidates determine the schedule of the engines
(`engines`). If candidates continue from earlier rollouts, their earlier tokens count in the order, but take no step.

The result is exact if each engine runs all its sequences at once. If sequences wait or are preempted, candidates that
are ahead of their group are stopped a little later than in this model.
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
    """Outcome of a rollout of G prompts with C candidates each."""

    seconds: float
    """Seconds until all groups, or enough groups, are complete."""
    generated: Floats
    """Tokens of each candidate without those of earlier rollouts, shape (G, C)."""
    returned: Floats
    """Tokens of each returned trajectory, 0 for other candidates, shape (G, C)."""
    truncated: Bools
    """Whether a trajectory is returned truncated, shape (G, C)."""
    completed_at: Floats
    """Seconds at which each group is complete, or infinity, shape (G,)."""
    deadline: int | None
    completion_lengths: tuple[int, ...]
    """Completion lengths in the order of completion, for `RecentCompletionLengths`."""
    clocks: Clocks

    @property
    def lengths(self) -> Floats:
        """Tokens of all returned trajectories."""
        return self.returned[self.returned > 0]

    @property
    def busy(self) -> float:
        """Mean share of the engines' places that are taken. An engine has as many places as it ever used at once."""
        peak = sum(float(clock.count.max()) for clock in self.clocks.clocks)
        busy = sum(clock.busy_until(self.seconds) for clock in self.clocks.clocks)
        return min(1.0, busy / (peak * self.seconds))

    def times(self) -> tuple[Floats, Floats]:
        """Return the seconds at which each candidate first ran and ended, or infinity, shape (G, C)."""
        started = np.full(self.generated.shape, inf)
        ended = np.full(self.generated.shape, inf)
        for clock in self.clocks.clocks:
            runs = self.generated[clock.rows] > 0
            started[clock.rows] = np.where(runs, clock.seconds_at(clock.starts), inf)
            ended[clock.rows] = np.where(runs, np.minimum(clock.seconds_at(clock.ends), self.seconds), inf)
        return started, ended


@dataclass(frozen=True, slots=True, eq=False)
class KnownDeadline:
    """A deadline, and when it becomes known."""

    tokens: int
    cut_length: int
    """Length at which every candidate is cut."""
    steps: Floats
    """Steps that each group has run at that moment, shape (G, 1)."""
    late: Bools
    """Whether each group is incomplete at that moment, shape (G, 1)."""
    seconds: float


@dataclass(slots=True, eq=False)
class Ends:
    """How candidates end. ``returned`` and ``truncated`` are as in `Rollout`."""

    run: Floats
    """Steps of each candidate, shape (G, C)."""
    returned: Floats
    truncated: Bools
    completed: Floats
    """Step in which each group is complete, shape (G,)."""
    cut: Bools
    """Whether each group cut a candidate, shape (G,)."""


def simulate(batch: Batch, plan: BatchPlan, machine: Machine) -> Rollout:
    """Simulate one rollout, in which all prompts are submitted at once."""
    counts = np.asarray(plan.candidates)
    saturated = np.asarray(plan.saturated or [False] * len(plan.candidates))
    # A policy has one rule for saturated prompts and another rule for all others.
    parts = [Groups.of(batch, plan, rows) for rows in map(np.flatnonzero, (~saturated, saturated)) if rows.size]
    ends = _find_ends(parts, None)
    clocks = Clocks.of(batch, plan, machine, ends.run)

    # How candidates run without a deadline says when the deadline becomes known.
    deadline = None
    needs = np.full(batch.groups, inf)
    reported = np.full(batch.groups, inf)
    if plan.deadline is not None:
        for part in parts:
            needs[part.rows], reported[part.rows] = part.compute_needs(plan.mean_candidates, counts[part.rows])
        deadline = _find_deadline(plan.deadline, needs, reported, ends.completed, clocks)
    if deadline is not None:
        ends = _find_ends(parts, deadline)
        clocks = Clocks.of(batch, plan, machine, ends.run)

    completed_at = np.zeros(batch.groups)
    for clock in clocks.clocks:
        completed_at[clock.rows] = clock.completion(ends.completed[clock.rows])
    order = np.argsort(completed_at, kind="stable")[: plan.enough]
    seconds = float(completed_at[order[-1]])
    generated = ends.run
    returned = ends.returned
    truncated = ends.truncated
    if plan.enough is not None:
        is_complete = np.zeros(batch.groups, dtype=bool)
        is_complete[order] = True
        completed_at = np.where(is_complete, completed_at, inf)
        returned = np.where(is_complete[:, None], returned, 0.0)
        truncated = truncated & is_complete[:, None]
        generated = np.zeros_like(ends.run)
        for clock in clocks.clocks:
            generated[clock.rows] = clock.generated_until(seconds)

    has_need = reported <= ends.completed
    lengths = tuple(int(needs[g]) if has_need[g] else 0 for g in order if has_need[g] or ends.cut[g])
    tokens = None
    if deadline is not None and deadline.seconds <= seconds * (1 + TOLERANCE):
        tokens = deadline.tokens
    return Rollout(seconds, generated, returned, truncated, completed_at, tokens, lengths, clocks)


def _find_deadline(
    rule: Deadline,
    needs: Floats,
    reported: Floats,
    completed: Floats,
    clocks: Clocks,
) -> KnownDeadline | None:
    """Return the deadline that the cohort computes from its groups' reports, or None if it never becomes known.

    Each group needs ``needs`` tokens, reports them after ``reported`` steps, and is complete after ``completed`` steps.
    """
    cohort = CohortDeadline(rule, needs.size)
    has_need = reported <= completed
    ends = clocks.seconds_at(np.where(has_need, reported, completed))
    # Steps, and their seconds, at which groups report that they need more than the limit.
    steps = np.full(needs.size, inf)
    passes = np.full(needs.size, inf)
    limit = None
    group = -1
    now = 0.0
    while cohort.tokens is None:
        if cohort.pending_cut_length not in (None, limit):
            limit = cohort.pending_cut_length
            steps = np.maximum(clocks.steps_at(now), limit)
            passes = np.where(ends < inf, clocks.seconds_at(steps), inf)
        # Among groups that report at the same time, the first group comes first.
        group = int(np.minimum(ends, passes).argmin())
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

    # The deadline does not change groups that are complete. In the step in which it becomes known, the groups before
    # the last reporter were processed already.
    run = clocks.steps_at(now)
    late = (completed > run) | ((completed == run) & (np.arange(needs.size) > group))
    return KnownDeadline(cohort.tokens, rule.cut_length_of(cohort.tokens), run[:, None], late[:, None], now)


def _find_ends(parts: "list[Groups]", deadline: KnownDeadline | None) -> Ends:
    found = [part.ends(deadline) for part in parts]
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    return Ends(*(np.concatenate([getattr(ends, field.name) for ends in found])[order] for field in fields(Ends)))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups under one rule.

    This repeats the rules for arrays: 64 groups of 12 candidates take .25 ms, and 40 ms as `Group`s that get events.
    """

    rows: Ints
    """The groups in the batch, shape (G,)."""
    rule: SelectionRule
    lengths: Floats
    """Length at which each candidate ends, infinite if it is not started, shape (G, C)."""
    valid: Bools
    draws: Floats
    done: Floats
    """Tokens that earlier rollouts have generated, shape (G, C)."""

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, rows: Ints) -> "Groups":
        started = np.arange(batch.lengths.shape[1]) < np.asarray(plan.candidates)[rows][:, None]
        done = np.where(started, batch.generated_before[rows], 0.0)
        lengths = np.where(started, batch.ends[rows], inf)
        valid = batch.valid[rows] & started
        return Groups(rows, plan.rule(int(rows[0])), lengths, valid, batch.tail_draws[rows], done)

    def compute_needs(self, mean_candidates: float, counts: Ints) -> tuple[Floats, Floats]:
        """Return the length that each group needs (see `place_of_need`), and the decode step after which it is known.

        ``counts``: candidates of each group. ``mean_candidates``: their mean in the cohort. Both results have the shape
        (G,), and are infinite for a group with too few valid candidates.
        """
        shortest_first = np.sort(np.where(self.valid, self.lengths, inf), axis=1)
        places = [place_of_need(self.rule.completion_place, int(count), mean_candidates) for count in counts]
        needs = shortest_first[np.arange(len(places)), np.asarray(places) - 1]

        # The length is known when the last of the candidates up to it ends. Carried tokens take no steps.
        is_within = self.valid & (self.lengths <= needs[:, None])
        last_step = np.where(is_within, self.lengths - self.done, 0.0).max(axis=1)
        return needs, np.where(np.isfinite(needs), last_step, inf)

    def ends(self, deadline: KnownDeadline | None) -> Ends:
        lengths = self.lengths
        if deadline is not None:
            steps = deadline.steps[self.rows] + self.done
            deadline = replace(deadline, steps=steps, late=deadline.late[self.rows])
            # A deadline of earlier groups may become known after candidates have passed the cut length.
            limit = np.where(deadline.late & np.isfinite(lengths), np.maximum(deadline.cut_length, steps), inf)
            lengths = np.minimum(lengths, limit)
        is_cut = lengths < self.lengths
        ends = self._by_rule(lengths, self.valid & ~is_cut, deadline)
        if deadline is not None:
            ends.returned = np.where(is_cut, np.minimum(ends.returned, deadline.cut_length), ends.returned)
            ends.cut |= (is_cut & (ends.run == lengths)).any(axis=1)
        # So far a step is a token. Tokens of earlier rollouts take no step.
        if self.done.any():
            ends.run = np.maximum(ends.run - self.done, 0.0)
            ends.completed = ends.run.max(axis=1)
        return ends

    def _by_rule(self, lengths: Floats, valid: Bools, deadline: KnownDeadline | None) -> Ends:
        """Return how candidates of these ``lengths`` end if a step is a token; ``deadline.steps`` has shape (G, C)."""
        # The order of selection: valid candidates first, shorter candidates first, then by index. Candidates that are
        # not started have an infinite length, and are last.
        started = np.isfinite(lengths)
        order = np.lexsort((lengths, ~valid), axis=1)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(lengths.shape[1])[None], axis=1)
        ordered = np.sort(np.where(valid, lengths, inf), axis=1)
        count = valid.sum(axis=1, keepdims=True)

        def nth(place: int) -> Floats:
            """Return the length of the ``place``-th shortest valid candidate, shape (G, 1), or infinity."""
            return ordered[:, place - 1 : place]

        def uncut(run: Floats, returned: Bools) -> Ends:
            """Return ends at which no trajectory is cut."""
            run = np.where(started, np.minimum(run, lengths), 0.0)
            tokens = np.where(returned, run, 0.0)
            return Ends(run, tokens, returned & ~valid, run.max(axis=1), np.zeros(run.shape[0], dtype=bool))

        rule = self.rule
        shortest = rule.num_shortest
        longest = rule.num_longest
        if isinstance(rule, InOrder):
            return uncut(lengths, started)
        short = valid & (rank < shortest)
        if isinstance(rule, DualEnd) and longest:
            tail = (rank >= np.maximum(count - longest, shortest)) & (rank < count)
            fill = (count < rule.size) & (rank < rule.size) & started
            return uncut(lengths, short | tail | fill)
        if not isinstance(rule, SampledTail):
            return uncut(nth(rule.size), (rank < rule.size) & started)

        # The lowest draws win the places of a sampled tail.
        rest = started & ~short
        lowest = np.argsort(np.argsort(np.where(rest, self.draws, inf), axis=1, kind="stable"), axis=1)
        winners = rest & (lowest < shortest + longest - short.sum(axis=1, keepdims=True))
        last_short = nth(shortest)
        if not isinstance(rule, CutTail):
            return uncut(np.where(winners, lengths, last_short), short | winners)

        needed = nth(rule.completion_place)
        tail_end = np.where(winners, lengths, 0.0).max(axis=1, keepdims=True)
        tokens: float = inf
        known_at = np.full_like(needed, inf)
        cut_at = np.full_like(needed, inf)
        if deadline is not None:
            tokens = deadline.tokens
            known_at = deadline.steps
            cut_at = np.where(deadline.late, np.minimum(np.maximum(tokens, needed), deadline.cut_length), inf)
        # A group is complete when its K shortest candidates and the tail have ended, although longer candidates still
        # run, unless the tail may still turn out to be cut.
        early = np.maximum(last_short, tail_end)
        is_early = (early < needed) & ((early < known_at.max(axis=1, keepdims=True)) | (tail_end <= tokens))
        run = np.where(winners, np.maximum(cut_at, known_at), np.where(is_early, early, needed))
        ends = uncut(run, short | winners)
        is_cut = winners & (lengths > cut_at) & ~is_early
        ends.returned = np.where(is_cut, np.broadcast_to(cut_at, is_cut.shape), ends.returned)
        ends.truncated |= is_cut
        ends.cut = is_cut.any(axis=1)
        return ends
