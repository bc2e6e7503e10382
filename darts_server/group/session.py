"""One session of an agent: several requests (turns) with tool time between them. No I/O, no clock.

A session is a candidate of its group, so it has a length: its generated tokens over all turns, or its seconds. The
group's rule acts on the length so far, and may stop the session in any turn.

A session keeps what training needs in rows. A turn whose prompt begins with all tokens of a row extends this row. A
turn with another history, which the harness has rewritten or forked, begins a row of its own.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from darts_server.exceptions import IllegalMove
from darts_server.records import VersionSpans, extend_spans, join_spans
from darts_server.types import SessionEnd

BYTES_PER_TOKEN = 9
"""Memory of a token of a row: its id, its log-prob and its mask."""
LAST_TOKENS = 64
"""Tokens at the end of a row that are compared first."""
NO_LOGPROB = 0.0
"""Log-prob of a token that the policy did not generate."""
MAX_TOOL_INTERVALS = 64
"""Intervals of tool time that a session keeps, in 1 KB. The monitor encodes these of 2,048 sessions in 0.2 s."""


@dataclass(slots=True)
class Row:
    """Tokens to train on, in the order of the model's context.

    ``mask``: 1 for tokens that the policy has generated, 0 for prompts and tool results. ``logprobs``: `NO_LOGPROB`
    where the mask is 0. ``spans``: weight versions of the generated tokens.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: VersionSpans = ()

    @property
    def num_generated(self) -> int:
        return sum(self.mask)

    def is_prefix_of(self, prompt: "array[int]") -> bool:
        length = len(self.token_ids)
        # The last tokens first: a session that rewrites its history has many rows, and to compare a row copies it.
        last = max(0, length - LAST_TOKENS)
        if length > len(prompt) or prompt[last:length] != self.token_ids[last:]:
            return False
        return prompt[:last] == self.token_ids[:last]

    def extend(self, prompt: "array[int]", turn: "FinishedTurn") -> None:
        """Add what a prompt has beyond this row, and then the answer."""
        more = len(prompt) - len(self.token_ids)
        answer = len(turn.token_ids)
        self.token_ids += prompt[len(self.token_ids) :]
        self.token_ids.extend(turn.token_ids)
        self.mask += bytes(more) + b"\1" * answer
        self.logprobs.extend([NO_LOGPROB] * more)
        self.logprobs.extend(turn.logprobs)
        self.spans = join_spans(self.spans, turn.spans)

    def cut(self, generated: int) -> None:
        """Keep the tokens up to generated token number ``generated``, and drop all later tokens."""
        if self.num_generated <= generated:
            return
        end = 0
        for _ in range(generated):
            end = self.mask.index(1, end) + 1
        del self.token_ids[end:]
        del self.mask[end:]
        del self.logprobs[end:]
        self.spans = extend_spans(self.spans, 0, generated)


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
        tokens = sum(len(row.token_ids) for row in self.rows)
        return BYTES_PER_TOKEN * tokens + self._tool_times.itemsize * len(self._tool_times)

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
        self.rows = kept

    def _add_tool_interval(self, begin: float, end: float) -> None:
        if len(self._tool_times) < 2 * MAX_TOOL_INTERVALS:
            self._tool_times.extend((begin, end))

    def _add_to_rows(self, turn: FinishedTurn) -> None:
        prompt = array("i", turn.prompt_token_ids)
        # The newest row first: histories mostly grow at their end.
        for row in reversed(self.rows):
            if row.is_prefix_of(prompt):
                row.extend(prompt, turn)
                return
        row = Row()
        row.extend(prompt, turn)
        self.rows.append(row)
