"""One inference engine with continuous batching, on a virtual clock.

It is scheduled as vLLM's: first come, first served; a sequence runs as soon as there is a place among
``max_num_seqs`` and a KV block for each of its tokens; if the blocks run out, the sequence that was admitted last is
preempted, goes back to the head of the queue, and is prefilled again. Candidates of a prompt share its full blocks as
long as one of them runs; the first of them prefills them.

Time advances over any number of steps at once, as long as the same sequences run: one step takes

    decode(b) + per_context_token * (tokens in their KV caches) + per_prefill_token * (prefilled tokens)
    + per_start * (admitted sequences),

and each step adds b tokens to the cache, so that k of them are an arithmetic series.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from darts_server.policy.simulation.machine import Machine

TOLERANCE = 1e-9
"""Relative. Two times that differ by less are the same: they are sums of many steps."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One candidate in an engine.

    ``prompt``: its tokens. ``end``: tokens at which the candidate ends. ``is_valid``: whether at a stop token.
    ``tokens``: generated so far, while it does not run. ``offset``: the engine's step less its tokens, while it runs.
    ``started_at``: seconds at which it ran first.
    """

    group: int
    index: int
    prompt: int
    end: int
    is_valid: bool = True
    tokens: int = 0
    offset: int | None = None
    started_at: float = inf
    preemptions: int = 0


class Replica:
    """An engine. The caller advances it to steps of its choice, and reads `next_limit` to know how far it may go."""

    def __init__(self, machine: Machine) -> None:
        self.now = 0.0
        self.step = 0
        self.running: dict[Sequence, None] = {}
        """In the order of admission."""
        self.busy = 0.0
        """Seconds, summed over sequences, for which they have run."""
        self.peak = 0
        """The most sequences that have run at once."""
        self._machine = machine
        self._waiting: deque[Sequence] = deque()
        self._context = 0
        self._prefill = 0  # tokens, in the next step
        self._admitted = 0  # sequences, for the next step
        self._resident: dict[int, int] = {}  # group -> its running sequences
        self._blocks = 0  # that the next step needs
        self._phases = [0] * machine.block_size  # running sequences that need a new block before such a step
        self._decode: dict[int, float] = {}

    # --- time ---------------------------------------------------------------

    def seconds(self, steps: int) -> float:
        """Return the seconds of the next ``steps`` steps, if nothing changes meanwhile."""
        running = len(self.running)
        if running not in self._decode:
            self._decode[running] = self._machine.step_time.decode.step_seconds(running)
        times = self._machine.step_time
        context = steps * self._context + running * (steps * (steps - 1) // 2)
        first = times.per_prefill_token * self._prefill + times.per_start * self._admitted if steps else 0.0
        return steps * self._decode[running] + times.per_context_token * context + first

    def steps_until(self, time: float) -> int:
        """Return after how many steps it will be ``time``, rounded up."""
        left = time - self.now - TOLERANCE * time
        if left <= 0:
            return 0
        high = 1
        while self.seconds(high) < left:
            high *= 2
        low = high // 2  # seconds(low) < left <= seconds(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) < left else (low, middle)
        return high

    def advance(self, step: int) -> None:
        """Run until ``step`` is done; not beyond `next_limit`."""
        steps = step - self.step
        if steps <= 0:
            return
        seconds, running = self.seconds(steps), len(self.running)
        self.now += seconds
        self.busy += seconds * running
        self._context += steps * running
        self._prefill = self._admitted = 0
        if self._machine.kv_blocks is not None:
            self._blocks += self._new_blocks(steps)
        self.step = step

    # --- blocks -------------------------------------------------------------

    @property
    def next_limit(self) -> float:
        """The step at which the KV blocks run out, if nothing changes before."""
        if self._machine.kv_blocks is None or not self.running:
            return inf
        free, size, running = self._machine.kv_blocks - self._blocks, self._machine.block_size, len(self.running)
        steps = free // running * size  # each sequence fills as many whole blocks
        free -= free // running * running
        while (free := free - self._phases[(self.step + steps + 1) % size]) >= 0:
            steps += 1
        return self.step + steps + 1

    def _new_blocks(self, steps: int) -> int:
        size = self._machine.block_size
        rounds, rest = divmod(steps, size)
        return rounds * len(self.running) + sum(self._phases[(self.step + 1 + i) % size] for i in range(rest))

    def _own_blocks(self, sequence: Sequence, tokens: int) -> int:
        size = self._machine.block_size
        return -(-(sequence.prompt + tokens) // size) - sequence.prompt // size

    # --- sequences ----------------------------------------------------------

    def tokens(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence has generated."""
        return sequence.tokens if sequence.offset is None else self.step - sequence.offset

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue.

        Raises:
            ValueError: all KV blocks together are too few for it.
        """
        blocks = self._machine.kv_blocks
        if blocks is not None and -(-(sequence.prompt + sequence.end) // self._machine.block_size) > blocks:
            raise ValueError(f"{blocks} KV blocks are too few for {sequence.prompt} + {sequence.end} tokens")
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or was stopped."""
        if sequence.offset is None:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)

    def schedule(self) -> list[Sequence]:
        """Preempt what has no room for the next step, or admit what has; return the sequences that changed."""
        changed = []
        blocks = self._machine.kv_blocks
        while blocks is not None and self._blocks > blocks:
            last = next(reversed(self.running))
            self._leave(last)
            last.preemptions += 1
            self._waiting.appendleft(last)
            changed.append(last)
        while self._waiting and len(self.running) < self._machine.max_num_seqs and self._fits(self._waiting[0]):
            changed.append(self._waiting.popleft())
            self._admit(changed[-1])
        self.peak = max(self.peak, len(self.running))
        return changed

    def _fits(self, sequence: Sequence) -> bool:
        return self._machine.kv_blocks is None or self._blocks + self._needed(sequence) <= self._machine.kv_blocks

    def _needed(self, sequence: Sequence) -> int:
        shared = 0 if sequence.group in self._resident else sequence.prompt // self._machine.block_size
        return shared + self._own_blocks(sequence, sequence.tokens)

    def _admit(self, sequence: Sequence) -> None:
        size = self._machine.block_size
        is_first = sequence.group not in self._resident
        self._prefill += sequence.tokens + (sequence.prompt if is_first else sequence.prompt % size)
        self._admitted += 1
        self._blocks += self._needed(sequence)
        self._resident[sequence.group] = self._resident.get(sequence.group, 0) + 1
        self._context += sequence.prompt + sequence.tokens
        sequence.offset = self.step - sequence.tokens
        sequence.started_at = min(sequence.started_at, self.now)
        self._phases[(sequence.offset - sequence.prompt + 1) % size] += 1
        self.running[sequence] = None

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.offset is not None
        size = self._machine.block_size
        tokens = self.step - sequence.offset
        self._phases[(sequence.offset - sequence.prompt + 1) % size] -= 1
        self._context -= sequence.prompt + tokens
        self._blocks -= self._own_blocks(sequence, tokens)
        self._resident[sequence.group] -= 1
        if not self._resident[sequence.group]:
            del self._resident[sequence.group]
            self._blocks -= sequence.prompt // size
        del self.running[sequence]
        sequence.tokens, sequence.offset = tokens, None
