"""When the engines of a simulated rollout do what: continuous batching, for sequences whose tokens are known.

An engine is scheduled as vLLM's: first come, first served; a sequence runs as soon as there is a place among
``max_num_seqs`` and room in the KV cache; if the cache is full, the sequence that was admitted last is preempted, goes
back to the head of the queue, and is prefilled again. Candidates of a prompt share its full blocks as long as one of
them runs; the first of them prefills them. A step takes

    decode(b) + per_context_token * (tokens in the KV caches) + per_prefill_token * (prefilled tokens)
    + per_start * (admitted sequences)

and adds b tokens to the cache, so that steps in which the same sequences run are an arithmetic series.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.simulation.batch import Batch, BatchPlan
from darts_server.policy.simulation.groups import Known
from darts_server.policy.simulation.machine import Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TOLERANCE = 1e-9
"""Relative. Two times that differ by less are the same: they are sums of many steps."""


def place_groups(candidates: Sequence[int], replicas: int) -> list[int]:
    """Return the engine of each group: in order of arrival, the one with the fewest candidates so far."""
    load = [0] * replicas
    placed = []
    for count in candidates:
        placed.append(load.index(min(load)))
        load[placed[-1]] += count
    return placed


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """The clocks of all engines, each with the groups that run there."""

    clocks: list[tuple[Ints, "Clock"]]
    placed: Ints
    """The engine of each group, shape (G,)."""

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, machine: Machine, run: Floats) -> "Clocks":
        """Build the clocks of engines that generate ``run`` tokens of each candidate, shape (G, C)."""
        placed = np.asarray(place_groups(plan.candidates, machine.replicas))
        rows = (np.flatnonzero(placed == replica) for replica in range(machine.replicas))
        return Clocks([(each, Clock.of(batch, machine, each, run[each])) for each in rows if run[each].any()], placed)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which each group has run so many steps, shape (G,)."""
        seconds = np.empty(self.placed.size)
        for rows, clock in self.clocks:
            seconds[rows] = clock.at(clock.starts[:, 0] + steps[rows])
        return seconds

    def steps_at(self, seconds: float) -> Floats:
        """Return how many steps each group has run at some time, with the one that is being done, shape (G,)."""
        steps = np.empty(self.placed.size)
        for rows, clock in self.clocks:
            steps[rows] = np.maximum(clock.steps_at(seconds) - clock.starts[:, 0], 0.0)
        return steps

    def known(self, tokens: int, bound: int, seconds: float, group: int) -> Known:
        return Known(tokens, bound, seconds, group, self.steps_at(seconds)[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """When sequences run in an engine: one entry each time that one is admitted, until it ends or is preempted.

    ``sequence``: its number. ``begin``, ``end``: steps. ``context``: its tokens in the KV cache when it is admitted.
    ``prefill``: those of them that are prefilled.
    """

    sequence: Ints
    begin: Floats
    end: Floats
    context: Floats
    prefill: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """When an engine does what. ``starts``, ``ends``: the steps at which each candidate is admitted first, and at which
    it has ended, shape (G, C); infinite if it never runs.

    ``steps`` and ``seconds``: the steps at which sequences start or end, and when these are done. From each to the
    next, ``count`` sequences run, and k steps take ``prefill`` + ``linear`` k + ``square`` k (k - 1) / 2 seconds.
    """

    starts: Floats
    ends: Floats
    stays: Stays
    steps: Floats
    seconds: Floats
    count: Floats
    prefill: Floats
    linear: Floats
    square: Floats

    @staticmethod
    def of(batch: Batch, machine: Machine, rows: Ints, run: Floats) -> "Clock":
        """Build the clock of an engine with these groups of the batch."""
        stays = _schedule(batch, machine, rows, run)
        times = machine.step_time
        steps, place = np.unique(np.concatenate([stays.begin, stays.end]), return_inverse=True)
        begins, stops = np.split(place, 2)

        def running(values: Floats) -> Floats:
            changes = np.bincount(begins, values, steps.size) - np.bincount(stops, values, steps.size)
            return np.cumsum(changes)[:-1]

        count, length = running(np.ones_like(stays.begin)), np.diff(steps)
        context = running(stays.context) + count * steps[:-1] - running(stays.begin)
        linear = times.decode.step_seconds_array(count) + times.per_context_token * context
        square = times.per_context_token * count
        prefilled, admitted = np.bincount(begins, stays.prefill, steps.size), np.bincount(begins, minlength=steps.size)
        longer = times.per_prefill_token * prefilled + times.per_start * admitted
        prefill = np.asarray(longer[:-1], dtype=np.float64)
        seconds = prefill + linear * length + square * length * (length - 1) / 2
        starts, ends = np.full(run.shape, inf), np.full(run.shape, -inf)
        np.minimum.at(starts.reshape(-1), stays.sequence, stays.begin)
        np.maximum.at(ends.reshape(-1), stays.sequence, stays.end)
        ends[run == 0] = inf
        seconds = np.concatenate([[0.0], np.cumsum(seconds)])
        return Clock(starts, ends, stays, steps, seconds, count, prefill, linear, square)

    def at(self, steps: Floats) -> Floats:
        """Return the seconds at which so many steps are done; of more than there are, the end."""
        last = np.clip(np.searchsorted(self.steps, steps, side="left") - 1, 0, self.linear.size - 1)
        more = np.minimum(steps, self.steps[-1]) - self.steps[last]
        seconds = self.prefill[last] + self.linear[last] * more + self.square[last] * more * (more - 1) / 2
        return np.asarray(self.seconds[last] + np.where(more > 0, seconds, 0.0))

    def completion(self, completed: Floats) -> Floats:
        """Return the seconds at which groups are complete, from the steps of candidates side by side, shape (G,)."""
        last = np.where(np.isfinite(self.ends), self.ends, 0.0).max(axis=1)
        return self.at(np.maximum(last, completed))

    def generated_until(self, seconds: float) -> Floats:
        """Return the tokens of each candidate at some time, with those of the step that is being done, shape (G, C)."""
        step = self.steps_at(seconds)
        done = np.clip(step - self.stays.begin, 0, self.stays.end - self.stays.begin)
        return np.bincount(self.stays.sequence, done, self.starts.size).astype(np.float64).reshape(self.starts.shape)

    def busy_until(self, seconds: float) -> float:
        """Return the seconds until some time, summed over sequences, for which they have run."""
        return float((self.count * np.clip(seconds - self.seconds[:-1], 0, np.diff(self.seconds))).sum())

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


def _schedule(batch: Batch, machine: Machine, rows: Ints, run: Floats) -> Stays:
    """Schedule the candidates of these groups that generate anything, in order."""
    group, index = np.nonzero(run)
    tokens = run[group, index]
    done = np.zeros(tokens.size) if batch.done is None else batch.done[rows][group, index].astype(np.float64)
    prompts = batch.prompt_tokens[rows][group].astype(np.float64)
    rest = prompts % machine.block_size
    is_first = np.diff(group, prepend=-1) > 0
    numbers = np.ravel_multi_index((group, index), run.shape)
    room = inf if machine.kv_blocks is None else float(machine.kv_blocks * machine.block_size)
    # A sequence's last block is half empty on average.
    own = rest + done + (machine.block_size - 1) / 2
    shared = prompts - rest
    if tokens.size <= machine.max_num_seqs and (own + tokens).sum() + shared[is_first].sum() <= room:
        prefill = done + np.where(is_first, prompts, rest)
        return Stays(numbers, np.zeros_like(tokens), tokens, prompts + done, prefill)
    who, begin, end, had, fresh = _admissions(
        machine.max_num_seqs, room, group.tolist(), own.tolist(), shared.tolist(), tokens.tolist()
    )
    held = done[who] + had
    prefill = held + np.where(fresh, prompts[who], rest[who])
    return Stays(numbers[who], np.asarray(begin), np.asarray(end), prompts[who] + held, prefill)


def _admissions(
    places: int, room: float, group: list[int], own: list[float], shared: list[float], tokens: list[float]
) -> tuple[list[int], list[float], list[float], list[float], list[bool]]:
    """Return of each stay: who, the steps of begin and end, tokens generated before, and whether the prompt is new.

    Of each sequence, ``own``: tokens in the KV cache besides its full blocks of the prompt, ``shared``, which those of
    its ``group`` share. ``tokens``: that it will generate.
    """
    waiting = deque(range(len(tokens)))
    running: dict[int, int] = {}  # in the order of admission: the entry of its stay
    resident = [0] * (group[-1] + 1)  # sequences of a group that run
    left = list(tokens)
    ends_at = [0.0] * len(tokens)  # the step at which one that runs ends, unless it is preempted
    ends: list[tuple[float, int]] = []
    who: list[int] = []
    begin: list[float] = []
    end: list[float] = []
    had: list[float] = []
    fresh: list[bool] = []
    step, count = 0.0, 0
    while waiting or running:
        while ends and ends_at[ends[0][1]] != ends[0][0]:
            heappop(ends)  # of one that was preempted
        while waiting and count < places and not (ends and ends[0][0] == step):
            i = waiting[0]
            is_first = not resident[group[i]]
            rest = room - own[i] - (shared[i] if is_first else 0.0)
            if rest < 0 and count:  # one runs in any case
                break
            waiting.popleft()
            room = rest
            count += 1
            resident[group[i]] += 1
            running[i] = len(who)
            ends_at[i] = step + left[i]
            heappush(ends, (ends_at[i], i))
            who.append(i)
            begin.append(step)
            end.append(inf)
            had.append(tokens[i] - left[i])
            fresh.append(is_first)
        ahead, i = ends[0]
        full = max(step + room // count + 1, step) if room < inf else inf
        if ahead <= full or count == 1:
            heappop(ends)
        else:  # the KV cache is too small before anything ends
            i = next(reversed(running))
            ahead, ends_at[i] = full, 0.0
            waiting.appendleft(i)
        room -= (ahead - step) * count
        step = ahead
        stay = running.pop(i)
        end[stay] = step
        more = step - begin[stay]
        left[i] -= more
        own[i] += more
        count -= 1
        resident[group[i]] -= 1
        room += own[i] if resident[group[i]] else own[i] + shared[i]
    return who, begin, end, had, fresh
