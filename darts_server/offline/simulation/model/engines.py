"""The engines of a simulated rollout, and when they do what: continuous batching, for sequences of known lengths.

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

from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats, Ints

BLOCK_SIZE = 16
"""Tokens in a KV block: vLLM's default on GPUs."""
TOLERANCE = 1e-9
"""Relative. Two times that differ by less are the same: they are sums of many steps."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a decode step: ``decode`` seconds by the number of running sequences, and what comes on top.

    ``per_context_token``: seconds for each token in the KV cache of the running sequences, which every step reads.
    ``per_prefill_token``: seconds for each token that is prefilled in the step. ``per_start``: seconds for each
    sequence that is admitted in the step, whatever its prompt, also after a preemption; see `latency.start_seconds`.
    """

    decode: LatencyCurve
    per_context_token: float = 0.0
    per_prefill_token: float = 0.0
    per_start: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Inference engines that run a rollout, and the trainer that trains on it afterwards.

    ``replicas``: number of engines; a group runs on one of them. ``max_num_seqs``: how many sequences an engine runs at
    once. ``kv_blocks``: KV blocks of an engine, of ``block_size`` tokens each; ``None`` for as many as are needed.
    ``training_per_token``: seconds of training for each token of a returned trajectory, its prompt included.
    ``between_rollouts``: seconds of a step that do not depend on the lengths, such as the synchronisation of weights.
    """

    step_time: StepTime
    replicas: int = 1
    max_num_seqs: int = 256
    kv_blocks: int | None = None
    block_size: int = BLOCK_SIZE
    training_per_token: float = 0.0
    between_rollouts: float = 0.0

    def training_seconds(self, tokens: float) -> float:
        """Return the seconds from the end of a rollout to the next, with so many tokens to train on."""
        return self.training_per_token * tokens + self.between_rollouts


def place_groups(candidates: Sequence[int], replicas: int) -> Ints:
    """Return the engine of each group: in order of arrival, the one with the fewest candidates so far."""
    load, placed = [0] * replicas, []
    for count in candidates:
        placed.append(load.index(min(load)))
        load[placed[-1]] += count
    return np.asarray(placed)


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """When an engine does what.

    ``rows``: its groups in the batch, shape (G,). ``starts``, ``ends``: the steps at which each candidate is admitted
    first, and at which it has ended, shape (G, C); infinite if it never runs. ``sequence``, ``begin``, ``end``: of each
    stay in the engine, from an admission until a sequence ends or is preempted, the candidate's number and the steps.

    ``steps`` and ``seconds``: the steps at which sequences start or end, and when these are done. From each to the
    next, ``count`` sequences run, and k steps take ``prefill`` + ``linear`` k + ``square`` k (k - 1) / 2 seconds.
    """

    rows: Ints
    starts: Floats
    ends: Floats
    sequence: Ints
    begin: Floats
    end: Floats
    steps: Floats
    seconds: Floats
    count: Floats
    prefill: Floats
    linear: Floats
    square: Floats

    @staticmethod
    def of(batch: Batch, machine: Machine, rows: Ints, run: Floats) -> "Clock":
        """Schedule the candidates of these groups that generate anything, in order. ``run``: tokens, shape (G, C)."""
        group, index = np.nonzero(run)
        tokens = run[group, index]
        done = np.zeros(tokens.size) if batch.done is None else batch.done[rows][group, index].astype(np.float64)
        prompts = batch.prompt_tokens[rows][group].astype(np.float64)
        rest = prompts % machine.block_size
        is_first = np.diff(group, prepend=-1) > 0
        sequence = np.ravel_multi_index((group, index), run.shape)
        room = inf if machine.kv_blocks is None else float(machine.kv_blocks * machine.block_size)
        # A sequence's last block is half empty on average.
        own = rest + done + (machine.block_size - 1) / 2
        shared = prompts - rest
        if tokens.size <= machine.max_num_seqs and (own + tokens).sum() + shared[is_first].sum() <= room:
            begin, end, context = np.zeros_like(tokens), tokens, prompts + done
            prefilled = done + np.where(is_first, prompts, rest)
        else:
            columns = (column.tolist() for column in (group, own, shared, tokens))
            numbers, begin, end, had, fresh = np.asarray(_admissions(machine.max_num_seqs, room, *columns)).T
            who = numbers.astype(np.int64)
            held = done[who] + had
            sequence, context = sequence[who], prompts[who] + held
            prefilled = held + np.where(fresh > 0, prompts[who], rest[who])

        # What runs, and what a step takes, changes only where a stay begins or ends.
        times = machine.step_time
        steps, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
        begins, stops = np.split(place, 2)

        def running(values: Floats) -> Floats:
            changes = np.bincount(begins, values, steps.size) - np.bincount(stops, values, steps.size)
            return np.cumsum(changes)[:-1]

        count, length = running(np.ones_like(begin)), np.diff(steps)
        linear = times.decode.step_seconds_array(count) + times.per_context_token * (
            running(context) + count * steps[:-1] - running(begin)
        )
        square = times.per_context_token * count
        admitted = np.bincount(begins, minlength=steps.size)
        longer = times.per_prefill_token * np.bincount(begins, prefilled, steps.size) + times.per_start * admitted
        prefill = np.asarray(longer[:-1], dtype=np.float64)
        seconds = np.cumsum(prefill + linear * length + square * length * (length - 1) / 2)
        starts, ends = np.full(run.shape, inf), np.full(run.shape, -inf)
        np.minimum.at(starts.reshape(-1), sequence, begin)
        np.maximum.at(ends.reshape(-1), sequence, end)
        ends[run == 0] = inf
        seconds = np.concatenate([[0.0], seconds])
        return Clock(rows, starts, ends, sequence, begin, end, steps, seconds, count, prefill, linear, square)

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
        done = np.clip(step - self.begin, 0, self.end - self.begin)
        return np.bincount(self.sequence, done, self.starts.size).astype(np.float64).reshape(self.starts.shape)

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


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """The clocks of all engines that run anything. ``placed``: the engine of each group, shape (G,)."""

    clocks: list[Clock]
    placed: Ints

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, machine: Machine, run: Floats) -> "Clocks":
        """Build the clocks of engines that generate ``run`` tokens of each candidate, shape (G, C)."""
        placed = place_groups(plan.candidates, machine.replicas)
        rows = (np.flatnonzero(placed == replica) for replica in range(machine.replicas))
        return Clocks([Clock.of(batch, machine, each, run[each]) for each in rows if run[each].any()], placed)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which each group has run so many steps, shape (G,)."""
        seconds = np.zeros(self.placed.size)
        for clock in self.clocks:
            seconds[clock.rows] = clock.at(clock.starts[:, 0] + steps[clock.rows])
        return seconds

    def steps_at(self, seconds: float) -> Floats:
        """Return how many steps each group has run at some time, with the one that is being done, shape (G,)."""
        steps = np.zeros(self.placed.size)
        for clock in self.clocks:
            steps[clock.rows] = np.maximum(clock.steps_at(seconds) - clock.starts[:, 0], 0.0)
        return steps


def _admissions(
    places: int, room: float, group: list[int], own: list[float], shared: list[float], tokens: list[float]
) -> list[list[float]]:
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
    stays: list[list[float]] = []
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
            running[i] = len(stays)
            ends_at[i] = step + left[i]
            heappush(ends, (ends_at[i], i))
            stays.append([i, step, inf, tokens[i] - left[i], is_first])
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
        stay = stays[running.pop(i)]
        stay[2] = step
        more = step - stay[1]
        left[i] -= more
        own[i] += more
        count -= 1
        resident[group[i]] -= 1
        room += own[i] if resident[group[i]] else own[i] + shared[i]
    return stays
