"""Predict the outcome of a rollout from order statistics, without driving any group: a fast twin of `simulate`.

It takes the candidates of a group for side by side: they start together, and each gets a token in every step. Then
which ones are stopped, and after how many tokens, follows from the order of their lengths, for all groups at once. On
an engine that runs all sequences at once that is exact. Where they queue, candidates of one group start at different
times, those that started early are stopped later than they could be, and the prediction is a little low. Of KV blocks
only the number of sequences that they hold on average counts: nothing is preempted.
"""

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.cohort_deadline import CohortDeadline
from darts_server.policy.deadline import Deadline
from darts_server.policy.simulation.batch import Batch, Ints, Plan
from darts_server.policy.simulation.machine import Machine
from darts_server.policy.simulation.replica import TOLERANCE
from darts_server.policy.simulation.rollout import place_groups
from darts_server.policy.simulation.side_by_side import Ends, Groups, Known

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted outcome of a rollout of G prompts with C candidates each.

    ``seconds``: until all groups are complete, or enough of them. ``generated``: tokens of each candidate, shape
    (G, C). ``returned``: tokens of each returned trajectory, 0 for the others, shape (G, C). ``truncated``: whether it
    is returned truncated, shape (G, C). ``completed_at``: seconds at which each group is complete; infinite if it is
    not. ``deadline``: the cohort's, in tokens.
    """

    seconds: float
    generated: Floats
    returned: Floats
    truncated: Bools
    completed_at: Floats
    deadline: int | None


def predict(batch: Batch, plan: Plan, machine: Machine) -> Prediction:
    """Predict one rollout, in which all prompts are submitted at once.

    Raises:
        ValueError: the batch does not fit the plan, or continues earlier rollouts.
    """
    plan.check(batch)
    if batch.done is not None:
        raise ValueError("candidates of earlier rollouts cannot be predicted; simulate them")
    counts = np.asarray(plan.candidates)
    parts = [Groups.of(batch, plan, rows) for rows in _by_rule(plan)]
    ends = _merge(batch, [(part.rows, part.ends(None, None)) for part in parts])
    clocks = _Clocks.of(batch, plan, machine, ends.run)
    known, rule = None, plan.deadline
    if rule is not None and rule.fixed is not None:
        known = clocks.known(rule.fixed, rule.bound_of(rule.fixed), 0.0, -1)
    elif rule is not None:
        needs = np.empty(batch.groups)
        for part in parts:
            needs[part.rows] = part.needs(plan.mean_candidates, counts[part.rows])
        known = _determine(rule, needs, ends.completed, clocks)
    if known is not None:
        # What is complete before the deadline is known stays as it is.
        late = known.comes_before(ends.completed)
        ends = _merge(batch, [(part.rows, part.ends(known.of(part.rows), late[part.rows])) for part in parts])
        clocks = _Clocks.of(batch, plan, machine, ends.run)
    return _timed(batch, plan, ends, clocks, known)


def _merge(batch: Batch, parts: list[tuple[NDArray[np.int64], Ends]]) -> Ends:
    shape = batch.lengths.shape
    merged = Ends(np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool), np.zeros(batch.groups))
    for rows, ends in parts:
        for name in ("run", "returned", "truncated", "completed"):
            getattr(merged, name)[rows] = getattr(ends, name)
    return merged


def _by_rule(plan: Plan) -> list[NDArray[np.int64]]:
    """Return the groups of each rule: a policy has one for saturated prompts and one for the others."""
    saturated = np.asarray(plan.saturated or [False] * len(plan.candidates))
    return [rows for rows in (np.flatnonzero(~saturated), np.flatnonzero(saturated)) if rows.size]


def _determine(rule: Deadline, needs: Floats, completed: Floats, clocks: "_Clocks") -> Known | None:
    """Return the deadline that the cohort computes from its groups' reports, which come in the order of `simulate`.

    ``needs``, ``completed``: steps after which each group reports its need, and is complete, shape (G,).
    """
    cohort, has_need = CohortDeadline(rule, needs.size), needs <= completed
    ends = clocks.seconds_at(np.where(has_need, needs, completed))
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


# --- engines ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Clocks:
    """The clocks of all engines, each with the groups that run there."""

    clocks: list[tuple[NDArray[np.int64], "_Clock"]]
    groups: int

    @staticmethod
    def of(batch: Batch, plan: Plan, machine: Machine, run: Floats) -> "_Clocks":
        placed, counts = np.asarray(place_groups(plan.candidates, machine.replicas)), np.asarray(plan.candidates)
        clocks = []
        for replica in range(min(machine.replicas, batch.groups)):
            rows = np.flatnonzero(placed == replica)
            started = np.arange(batch.lengths.shape[1]) < counts[rows][:, None]
            clocks.append((rows, _Clock.of(batch, machine, rows, started, run[rows])))
        return _Clocks(clocks, batch.groups)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which each group has run so many steps, shape (G,)."""
        seconds = np.empty(self.groups)
        for rows, clock in self.clocks:
            seconds[rows] = clock.at(clock.starts[:, 0] + steps[rows])
        return seconds

    def steps_at(self, seconds: float) -> Floats:
        """Return how many steps each group has run at some time, with the one that is being done, shape (G,)."""
        steps = np.empty(self.groups)
        for rows, clock in self.clocks:
            steps[rows] = np.maximum(clock.steps_at(seconds) - clock.starts[:, 0], 0.0)
        return steps

    def known(self, tokens: int, bound: int, seconds: float, group: int) -> Known:
        return Known(tokens, bound, seconds, group, self.steps_at(seconds)[:, None])


