"""The description of one group, of one single request, and of what all groups of a server share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic

from darts_server.engine.port import UNKNOWN_TOKENS, Engine, OutputT, RequestT, RequestTokens
from darts_server.observers import GroupEvents
from darts_server.rollout.plan import Plan
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.start_queue import StartQueue
from darts_server.serving.admission import Ticket


class OnAbort(Enum):
    """What the caller gets, beside the error, if its group is ended from outside."""

    FAIL = auto()
    """Nothing else."""
    ANSWER = auto()
    """Partial candidates in place of the error, as many as the caller waits for: vLLM's answer to an abort."""
    RETURN = auto()
    """All partial candidates that are not discarded. They are no fair sample, so they must not count as a group."""
    CARRY = auto()
    """The result of `CandidateRunner.collect_carried`, for another run that resumes the candidates."""


@dataclass(slots=True)
class Quota:
    """Number of groups that a batch still needs. At 0, every unfinished group is carried over at its next event.

    A complete group counts even if its engine dies before its answer is read. Groups that were carried over by then do
    not resume, so the batch may return fewer groups than it needs.
    """

    left: int


@dataclass(frozen=True, slots=True)
class GroupSpec(Generic[RequestT]):
    """The description of a group."""

    plan: Plan
    request: RequestT
    """Request of all candidates that have no request of their own."""
    group_id: str
    prompt_key: str | None = None
    """Key under which the group's lengths are learned, or None to learn nothing."""
    tail_seed: Sequence[int] | None = None
    """Seed of the sampled tail, or None for a fresh one."""
    early: bool = field(default=False, kw_only=True)
    """Whether a trajectory is delivered as soon as it is certain to be in the group."""
    on_abort: OnAbort = field(default=OnAbort.FAIL, kw_only=True)
    quota: Quota | None = field(default=None, kw_only=True)
    """Quota that the groups of a batch with carry-over share."""
    tokens: RequestTokens = field(default=UNKNOWN_TOKENS, kw_only=True)


@dataclass(frozen=True, slots=True)
class JoinRequest(Generic[RequestT]):
    """A request for one trajectory that becomes part of a group."""

    request: RequestT
    request_id: str
    plan: Plan
    prompt_key: str
    join_key: str
    """Equal for requests that may join the same group."""
    ticket: Ticket
    """Ticket of the request's candidate. The group takes it over, because the candidate outlives its caller."""
    name: str | None = None
    """The caller's name for the group, if any."""
    tokens: RequestTokens = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class GroupContext(Generic[RequestT, OutputT]):
    """The parts of a server that all groups use."""

    engine: Engine[RequestT, OutputT]
    observer: GroupEvents
    scorer: Pruner | None
    """Scorer of candidates, or None if this server cannot score."""
    starts: StartQueue
    clock: Callable[[], float]
    """Clock in monotonic seconds."""
