from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Generic

from darts_server.engine.port import UNKNOWN_TOKENS, Engine, OutputT, RequestT, RequestTokens
from darts_server.observers import GroupEvents
from darts_server.rollout.plan import Plan
from darts_server.rollout.pruning.pruner import Pruner
from darts_server.rollout.start_queue import FirstRound, StartQueue
from darts_server.rollout.verification import Verify
from darts_server.serving.admission import Ticket


class OnAbort(Enum):
    """Answer of a group that is ended from outside."""

    FAIL = auto()
    """The error."""
    ANSWER = auto()
    """As many partial candidates as the caller waits for, without the error, as vLLM answers an abort."""
    RETURN = auto()
    """The error, and all partial candidates. They are no fair sample, so they must not count as a group."""
    CARRY = auto()
    """The error, and the result of `CandidateRunner.collect_carried` for another run."""


@dataclass(slots=True)
class Quota:
    """Number of groups that a batch still needs. At 0, every unfinished group is carried over at its next event.

    A complete group counts even if its engine dies before its answer is read, so a batch may return fewer groups.
    """

    missing_groups: int


@dataclass(frozen=True, slots=True)
class GroupSpec(Generic[RequestT]):
    plan: Plan
    request: RequestT
    group_id: str
    prompt_key: str | None = None
    """Key of the prompt's statistics, or None to learn nothing."""
    tail_seed: Sequence[int] | None = None
    """Seed of the sampled tail."""
    _: KW_ONLY
    delivers_early: bool = False
    """Whether trajectories are delivered once they are certain to be in the group."""
    on_abort: OnAbort = OnAbort.FAIL
    quota: Quota | None = None
    first_round: FirstRound | None = None
    request_tokens: RequestTokens = UNKNOWN_TOKENS
    verify: Verify | None = None
    """Gives rewards to finished candidates."""
    only_informative: bool = False
    """Whether the group counts only if its rewards are not all equal."""
    stops_when_decided: bool = False
    """Whether the group ends once enough candidates have rewards that are not all equal."""
    run_probability: float = 1.0
    """Probability that the batch ran the prompt."""


@dataclass(frozen=True, slots=True)
class JoinRequest(Generic[RequestT]):
    request: RequestT
    request_id: str
    plan: Plan
    prompt_key: str
    join_key: str
    """Equal for requests that may join the same group."""
    ticket: Ticket
    """The group takes the ticket over, because the candidate may outlive its caller."""
    name: str | None = None
    """The caller's name for the group."""
    tokens: RequestTokens = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class GroupContext(Generic[RequestT, OutputT]):
    engine: Engine[RequestT, OutputT]
    observer: GroupEvents
    scorer: Pruner | None
    start_queue: StartQueue
    clock: Callable[[], float]
    """Monotonic seconds."""
