"""Input of a group (events) and its output (decisions). Values only.

A candidate is named by its index within the group, from 0 in the order of starting. Token counts include the stop
token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.types import DiscardReason, FinishReason, SelectedAs

# --- events -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has accepted a candidate."""

    index: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A running candidate has generated ``tokens`` tokens so far, and will generate more."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate was scored.

    ``quality``: its probability to end correct, in [0, 1]. ``survival``: the probability with which to keep it; 1 for a
    score that prunes nothing.
    """

    index: int
    quality: float
    survival: float = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A candidate finished with ``tokens`` tokens, at a stop token or at its length limit."""

    index: int
    tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """A candidate failed. ``retryable``: whether another candidate may succeed."""

    index: int
    error: Exception
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """A candidate was aborted that the group had not stopped. ``by_caller``: not by the engine."""

    index: int
    by_caller: bool = False


@dataclass(frozen=True, slots=True)
class DeadlineSet:
    """The deadline of the group's cohort is ``tokens``. Only rules with a deadline use it.

    ``bound``: length in tokens, at least ``tokens``, at which every candidate is cut; ``None`` for no such length.
    """

    tokens: int
    bound: int | None = None


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
    """Let a scored candidate run on.

    ``survival``: the probability with which it was kept: that of the score, or 1 if the group needs the candidate.
    """

    index: int
    survival: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Stop a candidate if it still runs, and keep exactly its first ``tokens`` tokens.

    One that is cut at the bound may turn out not to belong to the group, or be cut again, to fewer tokens.
    """

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Return a trajectory before the group is complete: it is certain to belong to the group."""

    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Return the group. ``selection``: how each selected candidate was selected, in the order of indices."""

    selection: Mapping[int, SelectedAs]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report ``error`` to the caller: too few candidates can finish, and all have been stopped."""

    error: Exception


Decision = Start | Stop | Keep | Cut | Deliver | Complete | GiveUp
