"""What the server says about groups of sessions. No I/O."""

from typing import Any

from pydantic import FiniteFloat

from ._models import WireModel


class SessionAccess(WireModel):
    """How an agent reaches its session. `api_key` opens this session alone."""

    id: str
    index: int
    base_url: str
    api_key: str


class CreatedGroup(WireModel):
    """A new group."""

    group_id: str
    sessions: tuple[SessionAccess, ...]


class SessionState(WireModel):
    """A session as the server sees it."""

    id: str
    index: int
    trajectory_id: str
    end: str | None
    """`finished`, `stopped`, `silent`, `failed` or `aborted`, or None while it is open."""
    reason: str | None
    """Why the group does not have it, or None."""
    turns: int
    tokens: int
    """Generated tokens."""
    tool_seconds: float
    selected: bool | None
    """Whether the group has it, or None while that is open."""
    weight: float | None
    """1 / (probability of its return), or None."""
    reward: float | None
    correct: bool | None
    advantage: float | None
    """Computed if the policy selects by rewards."""
    cut: bool
    """Whether it was cut at a deadline."""
    metadata: Any


class SessionRow(WireModel):
    """Tokens to train on, in the order of the model's context."""

    token_ids: list[int]
    mask: list[int]
    """1 for generated tokens, 0 for others."""
    logprobs: list[FiniteFloat]
    """Natural log-probs; 0 where the mask is 0."""
    version_spans: list[tuple[int, int]]
    """(weight version, number of generated tokens), in order."""


class SessionTrajectory(SessionState):
    """A session with its tokens."""

    rows: tuple[SessionRow, ...]
    """One row, or several if the agent rewrote its history."""


class SessionGroupState(WireModel):
    """A group of sessions."""

    state: str
    """`running`, `completed`, `failed` or `cancelled`."""
    error: str | None
    sessions: tuple[SessionState, ...]


class SessionEvent(WireModel):
    """An event."""

    type: str
    """`started`, `stopped` or `ended` for a session; `completed`, `failed` or `cancelled` for the group."""
    session: str | None
    reason: str | None
    start: SessionAccess | None
    """The new session."""


class SessionEvents(WireModel):
    """Events."""

    events: tuple[SessionEvent, ...]
    next: int
    """The next `after`."""
