"""One session of an agent: several requests (turns) with tool time between them. No I/O, no clock.

A session is a candidate of its group, so it has a length: its generated tokens over all turns, or its seconds. The
group's rule acts on the length so far, and may stop the session in any turn.

A session keeps what training needs in rows. A turn whose prompt begins with all tokens of a row extends this row. A
turn with another history, which the harness has rewritten or forked, begins a row of its own. Such a history mostly
begins as an earlier row does, so the rows share blocks of tokens, as prompts do in vLLM's prefix cache.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from darts_server.exceptions import IllegalMove
from darts_server.records import VersionSpans, append_spans, extend_spans
from darts_server.types import SessionEnd

BLOCK_TOKENS = 256
"""Tokens of a block that rows share. Smaller blocks cost more for each token, larger blocks share less of a history."""
TOKEN_BYTES = 4
"""Memory of a token id, and of a log-prob."""
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS + 150
"""Memory of a block: its token ids, the object, and its entry in the dictionary of blocks."""
ROW_BYTES = 700
"""Memory of the objects of a row."""
MAX_TOOL_INTERVALS = 64
"""Intervals of tool time that a session keeps, in 1 KB. The monitor encodes these of 2,048 sessions in 0.2 s."""


@dataclass(slots=True)
class Row:
    """Tokens to train on, in the order of the model's context.

    ``blocks``, ``rest``: the token ids, as full blocks and what follows them. ``parts``: number of tokens that a turn's
    prompt adds and number of tokens that the turn generates, for each turn. ``generated_logprobs``: of each generated
    token. ``spans``: weight versions of the generated tokens.
    """

    blocks: list[bytes] = field(default_factory=list)
    rest: "array[int]" = field(default_factory=lambda: array("i"))
    parts: "array[int]" = field(default_factory=lambda: array("i"))
    generated_logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: VersionSpans = ()

    def __len__(self) -> int:
        return BLOCK_TOKENS * len(self.blocks) + len(self.rest)

    @property
    def num_generated(self) -> int:
        return sum(self.parts[1::2])

    @property
    def token_ids(self) -> "array[int]":
        return array("i", b"".join(self.blocks)) + self.rest

    @property
    def mask(self) -> bytes:
        """1 for each token that the policy has generated, 0 for tokens of prompts and tool results."""
        return b"".join(bytes(added) + b"\1" * generated for added, generated in self._turns())

    @property
    def logprobs(self) -> "array[float]":
        """Log-prob of each token, 0 where the mask is 0."""
        logprobs = array("f")
        start = 0
        for added, generated in self._turns():
            logprobs.frombytes(bytes(TOKEN_BYTES * added))
            logprobs += self.generated_logprobs[start : start + generated]
            start += generated
        return logprobs

    @property
    def size_bytes(self) -> int:
        """Memory of the row without its blocks."""
        numbers = len(self.rest) + len(self.parts) + len(self.generated_logprobs)
        # A list has 8 bytes for each of its blocks.
        return ROW_BYTES + TOKEN_BYTES * numbers + 8 * len(self.blocks)

    def is_prefix_of(self, tokens: "array[int]", blocks: list[bytes]) -> bool:
        """Return whether ``tokens``, whose full blocks are ``blocks``, begin with this row."""
        # The last tokens first: a session that rewrites its history has many rows.
        begin = BLOCK_TOKENS * len(self.blocks)
        return tokens[begin : len(self)] == self.rest and blocks[: len(self.blocks)] == self.blocks

    def cut(self, generated: int) -> None:
        """Keep the tokens up to generated token number ``generated``, and drop all later tokens."""
        if self.num_generated <= generated:
            return
        left = generated
        parts = array("i")
        for added, answered in self._turns():
            if left:
                kept = min(answered, left)
                parts.extend((added, kept))
                left -= kept

        end = sum(parts)
        full = end // BLOCK_TOKENS
        self.rest = self.token_ids[BLOCK_TOKENS * full : end]
        self.parts = parts
        del self.blocks[full:]
        del self.generated_logprobs[generated:]
        self.spans = extend_spans(self.spans, 0, generated)

    def _turns(self) -> Iterator[tuple[int, int]]:
        return zip(self.parts[::2], self.parts[1::2], strict=True)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn that was answered."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: VersionSpans


class Session:
    """The turns of one session, and its end. Times are seconds of the caller's monotonic clock."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.rows: list[Row] = []
        self.row_tokens = 0
        """Tokens of all rows, as they are read."""
        self._blocks: dict[bytes, bytes] = {}
        """The blocks of all rows, by their content."""
        self._row_bytes = 0
        """Memory of the rows without their blocks."""
        self.turns = 0
        """Number of answered turns."""
        self.running_turns = 0
        self.tokens = 0
        """Generated tokens of ended turns, answered or not."""
        self.prompt_tokens = 0
        """Prompt tokens of answered turns."""
        self.tool_seconds = 0.0
        """Seconds between the turns."""
        self._tool_times = array("d")
        """Begin and end of each interval of tool time, one after the other."""
        self.started_at: float | None = None
        """Begin of the first turn."""
        self.used_at: float | None = None
        """Begin or end of the latest turn."""
        self.ended_at: float | None = None
        self.end_reason: SessionEnd | None = None

    @property
    def is_over(self) -> bool:
        return self.end_reason is not None

    @property
    def size_bytes(self) -> int:
        """Memory of the rows and of the intervals of tool time."""
        tool_bytes = self._tool_times.itemsize * len(self._tool_times)
        return self._row_bytes + BLOCK_BYTES * len(self._blocks) + tool_bytes

    @property
    def tool_since(self) -> float | None:
        """Begin of the present tool time, or None while a turn runs, before the first turn and after the end."""
        if self.is_over or self.running_turns:
            return None
        return self.used_at

    def tool_times(self) -> "array[float]":
        """Return begin and end of each of the first intervals of tool time, one after the other.

        The last interval has no end while a tool runs. The time from the last turn to the session's end is an interval
        too, though it is not in `tool_seconds`.
        """
        times = self._tool_times[:]
        if self.tool_since is not None:
            times.append(self.tool_since)
        return times

    def seconds(self, now: float) -> float:
        """Return the seconds since the first turn began, up to the session's end."""
        if self.started_at is None:
            return 0.0
        return (now if self.ended_at is None else self.ended_at) - self.started_at

    def begin_turn(self, now: float) -> None:
        """Count a new request.

        Raises:
            IllegalMove: the session is over.
        """
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

        ``turn``: None if the caller did not get the answer. Such a turn counts in the session's length, because its
        tokens were generated, but it is in no row.
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
        """End the session.

        Raises:
            IllegalMove: the session is over already.
        """
        if self.end_reason is not None:
            raise IllegalMove(f"session {self.index} is {self.end_reason} already, and cannot be {reason}")
        if self.tool_since is not None:
            self._add_tool_interval(self.tool_since, now)
        self.end_reason = reason
        self.ended_at = now

    def cut(self, tokens: int) -> None:
        """Keep the first ``tokens`` generated tokens of all rows together, in the order of the rows."""
        left = tokens
        kept = []
        for row in self.rows:
            if left <= 0:
                break
            row.cut(left)
            left -= row.num_generated
            kept.append(row)
        self._set_rows(kept)

    def drop_rows(self) -> None:
        """Free the memory of a session that is not returned."""
        self._set_rows([])

    def _set_rows(self, rows: list[Row]) -> None:
        self.rows = rows
        self.row_tokens = sum(len(row) for row in rows)
        self._blocks = {block: block for row in rows for block in row.blocks}
        self._row_bytes = sum(row.size_bytes for row in rows)

    def _add_tool_interval(self, begin: float, end: float) -> None:
        if len(self._tool_times) < 2 * MAX_TOOL_INTERVALS:
            self._tool_times.extend((begin, end))

    def _add_to_rows(self, turn: FinishedTurn) -> None:
        prompt = array("i", turn.prompt_token_ids)
        tokens = prompt + array("i", turn.token_ids)
        full = len(tokens) // BLOCK_TOKENS
        packed = tokens.tobytes()
        blocks = []
        for start in range(0, full * BLOCK_TOKENS * TOKEN_BYTES, BLOCK_TOKENS * TOKEN_BYTES):
            block = packed[start : start + BLOCK_TOKENS * TOKEN_BYTES]
            blocks.append(self._blocks.setdefault(block, block))

        # The newest row first: histories mostly grow at their end.
        for row in reversed(self.rows):
            if len(row) <= len(prompt) and row.is_prefix_of(tokens, blocks):
                self._row_bytes -= row.size_bytes
                break
        else:
            row = Row()
            self.rows.append(row)

        added = len(prompt) - len(row)
        self.row_tokens += len(tokens) - len(row)
        row.blocks = blocks
        row.rest = tokens[full * BLOCK_TOKENS :]
        row.parts.extend((added, len(turn.token_ids)))
        row.generated_logprobs.extend(turn.logprobs)
        row.spans = append_spans(row.spans, turn.spans)
        self._row_bytes += row.size_bytes