def _timed(batch: Batch, plan: Plan, ends: Ends, clocks: _Clocks, known: Known | None) -> Prediction:
    completed_at, generated = np.full(batch.groups, inf), ends.run.copy()
    for rows, clock in clocks.clocks:
        completed_at[rows] = clock.completion(ends.completed[rows], ends.run[rows])
    seconds = float(np.sort(completed_at)[(plan.enough or batch.groups) - 1])
    returned, truncated = ends.returned, ends.truncated
    if plan.enough is not None:
        chosen = np.zeros(batch.groups, dtype=bool)
        chosen[np.argsort(completed_at, kind="stable")[: plan.enough]] = True
        returned, truncated = np.where(chosen[:, None], returned, 0.0), truncated & chosen[:, None]
        completed_at = np.where(chosen, completed_at, inf)
        for rows, clock in clocks.clocks:
            generated[rows] = np.clip(clock.steps_at(seconds) - clock.starts, 0, generated[rows])
    deadline = known.tokens if known is not None and known.seconds <= seconds * (1 + TOLERANCE) else None
    return Prediction(seconds, generated, returned, truncated, completed_at, deadline)


@dataclass(frozen=True, slots=True, eq=False)
class _Clock:
    """When an engine does what. ``starts``: step at which each sequence is admitted, shape (G, C); infinite if never.

    ``steps`` and ``seconds``: the steps at which sequences start or end, and when these are done. From each to the
    next, k steps take ``prefill`` + ``linear`` k + ``square`` k (k - 1) / 2 seconds.
    """

    starts: Floats
    steps: Floats
    seconds: Floats
    prefill: Floats
    linear: Floats
    square: Floats

    @staticmethod
    def of(batch: Batch, machine: Machine, rows: NDArray[np.int64], started: Bools, run: Floats) -> "_Clock":
        """Build the clock of an engine that generates ``run`` tokens of each candidate."""
        prompts = np.broadcast_to(batch.prompt_tokens[rows][:, None], run.shape)[started].astype(np.float64)
        tokens = run[started]
        first = np.zeros(run.shape, dtype=bool)
        first[:, 0] = True
        prefill = np.where(first[started], prompts, prompts % machine.block_size)
        starts = _starts(tokens, _slots(machine, batch.prompt_tokens[rows], np.where(started, run, 0.0)))
        times = machine.step_time
        steps, place = np.unique(np.concatenate([starts, starts + tokens]), return_inverse=True)
        begins, stops = np.split(place, 2)

        def running(values: Floats) -> Floats:
            changes = np.bincount(begins, values, steps.size) - np.bincount(stops, values, steps.size)
            return np.cumsum(changes)[:-1]

        count, length = running(np.ones_like(tokens)), np.diff(steps)
        context = running(prompts) + count * steps[:-1] - running(starts)
        linear = times.decode.step_seconds_array(count) + times.per_context_token * context
        square = times.per_context_token * count
        prefilled, admitted = np.bincount(begins, prefill, steps.size), np.bincount(begins, minlength=steps.size)
        longer = times.per_prefill_token * prefilled + times.per_start * admitted
        first = np.asarray(longer[:-1], dtype=np.float64)
        seconds = first + linear * length + square * length * (length - 1) / 2
        all_starts = np.full(run.shape, inf)
        all_starts[started] = starts
        return _Clock(all_starts, steps, np.concatenate([[0.0], np.cumsum(seconds)]), first, linear, square)

    def at(self, steps: Floats) -> Floats:
        """Return the seconds at which so many steps are done; of more than there are, the end."""
        last = np.clip(np.searchsorted(self.steps, steps, side="left") - 1, 0, self.linear.size - 1)
        more = np.minimum(steps, self.steps[-1]) - self.steps[last]
        seconds = self.prefill[last] + self.linear[last] * more + self.square[last] * more * (more - 1) / 2
        return np.asarray(self.seconds[last] + np.where(more > 0, seconds, 0.0))

    def completion(self, completed: Floats, run: Floats) -> Floats:
        """Return the seconds at which groups are complete, from the steps of candidates side by side."""
        last = np.where(run > 0, self.starts + run, 0.0).max(axis=1)
        return self.at(np.maximum(last, completed))

    def steps_at(self, seconds: float) -> float:
        """Return the steps that are done at some time, with the one that is being done."""
        seconds *= 1 - TOLERANCE
        last = int(np.searchsorted(self.seconds, seconds)) - 1
        if not 0 <= last < self.linear.size:
            return 0.0 if last < 0 else float(self.steps[-1])
        first, begin = float(self.steps[last]), float(self.seconds[last])
        prefill, linear, square = (float(part[last]) for part in (self.prefill, self.linear, self.square))

        def seconds_after(more: int) -> float:
            return begin + (prefill + linear * more + square * more * (more - 1) / 2)

        # After all steps of this part it is late enough.
        return first + 1 + bisect_left(range(1, int(self.steps[last + 1] - first)), seconds, key=seconds_after)


def _slots(machine: Machine, prompts: Ints, run: Floats) -> int:
    """Return how many sequences an engine runs at once, by its KV blocks on average.

    ``prompts``: tokens of each prompt, shape (G,). ``run``: tokens of each candidate, shape (G, C). The full blocks of
    a prompt are shared by its candidates, as long as any of them runs.
    """
    if machine.kv_blocks is None:
        return machine.max_num_seqs
    rest = prompts % machine.block_size
    own = (run * (rest[:, None] + run / 2)).sum()
    shared = ((prompts - rest) * run.max(axis=1)).sum()
    context = float((own + shared) / run.sum())
    return max(1, min(machine.max_num_seqs, int(machine.kv_blocks * machine.block_size / context)))


def _starts(tokens: Floats, slots: int) -> Floats:
    """Return the step at which each sequence starts: in order, as soon as one of the ``slots`` is free."""
    if tokens.size <= slots:
        return np.zeros_like(tokens)
    ends = tokens[:slots].tolist()
    heapify(ends)
    starts = [0.0] * slots
    for length in tokens[slots:].tolist():
        starts.append(ends[0])
        heapreplace(ends, ends[0] + length)
    return np.asarray(starts)
