"""Simulate a rollout: which candidates of a batch are returned, and when.

Usage::

    rollout = simulate(batch, BatchPlan(8, [12] * batch.groups, shaping), machine)
    rollout.seconds, rollout.generated.sum()

The candidates of a group are assumed to start together, and to get a token in every step. Then a length is also the
step at which a candidate ends, and the order of the lengths determines which candidates are stopped and when
(`Groups`). The tokens of all candidates determine the schedule of the engines (`engines`). Tokens of earlier rollouts
count in the order, but take no step.

The result is exact if each engine runs all its sequences at once. Otherwise, candidates that are ahead of their group
are stopped a little later than in this model.
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
    """A rollout of G prompts with C candidates each."""

    seconds: float
    """Seconds until all groups, or the needed groups, are complete."""
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
        return self.returned[self.returned > 0]

    @property
    def busy_share(self) -> float:
        """Mean share of the engines' places that are taken. An engine has as many places as it ever used at once."""
        num_places = sum(float(clock.num_running.max()) for clock in self.clocks.clocks)
        busy_seconds = sum(clock.busy_until(self.seconds) for clock in self.clocks.clocks)
        return min(1.0, busy_seconds / (num_places * self.seconds))

    def start_and_end_seconds(self) -> tuple[Floats, Floats]:
        """Return the seconds at which each candidate first ran and ended, or infinity, shape (G, C)."""
        started_at = np.full(self.generated.shape, inf)
        ended_at = np.full(self.generated.shape, inf)
        for clock in self.clocks.clocks:
            has_run = self.generated[clock.rows] > 0
            # The end of the rollout stops candidates.
            ends = np.minimum(clock.seconds_at(clock.end_steps), self.seconds)
            started_at[clock.rows] = np.where(has_run, clock.seconds_at(clock.start_steps), inf)
            ended_at[clock.rows] = np.where(has_run, ends, inf)
        return started_at, ended_at


@dataclass(frozen=True, slots=True, eq=False)
class KnownDeadline:
    tokens: int
    cut_length: int
    known_at_steps: Floats
    """Steps that each group has run then, shape (G, 1)."""
    is_incomplete: Bools
    """Whether each group is incomplete then, shape (G, 1)."""
    known_at_seconds: float


@dataclass(slots=True, eq=False)
class Ends:
    """``returned`` and ``truncated`` are as in `Rollout`."""

    run_steps: Floats
    """Steps of each candidate, shape (G, C)."""
    returned: Floats
    truncated: Bools
    completion_steps: Floats
    """Step in which each group is complete, shape (G,)."""
    has_cut: Bools
    """Whether each group cut a candidate, shape (G,)."""


