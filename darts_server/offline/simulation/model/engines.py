"""Engines of a simulated rollout: continuous batching of sequences whose lengths are known.

An engine schedules as vLLM does. Sequences are admitted in the order of arrival, if there is a place among
``max_num_seqs`` and space in the KV cache. If the cache is full, the sequence that was admitted last is preempted: it
returns to the head of the queue, and is prefilled again. Running candidates of a prompt share its full blocks, which
the first candidate prefills. A step takes

    decode(b) + per_context_token * (tokens in the KV caches) + per_prefill_token * (prefilled tokens)
    + per_start * (admitted sequences)

with b running sequences, and adds b tokens to the cache. So steps of the same sequences are an arithmetic series.

With drafts, an engine's step generates several tokens of each sequence, and counts as several steps here.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from darts_server.drafts.lengths import count_worth
from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats, Ints

BLOCK_SIZE = 16
"""Tokens in a KV block: vLLM's default on GPUs."""
TOLERANCE = 1e-9
"""Relative difference below which two sums of step times are the same."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step."""

    decode: LatencyCurve
    """Seconds by the number of running sequences."""
    per_context_token: float = 0.0
    """Seconds for each token in the KV cache."""
    per_prefill_token: float = 0.0
    """Seconds for each prefilled token."""
    per_start: float = 0.0
    """Seconds for each admitted sequence, see `latency.start_seconds`."""
    drafts: tuple[float, ...] = ()
    """Probability that the first tokens of a draft are accepted, by their number."""

    def per_token(self, count: Floats, context: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of a token of each of ``count`` sequences, and their increase from token to token.

        ``context``: tokens in the KV cache. A drafted token takes as long as a sequence.
        """
        drafted = np.zeros(count.size)
        tokens = np.ones(count.size)
        if self.drafts:
            sizes, place = np.unique(count, return_inverse=True)
            contexts = np.bincount(place, context) / np.bincount(place)
            for index, rows in enumerate(sizes.astype(int).tolist()):
                chances = np.repeat(self.drafts, rows)
                decode = self.decode.step_seconds_array(rows + np.arange(chances.size + 1.0))
                worth = count_worth(rows, chances, decode + self.per_context_token * contexts[index])
                drafted[place == index] = worth
                tokens[place == index] += chances[:worth].sum() / rows
        seconds = self.decode.step_seconds_array(count + drafted) + self.per_context_token * context
        return seconds / tokens, self.per_context_token * count / tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """Engines that run a rollout, and the trainer that trains on it."""

    step_time: StepTime
    replicas: int = 1
    """Engines. A group runs on one engine."""
    max_num_seqs: int = 256
    kv_blocks: int | None = None
    """KV blocks of an engine, or None for no limit."""
    block_size: int = BLOCK_SIZE
    training_per_token: float = 0.0
    """Seconds of training for each token of a returned trajectory and its prompt."""
    between_rollouts: float = 0.0
    """Seconds of a step that do not depend on lengths, such as the synchronisation of weights."""

    def training_seconds(self, tokens: float) -> float:
        return self.training_per_token * tokens + self.between_rollouts


def place_groups(candidates: Sequence[int], replicas: int) -> Ints:
    """Return the engine of each group: in order of arrival, the engine with the fewest candidates so far."""
    load = [0] * replicas
    placed = []
    for count in candidates:
        replica = load.index(min(load))
        load[replica] += count
        placed.append(replica)
    return np.asarray(placed)


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """Schedule of one engine.

    A stay of a sequence lasts from its admission until it ends or is preempted. In a part of the schedule the same
    sequences run: k steps of it take ``prefill`` + ``linear`` k + ``square`` k (k - 1) / 2 seconds.
    """

    rows: Ints
    """The engine's groups, shape (G,)."""
    starts: Floats
    """Step at which each candidate is admitted first, or infinity, shape (G, C)."""
    ends: Floats
    """Step at which each candidate has ended, or infinity, shape (G, C)."""
    sequence: Ints
    """Candidate of each stay, as an index into G * C."""
    begin: Floats
    """First step of each stay."""
    end: Floats
    """Step after each stay."""
    steps: Floats
    """Steps at which parts begin and end."""
    seconds: Floats
    """Seconds at which ``steps`` are done."""
    count: Floats
    """Running sequences of each part."""
    prefill: Floats
    linear: Floats
    square: Floats

    @staticmethod
    def of(batch: Batch, machine: Machine, rows: Ints, run: Floats) -> "Clock":
        """Schedule the groups ``rows`` on an engine. ``run``: tokens that each candidate generates, shape (G, C)."""
        group, index = np.nonzero(run)
        tokens = run[group, index]
        done = batch.generated_before[rows][group, index].astype(np.float64)
        prompts = batch.prompt_tokens[rows][group].astype(np.float64)
        rest = prompts % machine.block_size
        is_first = np.diff(group, prepend=-1) > 0
        sequence = np.ravel_multi_index((group, index), run.shape)
        space = inf
        if machine.kv_blocks is not None:
            space = float(machine.kv_blocks * machine.block_size)
        # A sequence's last block is half empty on average.
        own = rest + done + (machine.block_size - 1) / 2
        shared = prompts - rest

        # `context`: tokens in the KV cache when a stay begins. `prefilled`: new tokens among them.
        if tokens.size <= machine.max_num_seqs and (own + tokens).sum() + shared[is_first].sum() <= space:
            begin = np.zeros_like(tokens)
            end = tokens
            context = prompts + done
            prefilled = done + np.where(is_first, prompts, rest)
        else:
            stays = _schedule_stays(
                machine.max_num_seqs, space, group.tolist(), own.tolist(), shared.tolist(), tokens.tolist()
            )
            numbers, begin, end, generated, is_new = np.asarray(stays).T
            stay = numbers.astype(np.int64)
            kept = done[stay] + generated
            sequence = sequence[stay]
            context = prompts[stay] + kept
            prefilled = kept + np.where(is_new > 0, prompts[stay], rest[stay])

        # The time of a step changes only when a stay begins or ends.
        times = machine.step_time
        steps, place = np.unique(np.concatenate([begin, end]), return_inverse=True)
        begins, stops = np.split(place, 2)

        def running(values: Floats) -> Floats:
            """Sum ``values`` over the running stays of each part."""
            changes = np.bincount(begins, values, steps.size) - np.bincount(stops, values, steps.size)
            return np.cumsum(changes)[:-1]

        count = running(np.ones_like(begin))
        length = np.diff(steps)
        context_tokens = running(context) + count * steps[:-1] - running(begin)
        linear, square = times.per_token(count, context_tokens)
        admitted = np.bincount(begins, minlength=steps.size)
        longer = times.per_prefill_token * np.bincount(begins, prefilled, steps.size) + times.per_start * admitted
        prefill = np.asarray(longer[:-1], dtype=np.float64)
        seconds = np.cumsum(prefill + linear * length + square * length * (length - 1) / 2)
        seconds = np.concatenate([[0.0], seconds])

        starts = np.full(run.shape, inf)
        ends = np.full(run.shape, -inf)
        np.minimum.at(starts.reshape(-1), sequence, begin)
        np.maximum.at(ends.reshape(-1), sequence, end)
        ends[run == 0] = inf
        return Clock(rows, starts, ends, sequence, begin, end, steps, seconds, count, prefill, linear, square)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which ``steps`` steps are done, at most the end."""
        part = np.clip(np.searchsorted(self.steps, steps, side="left") - 1, 0, self.linear.size - 1)
        more = np.minimum(steps, self.steps[-1]) - self.steps[part]
        seconds = self.prefill[part] + self.linear[part] * more + self.square[part] * more * (more - 1) / 2
        return np.asarray(self.seconds[part] + np.where(more > 0, seconds, 0.0))

    def completion(self, completed: Floats) -> Floats:
        """Return the seconds at which groups' candidates have ended and ``completed`` steps are done, shape (G,)."""
        last = np.where(np.isfinite(self.ends), self.ends, 0.0).max(axis=1)
        return self.seconds_at(np.maximum(last, completed))

    def generated_until(self, seconds: float) -> Floats:
        """Return the tokens of each candidate, with those of the current step, shape (G, C)."""
        step = self.steps_at(seconds)
        done = np.clip(step - self.begin, 0, self.end - self.begin)
        return np.bincount(self.sequence, done, self.starts.size).astype(np.float64).reshape(self.starts.shape)

    def busy_until(self, seconds: float) -> float:
        """Return the sum of the seconds that each sequence has run until ``seconds``."""
        return float((self.count * np.clip(seconds - self.seconds[:-1], 0, np.diff(self.seconds))).sum())

    def steps_at(self, seconds: float) -> float:
        """Return the number of steps that have begun."""
        seconds *= 1 - TOLERANCE
        part = int(np.searchsorted(self.seconds, seconds)) - 1
        if part < 0:
            return 0.0
        if part >= self.linear.size:
            return float(self.steps[-1])
        first = float(self.steps[part])
        begin = float(self.seconds[part])
        prefill = float(self.prefill[part])
        linear = float(self.linear[part])
        square = float(self.square[part])

        def seconds_after(more: int) -> float:
            return begin + (prefill + linear * more + square * more * (more - 1) / 2)

        # The part's last step needs no test: the part does not end before `seconds`.
        return first + 1 + bisect_left(range(1, int(self.steps[part + 1] - first)), seconds, key=seconds_after)


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """Clocks of all engines that run a sequence."""

    clocks: list[Clock]
    placed: Ints
    """Engine of each group, shape (G,)."""

    @staticmethod
    def of(batch: Batch, plan: BatchPlan, machine: Machine, run: Floats) -> "Clocks":
        """Schedule all groups on their engines. ``run``: tokens that each candidate generates, shape (G, C)."""
        placed = place_groups(plan.candidates, machine.replicas)
        clocks = []
        for replica in range(machine.replicas):
            rows = np.flatnonzero(placed == replica)
            if run[rows].any():
                clocks.append(Clock.of(batch, machine, rows, run[rows]))
        return Clocks(clocks, placed)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which each group has run its number of ``steps``, shape (G,)."""
        seconds = np.zeros(self.placed.size)
        for clock in self.clocks:
            seconds[clock.rows] = clock.seconds_at(clock.starts[:, 0] + steps[clock.rows])
        return seconds

    def steps_at(self, seconds: float) -> Floats:
        """Return the number of steps that each group has begun, shape (G,)."""
        steps = np.zeros(self.placed.size)
        for clock in self.clocks:
            steps[clock.rows] = np.maximum(clock.steps_at(seconds) - clock.starts[:, 0], 0.0)
        return steps


def _schedule_stays(
    places: int,
    space: float,
    group: list[int],
    own: list[float],
    shared: list[float],
    tokens: list[float],
) -> list[list[float]]:
    """Schedule sequences, and return a row for each stay.

    A row has the sequence, the steps of begin and end, the tokens that were generated before, and whether it is the
    only running sequence of its group.

    Args:
        places: number of sequences that run at once.
        space: tokens that fit into the KV cache.
        group: group of each sequence, ascending.
        own: tokens in the KV cache that each sequence does not share.
        shared: tokens in the KV cache that the group of each sequence shares.
        tokens: tokens that each sequence will generate.
    """
    waiting = deque(range(len(tokens)))
    # Row of the stay of each running sequence, in the order of admission.
    running: dict[int, int] = {}
    # Number of running sequences of each group.
    resident = [0] * (group[-1] + 1)
    left = list(tokens)
    # Step at which each running sequence ends, unless it is preempted.
    ends_at = [0.0] * len(tokens)
    ends: list[tuple[float, int]] = []
    stays: list[list[float]] = []
    step = 0.0
    count = 0
    while waiting or running:
        # Entries of preempted sequences stay in the heap.
        while ends and ends_at[ends[0][1]] != ends[0][0]:
            heappop(ends)

        while waiting and count < places and not (ends and ends[0][0] == step):
            i = waiting[0]
            is_first = not resident[group[i]]
            rest = space - own[i] - (shared[i] if is_first else 0.0)
            # A sequence that is too large for the cache runs alone.
            if rest < 0 and count:
                break
            waiting.popleft()
            space = rest
            count += 1
            resident[group[i]] += 1
            running[i] = len(stays)
            ends_at[i] = step + left[i]
            heappush(ends, (ends_at[i], i))
            stays.append([i, step, inf, tokens[i] - left[i], is_first])

        next_step, i = ends[0]
        full = inf
        if space < inf:
            full = max(step + space // count + 1, step)
        if next_step <= full or count == 1:
            heappop(ends)
        else:
            # The KV cache is full before a sequence ends.
            i = next(reversed(running))
            next_step = full
            ends_at[i] = 0.0
            waiting.appendleft(i)
        space -= (next_step - step) * count
        step = next_step

        stay = stays[running.pop(i)]
        stay[2] = step
        more = step - stay[1]
        left[i] -= more
        own[i] += more
        count -= 1
        resident[group[i]] -= 1
        space += own[i] if resident[group[i]] else own[i] + shared[i]
    return stays
