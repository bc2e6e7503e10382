"""One session of an agent: several requests (turns) with tool time between them. No I/O, no clock.

A session is a candidate of its group. Its length is its generated tokens over all turns, or its seconds. The group's
rule may stop the session in any turn.

A turn whose prompt begins with all tokens of a row extends this row. A turn with another history, which the harness has
rewritten or forked, begins a row of its own. Such a history mostly begins as an earlier row does, so rows share blocks
of tokens, as prompts do in vLLM's prefix cache.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from darts_server.exceptions import IllegalMove
from darts_server.records import VersionSpans, append_spans, extend_spans
from darts_server.types import SessionEnd

BLOCK_TOKENS = 256
"""Smaller blocks cost more for each token, larger blocks share less of a history."""
TOKEN_BYTES = 4
"""Memory of a token id, and of a log-prob."""
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS + 150
"""Memory of a block: its token ids, the object, and its entry in the dictionary of blocks."""
ROW_BYTES = 700
MAX_TOOL_INTERVALS = 64
"""Intervals of tool time that a session keeps, in 1 KB. The monitor encodes these of 2,048 sessions in 0.2 s."""


@dataclass(slots=True)
class Row:
    """Tokens to train on, in the order of the model's context.

    ``full_blocks``, ``last_tokens``: the token ids, in blocks and after them. ``turn_lengths``: for each turn, the
    tokens that its prompt adds, and that it generates. ``spans``: weight versions of the generated tokens.
    """

    full_blocks: list[bytes] = field(default_factory=list)
    last_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    turn_lengths: "array[int]" = field(default_factory=lambda: array("i"))
    generated_logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: VersionSpans = ()

    def __len__(self) -> int:
        return BLOCK_TOKENS * len(self.full_blocks) + len(self.last_tokens)

    @property
    def num_generated(self) -> int:
        return sum(generated for _, generated in self._added_and_generated())

    @property
    def token_ids(self) -> "array[int]":
        return array("i", b"".join(self.full_blocks)) + self.last_tokens

    @property
    def mask(self) -> bytes:
        """1 for each token that the policy has generated, 0 for tokens of prompts and tool results."""
        return b"".join(b"\0" * added + b"\1" * generated for added, generated in self._added_and_generated())

    @property
    def logprobs(self) -> "array[float]":
        """Log-prob of each token, 0 where the mask is 0."""
        logprobs = array("f")
        start = 0
        for added, generated in self._added_and_generated():
            logprobs += array("f", [0.0]) * added
            logprobs += self.generated_logprobs[start : start + generated]
            start += generated
        return logprobs

    @property
    def size_bytes(self) -> int:
        """Memory without the blocks."""
        numbers = len(self.last_tokens) + len(self.turn_lengths) + len(self.generated_logprobs)
        # A list has 8 bytes for each of its blocks.
        return ROW_BYTES + TOKEN_BYTES * numbers + 8 * len(self.full_blocks)

    def is_prefix_of(self, tokens: "array[int]", blocks: list[bytes]) -> bool:
        """Whether ``tokens``, whose full blocks are ``blocks``, begin with this row."""
        # A session that rewrites its history has many rows, and mostly their last tokens already differ.
        num_blocks = len(self.full_blocks)
        ends_alike = tokens[BLOCK_TOKENS * num_blocks : len(self)] == self.last_tokens
        return ends_alike and blocks[:num_blocks] == self.full_blocks

    def cut(self, max_generated: int) -> None:
        """Keep the tokens up to the ``max_generated``-th generated token."""
        if self.num_generated <= max_generated:
            return
        remaining = max_generated
        turn_lengths = array("i")
        for added, generated in self._added_and_generated():
            if not remaining:
                break
            kept = min(generated, remaining)
            turn_lengths.extend((added, kept))
            remaining -= kept

        num_tokens = sum(turn_lengths)
        num_blocks = num_tokens // BLOCK_TOKENS
        self.last_tokens = self.token_ids[BLOCK_TOKENS * num_blocks : num_tokens]
        self.turn_lengths = turn_lengths
        del self.full_blocks[num_blocks:]
        del self.generated_logprobs[max_generated:]
        # The spans have more tokens, so no token gets version 0.
        self.spans = extend_spans(self.spans, 0, max_generated)

    def _added_and_generated(self) -> Iterator[tuple[int, int]]:
        return zip(self.turn_lengths[::2], self.turn_lengths[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: VersionSpans


class Session:
    """The turns of one session. Times are seconds of the caller's monotonic clock."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rows: list[Row] = []
        self.row_tokens = 0
        """Tokens of all rows, without sharing."""
        self._blocks: dict[bytes, bytes] = {}
        """Each block of the rows by itself, so that rows with an equal block share the object."""
        self._row_bytes = 0
        self.turns = 0
        """Number of answered turns."""
        self.running_turns = 0
        self.tokens = 0
        """Generated tokens of ended turns, answered or not."""
        self.prompt_tokens = 0
        """Prompt tokens of answered turns."""
        self.tool_seconds = 0.0
        self._tool_times = array("d")
        """Begin and end of each interval of tool time, one after the other."""
        self.started_at: float | None = None
        self.used_at: float | None = None
        """Begin or end of the latest turn."""
        self.ended_at: float | None = None
        self.end_reason: SessionEnd | None = None

    @property
    def is_over(self) -> bool:
        return self.end_reason is not None

    @property
    def size_bytes(self) -> int:
        tool_bytes = self._tool_times.itemsize * len(self._tool_times)
        return self._row_bytes + BLOCK_BYTES * len(self._blocks) + tool_bytes

    @property
    def tool_since(self) -> float | None:
        """Begin of the present tool time, or None while a turn runs, before the first turn and after the end."""
        if self.is_over or self.running_turns:
            return None
        return self.used_at

    def tool_times(self) -> "array[float]":
        """Return the begin and the end of each of the first `MAX_TOOL_INTERVALS` intervals of tool time.

        The last interval has no end while a tool runs. The time from the last turn to the session's end is an interval.
        """
        times = self._tool_times[:]
        if self.tool_since is not None:
            times.append(self.tool_since)
        return times

    def seconds(self, now: float) -> float:
        """Return the seconds since the first turn began, up to the session's end."""
        if self.started_at is None:
            return 0.0
        end = now if self.ended_at is None else self.ended_at
        return end - self.started_at

    def begin_turn(self, now: float) -> None:
        """Count a new request. Raises `IllegalMove` if the session is over."""
        if self.is_over:
            raise IllegalMove(f"session {self.index} is over")
        if self.started_at is None:
            self.started_at = now
        if self.tool_since is not None:
            self.tool_seconds += now - self.tool_since
            self._add_tool_interval(self.tool_since, now)
        self.running_turns += 1
        self.used_at = now

    def end_turn(self, now: float, tokens: int, turn: FinishedTurn | None = None) -> None:
        """Count a request that has ended with ``tokens`` generated tokens.

        ``turn``: None if the caller did not get the answer. Such a turn counts in the session's length, but it is in no
        row.
        """
        if self.running_turns == 0:
            raise IllegalMove(f"session {self.index} has no running turn")
        self.running_turns -= 1
        self.used_at = now
        self.tokens += tokens
        if turn is not None:
            self.turns += 1
            self.prompt_tokens += len(turn.prompt_token_ids)
            self._add_to_rows(turn)

    def end(self, reason: SessionEnd, now: float) -> None:
        """End the session. Raises `IllegalMove` if it is over already."""
        if self.end_reason is not None:
            raise IllegalMove(f"session {self.index} is {self.end_reason} already, and cannot be {reason}")
        if self.tool_since is not None:
            # Not between turns, so this interval does not count in `tool_seconds`.
            self._add_tool_interval(self.tool_since, now)
        self.end_reason = reason
        self.ended_at = now

    def cut(self, tokens: int) -> None:
        """Keep the first ``tokens`` generated tokens of all rows together, in the order of the rows."""
        remaining = tokens
        kept_rows = []
        for row in self.rows:
            if remaining <= 0:
                break
            row.cut(remaining)
            remaining -= row.num_generated
            kept_rows.append(row)
        self._set_rows(kept_rows)

    def drop_rows(self) -> None:
        """Free the memory of a session that is not returned."""
        self._set_rows([])

    def _set_rows(self, rows: list[Row]) -> None:
        self.rows = rows
        self.row_tokens = sum(len(row) for row in rows)
        self._blocks = {block: block for row in rows for block in row.full_blocks}
        self._row_bytes = sum(row.size_bytes for row in rows)

    def _add_tool_interval(self, begin: float, end: float) -> None:
        if len(self._tool_times) < 2 * MAX_TOOL_INTERVALS:
            self._tool_times.extend((begin, end))

    def _add_to_rows(self, turn: FinishedTurn) -> None:
        prompt = array("i", turn.prompt_token_ids)
        tokens = prompt + array("i", turn.token_ids)
        num_blocks = len(tokens) // BLOCK_TOKENS
        packed = tokens.tobytes()
        block_size = BLOCK_TOKENS * TOKEN_BYTES
        blocks = []
        for start in range(0, num_blocks * block_size, block_size):
            block = packed[start : start + block_size]
            blocks.append(self._blocks.setdefault(block, block))

        # Extend the newest row that the prompt begins with, or begin a row.
        for row in reversed(self.rows):
            if len(row) <= len(prompt) and row.is_prefix_of(tokens, blocks):
                self._row_bytes -= row.size_bytes
                break
        else:
            row = Row()
            self.rows.append(row)

        added = len(prompt) - len(row)
        self.row_tokens += len(tokens) - len(row)
        row.full_blocks = blocks
        row.last_tokens = tokens[num_blocks * BLOCK_TOKENS :]
        row.turn_lengths.extend((added, len(turn.token_ids)))
        row.generated_logprobs.extend(turn.logprobs)
        row.spans = append_spans(row.spans, turn.spans)
        self._row_bytes += row.size_bytes
