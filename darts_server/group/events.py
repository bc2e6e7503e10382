"""Events, the input of a group, and decisions, its output.

Candidates have an index from 0 in the order of starting. Token counts include the stop token.
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
    """A running candidate has generated ``tokens`` tokens so far, and will generate at least one more."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """``quality``: probability of a correct answer. ``survival``: probability that the group keeps the candidate."""

    index: int
    quality: float
    survival: float = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rewarded:
    """A finished or cut candidate has its verdict, with a ``reward`` or without."""

    index: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """``retryable``: whether another candidate may succeed."""

    index: int
    error: Exception
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine, or the caller, aborted a candidate that the group had not stopped."""

    index: int
    by_caller: bool = False


@dataclass(frozen=True, slots=True)
class DeadlineSet:
    """The group's cohort has a deadline of ``tokens`` tokens. Rules without a deadline ignore it.

    ``cut_length``: length in tokens, at least ``tokens``, at which every candidate is cut, or None.
    """

    tokens: int
    cut_length: int | None = None


Event = Started | Progress | Scored | Finished | Rewarded | Failed | Lost | DeadlineSet

# --- decisions --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    index: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class Keep:
    """Let a scored candidate run on. ``survival``: the score's survival, or 1 if the group needs the candidate."""

    index: int
    survival: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Stop a candidate if it is running, and keep exactly its first ``tokens`` tokens.

    A candidate that was cut may be cut again, to fewer tokens, and may not be selected.
    """

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Return a trajectory before the group is complete, because it is certain to be in the group."""

    index: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Return the selected candidates, in the order of indices."""

    selection: Mapping[int, SelectedAs]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report an error to the caller: too few candidates can finish, and all were stopped."""

    error: Exception


Decision = Start | Stop | Keep | Cut | Deliver | Complete | GiveUp
