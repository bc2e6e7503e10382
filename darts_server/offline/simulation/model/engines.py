"""Engines of a simulated rollout: continuous batching of sequences whose lengths are known.

As in vLLM, sequences are admitted in the order of arrival, if there is a place among ``max_num_seqs`` and space in the
KV cache. If the cache is full, the sequence that was admitted last returns to the head of the queue, and is prefilled
again. Running candidates of a prompt share its full blocks, which the first candidate prefills. A step takes

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

from darts_server.drafts.lengths import count_worthwhile
from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.batch import Batch, BatchPlan, Floats, Ints

BLOCK_SIZE = 16
"""Tokens in a KV block: vLLM's default on GPUs."""
TOLERANCE = 1e-9
"""Relative difference below which two sums of step times are the same."""


@dataclass(frozen=True, slots=True)
class StepTime:
    decode: LatencyCurve
    """Seconds by the number of running sequences."""
    per_context_token: float = 0.0
    per_prefill_token: float = 0.0
    per_start: float = 0.0
    """Seconds for each admitted sequence, see `latency.start_seconds`."""
    drafts: tuple[float, ...] = ()
    """Probability that the first tokens of a draft are accepted, by their number."""

    def seconds_per_token(self, num_running: Floats, context_tokens: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of a token of each running sequence, and their increase from token to token.

        ``context_tokens``: tokens in the KV cache.
        """
        num_drafted = np.zeros(num_running.size)
        tokens_per_step = np.ones(num_running.size)
        if self.drafts:
            batch_sizes, place = np.unique(num_running, return_inverse=True)
            mean_contexts = np.bincount(place, context_tokens) / np.bincount(place)
            for index, batch_size in enumerate(batch_sizes.astype(int).tolist()):
                # Every sequence may draft, so the step verifies up to this number of tokens.
                acceptances = np.repeat(self.drafts, batch_size)
                # A drafted token takes as long as a sequence.
                decode_seconds = self.decode.step_seconds_array(batch_size + np.arange(acceptances.size + 1.0))
                step_seconds = decode_seconds + self.per_context_token * mean_contexts[index]
                worth = count_worthwhile(batch_size, acceptances, step_seconds)
                num_drafted[place == index] = worth
                tokens_per_step[place == index] += acceptances[:worth].sum() / batch_size
        step_seconds = self.decode.step_seconds_array(num_running + num_drafted)
        step_seconds = step_seconds + self.per_context_token * context_tokens
        # Each token makes the contexts of all running sequences longer.
        return step_seconds / tokens_per_step, self.per_context_token * num_running / tokens_per_step


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
    candidates_of_engine = [0] * replicas
    engine_of_group = []
    for count in candidates:
        engine = candidates_of_engine.index(min(candidates_of_engine))
        candidates_of_engine[engine] += count
        engine_of_group.append(engine)
    return np.asarray(engine_of_group)


@dataclass(frozen=True, slots=True, eq=False)
class Clock:
    """Schedule of one engine.

    In a part of the schedule the same sequences run. Its k-th step takes ``first_step_seconds`` + (k - 1)
    ``step_growth`` seconds.
    """

    rows: Ints
    """The engine's groups, shape (G,)."""
    start_steps: Floats
    """Step at which each candidate is admitted first, or infinity, shape (G, C)."""
    end_steps: Floats
    """Step at which each candidate has ended, or infinity, shape (G, C)."""
    candidate_of_stay: Ints
    """Candidate of each stay, as an index into G * C."""
    stay_begins: Floats
    stay_ends: Floats
    """Step after each stay."""
    part_steps: Floats
    """Steps at which parts begin, and the step at which the last part ends."""
    part_seconds: Floats
    """Seconds at which ``part_steps`` are done."""
    num_running: Floats
    prefill: Floats
    """Seconds of prefills and starts in each part."""
    first_step_seconds: Floats
    step_growth: Floats

    @staticmethod
    def of(
        batch: Batch,
        machine: Machine,
        rows: Ints,
        run_tokens: Floats,
    ) -> "Clock":
        """``run_tokens``: tokens that each candidate of the groups ``rows`` generates, shape (G, C)."""
        group, index = np.nonzero(run_tokens)
        tokens = run_tokens[group, index]
        carried = batch.generated_before[rows][group, index].astype(np.float64)
        prompts = batch.prompt_tokens[rows][group].astype(np.float64)
        candidate_of_stay = np.ravel_multi_index((group, index), run_tokens.shape)
        is_first_of_group = np.diff(group, prepend=-1) > 0
        cache_tokens = inf
        if machine.kv_blocks is not None:
            cache_tokens = float(machine.kv_blocks * machine.block_size)
        # The full blocks of a prompt are shared. A sequence's last block is half empty on average.
        unshared_prompt = prompts % machine.block_size
        own = unshared_prompt + carried + (machine.block_size - 1) / 2
        shared = prompts - unshared_prompt

        # A stay lasts from the admission of a sequence until it ends or is preempted. `context`: tokens in the KV cache
        # when a stay begins. `prefilled`: new tokens among them.
        most_tokens = (own + tokens).sum() + shared[is_first_of_group].sum()
        if tokens.size <= machine.max_num_seqs and most_tokens <= cache_tokens:
            # All sequences run from the first step on.
            stay_begins = np.zeros_like(tokens)
            stay_ends = tokens
            context = prompts + carried
            prefilled = carried + np.where(is_first_of_group, prompts, unshared_prompt)
        else:
            stays = _schedule_stays(
                machine.max_num_seqs, cache_tokens, group.tolist(), own.tolist(), shared.tolist(), tokens.tolist()
            )
            sequence_numbers, stay_begins, stay_ends, generated_before, is_alone = np.asarray(stays).T
            sequence = sequence_numbers.astype(np.int64)
            kept = carried[sequence] + generated_before
            candidate_of_stay = candidate_of_stay[sequence]
            context = prompts[sequence] + kept
            prefilled = kept + np.where(is_alone > 0, prompts[sequence], unshared_prompt[sequence])

        # A part lies between two steps in which a stay begins or ends.
        part_steps, part = np.unique(np.concatenate([stay_begins, stay_ends]), return_inverse=True)
        begin_parts, end_parts = np.split(part, 2)

        def sum_running(values: Floats) -> Floats:
            begun = np.bincount(begin_parts, values, part_steps.size)
            ended = np.bincount(end_parts, values, part_steps.size)
            return np.cumsum(begun - ended)[:-1]

        times = machine.step_time
        num_running = sum_running(np.ones_like(stay_begins))
        # Each running stay has its first context, and a token for each step since its begin.
        context_tokens = sum_running(context) + num_running * part_steps[:-1] - sum_running(stay_begins)
        first_step_seconds, step_growth = times.seconds_per_token(num_running, context_tokens)
        num_admitted = np.bincount(begin_parts, minlength=part_steps.size)
        prefilled_tokens = np.bincount(begin_parts, prefilled, part_steps.size)
        prefill = times.per_prefill_token * prefilled_tokens + times.per_start * num_admitted
        prefill = np.asarray(prefill[:-1], dtype=np.float64)
        steps = np.diff(part_steps)
        part_seconds = np.cumsum(prefill + first_step_seconds * steps + step_growth * steps * (steps - 1) / 2)
        part_seconds = np.concatenate([[0.0], part_seconds])

        # A preempted candidate has several stays.
        start_steps = np.full(run_tokens.shape, inf)
        end_steps = np.full(run_tokens.shape, -inf)
        np.minimum.at(start_steps.reshape(-1), candidate_of_stay, stay_begins)
        np.maximum.at(end_steps.reshape(-1), candidate_of_stay, stay_ends)
        end_steps[run_tokens == 0] = inf
        return Clock(
            rows,
            start_steps,
            end_steps,
            candidate_of_stay,
            stay_begins,
            stay_ends,
            part_steps,
            part_seconds,
            num_running,
            prefill,
            first_step_seconds,
            step_growth,
        )

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which ``steps`` are done, at most the end."""
        part = np.clip(np.searchsorted(self.part_steps, steps, side="left") - 1, 0, self.first_step_seconds.size - 1)
        steps_in_part = np.minimum(steps, self.part_steps[-1]) - self.part_steps[part]
        seconds = self.prefill[part] + self.first_step_seconds[part] * steps_in_part
        seconds = seconds + self.step_growth[part] * steps_in_part * (steps_in_part - 1) / 2
        return np.asarray(self.part_seconds[part] + np.where(steps_in_part > 0, seconds, 0.0))

    def completion_seconds(self, completion_steps: Floats) -> Floats:
        """Return the seconds at which each group's candidates have ended and its steps are done, shape (G,)."""
        last_end = np.where(np.isfinite(self.end_steps), self.end_steps, 0.0).max(axis=1)
        return self.seconds_at(np.maximum(last_end, completion_steps))

    @property
    def group_start_steps(self) -> Floats:
        """Step of each group's first start, shape (G,). Candidates that ended in an earlier rollout start never."""
        starts: Floats = self.start_steps.min(axis=1)
        return starts

    def generated_until(self, seconds: float) -> Floats:
        """Return the tokens of each candidate, with those of the current step, shape (G, C)."""
        steps = self.steps_begun_at(seconds)
        tokens_of_stays = np.clip(steps - self.stay_begins, 0, self.stay_ends - self.stay_begins)
        tokens = np.bincount(self.candidate_of_stay, tokens_of_stays, self.start_steps.size)
        return tokens.astype(np.float64).reshape(self.start_steps.shape)

    def busy_until(self, seconds: float) -> float:
        """Return the summed seconds that sequences have run until ``seconds``."""
        seconds_of_parts = np.clip(seconds - self.part_seconds[:-1], 0, np.diff(self.part_seconds))
        return float((self.num_running * seconds_of_parts).sum())

    def steps_begun_at(self, seconds: float) -> float:
        seconds *= 1 - TOLERANCE
        part = int(np.searchsorted(self.part_seconds, seconds)) - 1
        if part < 0:
            return 0.0
        if part >= self.first_step_seconds.size:
            return float(self.part_steps[-1])
        # Floats of Python, because the search computes with single numbers.
        first_step = float(self.part_steps[part])
        begin = float(self.part_seconds[part])
        prefill = float(self.prefill[part])
        first_step_seconds = float(self.first_step_seconds[part])
        step_growth = float(self.step_growth[part])

        def seconds_after(steps: int) -> float:
            return begin + (prefill + first_step_seconds * steps + step_growth * steps * (steps - 1) / 2)

        # The part's last step needs no test: the part does not end before `seconds`.
        tested_steps = range(1, int(self.part_steps[part + 1] - first_step))
        return first_step + 1 + bisect_left(tested_steps, seconds, key=seconds_after)


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """Clocks of all engines that run a sequence."""

    clocks: list[Clock]
    engine_of_group: Ints
    """Shape (G,)."""

    @staticmethod
    def of(
        batch: Batch,
        plan: BatchPlan,
        machine: Machine,
        run_tokens: Floats,
    ) -> "Clocks":
        """``run_tokens``: see `Clock.of`."""
        engine_of_group = place_groups(plan.candidates, machine.replicas)
        clocks = []
        for engine in range(machine.replicas):
            rows = np.flatnonzero(engine_of_group == engine)
            if run_tokens[rows].any():
                clocks.append(Clock.of(batch, machine, rows, run_tokens[rows]))
        return Clocks(clocks, engine_of_group)

    def seconds_at(self, steps: Floats) -> Floats:
        """Return the seconds at which each group has run its ``steps``, shape (G,)."""
        seconds = np.zeros(self.engine_of_group.size)
        for clock in self.clocks:
            seconds[clock.rows] = clock.seconds_at(clock.group_start_steps + steps[clock.rows])
        return seconds

    def steps_begun_at(self, seconds: float) -> Floats:
        """Return the steps that each group has begun, shape (G,)."""
        steps = np.zeros(self.engine_of_group.size)
        for clock in self.clocks:
            steps[clock.rows] = np.maximum(clock.steps_begun_at(seconds) - clock.group_start_steps, 0.0)
        return steps


def _schedule_stays(
    max_num_seqs: int,
    free_tokens: float,
    group: list[int],
    own: list[float],
    shared: list[float],
    tokens: list[float],
) -> list[list[float]]:
    """Return a row for each stay. Groups ascend. ``own`` and ``shared`` are tokens in the KV cache."""
    waiting = deque(range(len(tokens)))
    # Row of the stay of each running sequence, in the order of admission.
    running: dict[int, int] = {}
    running_of_group = [0] * (group[-1] + 1)
    missing_tokens = list(tokens)
    # Step at which each running sequence ends, unless it is preempted.
    end_steps = [0.0] * len(tokens)
    end_heap: list[tuple[float, int]] = []
    # Rows: sequence, step of the begin, step of the end, tokens generated before, and whether no other sequence of the
    # group runs.
    stays: list[list[float]] = []
    step = 0.0
    while waiting or running:
        # Entries of preempted sequences stay in the heap.
        while end_heap and end_steps[end_heap[0][1]] != end_heap[0][0]:
            heappop(end_heap)

        # Admit sequences, after all that end in this step have left.
        while waiting and len(running) < max_num_seqs and not (end_heap and end_heap[0][0] == step):
            sequence = waiting[0]
            is_alone = not running_of_group[group[sequence]]
            free_after = free_tokens - own[sequence] - (shared[sequence] if is_alone else 0.0)
            # A sequence that is too large for the cache runs without others.
            if free_after < 0 and running:
                break
            waiting.popleft()
            free_tokens = free_after
            running_of_group[group[sequence]] += 1
            running[sequence] = len(stays)
            end_steps[sequence] = step + missing_tokens[sequence]
            heappush(end_heap, (end_steps[sequence], sequence))
            stays.append([sequence, step, inf, tokens[sequence] - missing_tokens[sequence], is_alone])

        # Run until a sequence ends, or the cache is full.
        next_step, sequence = end_heap[0]
        # The first step for which the KV cache is too small: this step, if the cache is too small already.
        full_step = inf
        if free_tokens < inf:
            full_step = max(step + free_tokens // len(running) + 1, step)
        if next_step <= full_step or len(running) == 1:
            heappop(end_heap)
        else:
            # Preempt the sequence that was admitted last.
            sequence = next(reversed(running))
            next_step = full_step
            end_steps[sequence] = 0.0
            waiting.appendleft(sequence)
        free_tokens -= (next_step - step) * len(running)
        step = next_step

        stay = stays[running.pop(sequence)]
        stay[2] = step
        generated = step - stay[1]
        missing_tokens[sequence] -= generated
        own[sequence] += generated
        running_of_group[group[sequence]] -= 1
        free_tokens += own[sequence]
        if not running_of_group[group[sequence]]:
            free_tokens += shared[sequence]
    return stays