def simulate(batch: Batch, plan: BatchPlan, machine: Machine) -> Rollout:
    counts = np.asarray(plan.candidates)
    saturated = np.asarray(plan.saturated or [False] * len(plan.candidates))
    # A policy has one rule for saturated prompts and another rule for all others.
    parts = [Groups.of(batch, plan, rows) for rows in map(np.flatnonzero, (~saturated, saturated)) if rows.size]
    ends = _find_ends(parts, None)
    clocks = Clocks.of(batch, plan, machine, ends.run_steps)

    # How candidates run without a deadline says when the deadline becomes known.
    deadline = None
    needs = np.full(batch.groups, inf)
    report_steps = np.full(batch.groups, inf)
    if plan.deadline is not None:
        for part in parts:
            needs[part.rows], report_steps[part.rows] = part.compute_needs(plan.mean_candidates, counts[part.rows])
        deadline = _find_deadline(plan.deadline, needs, report_steps, ends.completion_steps, clocks)
    if deadline is not None:
        ends = _find_ends(parts, deadline)
        clocks = Clocks.of(batch, plan, machine, ends.run_steps)

    completed_at = np.zeros(batch.groups)
    for clock in clocks.clocks:
        completed_at[clock.rows] = clock.completion_seconds(ends.completion_steps[clock.rows])
    completed = np.argsort(completed_at, kind="stable")[: plan.needed_groups]
    seconds = float(completed_at[completed[-1]])
    generated = ends.run_steps
    returned = ends.returned
    truncated = ends.truncated
    if plan.needed_groups is not None:
        is_complete = np.zeros(batch.groups, dtype=bool)
        is_complete[completed] = True
        completed_at = np.where(is_complete, completed_at, inf)
        returned = np.where(is_complete[:, None], returned, 0.0)
        truncated = truncated & is_complete[:, None]
        generated = np.zeros_like(ends.run_steps)
        for clock in clocks.clocks:
            generated[clock.rows] = clock.generated_until(seconds)

    # A group that completes before its need is known, without a cut, has no completion length.
    completion_lengths: list[int] = []
    has_reported_need = report_steps <= ends.completion_steps
    for group in completed:
        if has_reported_need[group]:
            completion_lengths.append(int(needs[group]))
        elif ends.has_cut[group]:
            # 0 stands for a group that was cut before its need was known.
            completion_lengths.append(0)
    deadline_tokens = None
    if deadline is not None and deadline.known_at_seconds <= seconds * (1 + TOLERANCE):
        deadline_tokens = deadline.tokens
    return Rollout(
        seconds,
        generated,
        returned,
        truncated,
        completed_at,
        deadline_tokens,
        tuple(completion_lengths),
        clocks,
    )


def _find_deadline(
    rule: Deadline,
    needs: Floats,
    report_steps: Floats,
    completion_steps: Floats,
    clocks: Clocks,
) -> KnownDeadline | None:
    """Return the cohort's deadline, or None if it is never known. Groups report ``needs`` after ``report_steps``."""
    cohort = CohortDeadline(rule, needs.size)
    has_reported_need = report_steps <= completion_steps
    # When each group reports its need, or is complete without a need. Infinite after that.
    last_event_at = clocks.seconds_at(np.where(has_reported_need, report_steps, completion_steps))
    # When each group reports that it needs more than the limit. After such reports of all other groups, the deadline is
    # known while they still run.
    limit = None
    limit_passed_steps = np.full(needs.size, inf)
    limit_passed_at = np.full(needs.size, inf)
    group = -1
    now = 0.0
    while cohort.tokens is None:
        if cohort.pending_cut_length not in (None, limit):
            limit = cohort.pending_cut_length
            limit_passed_steps = np.maximum(clocks.steps_begun_at(now), limit)
            limit_passed_at = np.where(last_event_at < inf, clocks.seconds_at(limit_passed_steps), inf)
        # Among groups that report at the same time, the first group comes first.
        group = int(np.minimum(last_event_at, limit_passed_at).argmin())
        now = float(min(last_event_at[group], limit_passed_at[group]))
        if now == inf:
            return None
        if limit_passed_at[group] < last_event_at[group]:
            cohort.report_minimum(group, int(limit_passed_steps[group]) + 1)
        elif has_reported_need[group]:
            cohort.report_need(group, int(needs[group]))
            last_event_at[group] = inf
        else:
            if limit is not None:
                # The group can have no need any more. Groups of the server report this before they are removed.
                cohort.report_minimum(group, None)
            cohort.remove(group)
            last_event_at[group] = inf
        limit_passed_at[group] = inf

    # The deadline does not change groups that are complete. In the step in which it becomes known, the groups before
    # the last reporter were processed already.
    steps = clocks.steps_begun_at(now)
    is_incomplete = (completion_steps > steps) | ((completion_steps == steps) & (np.arange(needs.size) > group))
    cut_length = rule.cut_length_of(cohort.tokens)
    return KnownDeadline(cohort.tokens, cut_length, steps[:, None], is_incomplete[:, None], now)


