"""What the candidates of a stopped group had generated, for another run that goes on with it."""

from array import array
from dataclasses import dataclass, field
from typing import Generic

from darts_server.engine.port import NOTHING, CandidateResult, OutputT, TokenSlice
from darts_server.records import VersionSpans
from darts_server.types import FinishReason


@dataclass(frozen=True, slots=True)
class SavedEnd:
    """How a candidate has finished, as it is saved: without the engine's own output."""

    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class CarriedCandidate(Generic[OutputT]):
    """A candidate of a stopped group.

    ``prefix``: what it had generated. ``version_spans``: of these tokens. ``result``: ``None`` unless it has finished
    on this engine; ``saved_end``: unless it has on an earlier one.
    """

    prefix: TokenSlice = field(default=NOTHING)
    version_spans: VersionSpans = ()
    result: CandidateResult[OutputT] | None = None
    saved_end: SavedEnd | None = None

    @property
    def tokens(self) -> int:
        return len(self.prefix.token_ids)

    @property
    def last_version(self) -> int | None:
        """The weights that sampled its last token; ``None`` without any."""
        return self.version_spans[-1][0] if self.version_spans else None


def compact(tokens: TokenSlice) -> TokenSlice:
    """Copy tokens to arrays: lists take several times the memory."""
    logprobs = None if tokens.logprobs is None else array("d", tokens.logprobs)
    return TokenSlice(array("i", tokens.token_ids), logprobs)
