"""What a group hears (events) and what it wants done (decisions). Values only."""

from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.types import DiscardReason, FinishReason, SelectedAs

# --- events -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The engine took candidate ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Candidate ``index`` has generated ``tokens`` tokens and has not finished with them."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Candidate ``index`` was given a chance in [0, 1] to end correct.

    ``survival``: the probability with which it is to be kept; 1 if it is not to be pruned.
    """

    index: int
    quality: float
    survival: float = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Candidate ``index`` ended by itself after ``tokens`` tokens (the stop token counts)."""

    index: int
    tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """Candidate ``index`` failed. ``retryable`` says whether another candidate could fare better."""

    index: int
    error: Exception
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine aborted candidate ``index``, and not because the group asked for it."""

    index: int


@dataclass(frozen=True, slots=True)
class DeadlineSet:
    """The group's cut limit is ``tokens`` from now on; tail candidates are cut there if the rule cuts."""

    tokens: int


Event = Started | Progress | Scored | Finished | Failed | Lost | DeadlineSet

# --- decisions --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start these candidates."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a running candidate: it can no longer be in the group."""

    index: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class Keep:
    """Of a candidate that was scored: it goes on. ``survival``: the probability with which it was kept.

    That is 1 where the group could not have spared it, whatever probability was asked for.
    """

    index: int
    survival: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Stop a candidate if it runs, and keep exactly its first ``tokens`` tokens: they belong to the group."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """This trajectory is known to belong to the group, before the group is complete."""

    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The group is decided. ``selection`` maps candidate index to the end it was taken from, in index order."""

    selection: Mapping[int, SelectedAs]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Too few candidates can finish; nothing runs any more."""

    error: Exception


Decision = Start | Stop | Keep | Cut | Deliver | Complete | GiveUp