def _find_ends(parts: "list[Groups]", deadline: KnownDeadline | None) -> Ends:
    ends_of_parts = [part.find_ends(deadline) for part in parts]
    # Put the groups of all parts into the order of the batch.
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    arrays = []
    for field in fields(Ends):
        arrays.append(np.concatenate([getattr(ends, field.name) for ends in ends_of_parts])[order])
    return Ends(*arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups under one rule.

    This repeats the rules for arrays: 64 groups of 12 candidates take .25 ms, and 40 ms as `Group`s.
    """

    rows: Ints
    """The groups in the batch, shape (G,)."""
    rule: SelectionRule
    lengths: Floats
    """Length at which each candidate ends, infinite if it is not started, shape (G, C)."""
    valid: Bools
    tail_draws: Floats
    carried_tokens: Floats
    """Tokens that earlier rollouts have generated, shape (G, C)."""

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, rows: Ints) -> "Groups":
        is_started = np.arange(batch.lengths.shape[1]) < np.asarray(plan.candidates)[rows][:, None]
        carried_tokens = np.where(is_started, batch.generated_before[rows], 0.0)
        lengths = np.where(is_started, batch.capped_lengths[rows], inf)
        valid = batch.valid[rows] & is_started
        # All groups have the rule of the first.
        rule = plan.rule(int(rows[0]))
        return Groups(rows, rule, lengths, valid, batch.tail_draws[rows], carried_tokens)

    def compute_needs(self, mean_candidates: float, counts: Ints) -> tuple[Floats, Floats]:
        """Return the length that each group needs (see `place_of_need`), and the decode step after which it is known.

        ``counts``: candidates of each group. ``mean_candidates``: their mean in the cohort. Both results have the shape
        (G,), and are infinite for a group with too few valid candidates.
        """
        # A group with fewer candidates than the mean needs an earlier place, so that it has spare candidates, too.
        shortest_first = np.sort(np.where(self.valid, self.lengths, inf), axis=1)
        places = [place_of_need(self.rule.completion_place, int(count), mean_candidates) for count in counts]
        needs = shortest_first[np.arange(len(places)), np.asarray(places) - 1]

        # The length is known when the last of the candidates up to it ends. Carried tokens take no steps.
        is_within = self.valid & (self.lengths <= needs[:, None])
        last_step = np.where(is_within, self.lengths - self.carried_tokens, 0.0).max(axis=1)
        return needs, np.where(np.isfinite(needs), last_step, inf)

    def find_ends(self, deadline: KnownDeadline | None) -> Ends:
        lengths = self.lengths
        if deadline is not None:
            # Count in tokens of each candidate instead of steps of its group.
            known_at = deadline.known_at_steps[self.rows] + self.carried_tokens
            is_incomplete = deadline.is_incomplete[self.rows]
            deadline = replace(deadline, known_at_steps=known_at, is_incomplete=is_incomplete)
            # A deadline of earlier groups may become known after candidates have passed the cut length.
            run_limit = np.maximum(deadline.cut_length, known_at)
            run_limit = np.where(is_incomplete & np.isfinite(lengths), run_limit, inf)
            lengths = np.minimum(lengths, run_limit)
        is_cut = lengths < self.lengths
        ends = self._select(lengths, self.valid & ~is_cut, deadline)
        if deadline is not None:
            ends.returned = np.where(is_cut, np.minimum(ends.returned, deadline.cut_length), ends.returned)
            # The selection stops some candidates before their cut.
            runs_to_cut = is_cut & (ends.run_steps == lengths)
            ends.has_cut |= runs_to_cut.any(axis=1)
        # So far a step is a token. Tokens of earlier rollouts take no step.
        if self.carried_tokens.any():
            ends.run_steps = np.maximum(ends.run_steps - self.carried_tokens, 0.0)
            ends.completion_steps = ends.run_steps.max(axis=1)
        return ends

    def _select(self, lengths: Floats, valid: Bools, deadline: KnownDeadline | None) -> Ends:
        """Return how candidates of these ``lengths`` end by the rule, if a step is a token."""
        # The order of selection: valid candidates first, shorter candidates first, then by index. Candidates that are
        # not started have an infinite length, and are last.
        is_started = np.isfinite(lengths)
        order = np.lexsort((lengths, ~valid), axis=1)
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(lengths.shape[1])[None], axis=1)
        shortest_first = np.sort(np.where(valid, lengths, inf), axis=1)
        num_valid = valid.sum(axis=1, keepdims=True)

        def nth_shortest(place: int) -> Floats:
            """Return the length of the ``place``-th shortest valid candidate, shape (G, 1), or infinity."""
            return shortest_first[:, place - 1 : place]

        def build_ends(run_steps: Floats, is_returned: Bools) -> Ends:
            run_steps = np.where(is_started, np.minimum(run_steps, lengths), 0.0)
            returned = np.where(is_returned, run_steps, 0.0)
            no_cut = np.zeros(run_steps.shape[0], dtype=bool)
            return Ends(run_steps, returned, is_returned & ~valid, run_steps.max(axis=1), no_cut)

        rule = self.rule
        if isinstance(rule, InOrder):
            return build_ends(lengths, is_started)
        is_short = valid & (rank < rule.num_shortest)
        if isinstance(rule, DualEnd) and rule.num_longest:
            first_tail_rank = np.maximum(num_valid - rule.num_longest, rule.num_shortest)
            is_tail = (rank >= first_tail_rank) & (rank < num_valid)
            # Truncated candidates fill the places that valid candidates leave.
            is_fill = (num_valid < rule.size) & (rank < rule.size) & is_started
            return build_ends(lengths, is_short | is_tail | is_fill)
        if not isinstance(rule, SampledTail):
            return build_ends(nth_shortest(rule.size), (rank < rule.size) & is_started)

        # The lowest draws win the places of a sampled tail, and the places that short candidates leave.
        may_win = is_started & ~is_short
        lowest_first = np.argsort(np.where(may_win, self.tail_draws, inf), axis=1, kind="stable")
        draw_rank = np.argsort(lowest_first, axis=1)
        num_winners = rule.num_shortest + rule.num_longest - is_short.sum(axis=1, keepdims=True)
        wins = may_win & (draw_rank < num_winners)
        short_end = nth_shortest(rule.num_shortest)
        if not isinstance(rule, CutTail):
            return build_ends(np.where(wins, lengths, short_end), is_short | wins)

        need = nth_shortest(rule.completion_place)
        tail_end = np.where(wins, lengths, 0.0).max(axis=1, keepdims=True)
        deadline_tokens: float = inf
        known_at = np.full_like(need, inf)
        cut_at = np.full_like(need, inf)
        if deadline is not None:
            deadline_tokens = deadline.tokens
            known_at = deadline.known_at_steps
            # The tail is cut at the deadline, but not before the group's need, and at the latest at the cut length.
            cut_at = np.minimum(np.maximum(deadline_tokens, need), deadline.cut_length)
            cut_at = np.where(deadline.is_incomplete, cut_at, inf)
        # A group is complete when its K shortest candidates and the tail have ended, although longer candidates still
        # run, unless the tail may still turn out to be cut.
        early_end = np.maximum(short_end, tail_end)
        ends_before_known = early_end < known_at.max(axis=1, keepdims=True)
        completes_early = (early_end < need) & (ends_before_known | (tail_end <= deadline_tokens))
        # No candidate is cut before the deadline is known.
        run_steps = np.where(wins, np.maximum(cut_at, known_at), np.where(completes_early, early_end, need))
        ends = build_ends(run_steps, is_short | wins)
        is_cut = wins & (lengths > cut_at) & ~completes_early
        ends.returned = np.where(is_cut, np.broadcast_to(cut_at, is_cut.shape), ends.returned)
        ends.truncated |= is_cut
        ends.has_cut = is_cut.any(axis=1)
        return ends
