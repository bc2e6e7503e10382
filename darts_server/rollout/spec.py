"""What a group is run with: its own description, and what all groups of a server share."""

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
    """What the caller of a group gets that is ended from outside, beside the error that says why."""

    FAIL = auto()
    """Nothing else."""
    ANSWER = auto()
    """In place of the error as many candidates as it waits for, as they are: vLLM's answer to an aborted request."""
    RETURN = auto()
    """All candidates that are not discarded, as they are. The caller must not take them for a group."""
    CARRY = auto()
    """What `CandidateRunner.collect_carried` returns, for another run that goes on with it."""


@dataclass(slots=True)
class Quota:
    """Number of groups that the batch still needs. At 0, every unfinished group is stopped at its next event, and
    carried over.

    A complete group counts, also if its answer is lost with its engine before it is read. The batch then needs one more
    group, but groups that are stopped by then do not go on: the batch may return fewer groups than it needs.
    """

    left: int


@dataclass(frozen=True, slots=True)
class GroupSpec(Generic[RequestT]):
    """Describe a group before anything of it is started.

    Args:
        plan: its policy. Its candidates are scored if the policy's shaping has a pruning.
        request: what its candidates are started with.
        group_id: names the group in records, logs and answers.
        prompt_key: under which its lengths are recorded; ``None`` to record none.
        tail_seed: seed of the sampled tail; ``None`` for a fresh one.
        early: deliver each trajectory as soon as it is known to belong to the group.
        on_abort: what its caller gets if it is aborted.
        quota: shared by the groups of a batch that carries over what its groups have generated.
        tokens: that its request takes, as far as that is known before it runs.
    """

    plan: Plan
    request: RequestT
    group_id: str
    prompt_key: str | None = None
    tail_seed: Sequence[int] | None = None
    early: bool = field(default=False, kw_only=True)
    on_abort: OnAbort = field(default=OnAbort.FAIL, kw_only=True)
    quota: Quota | None = field(default=None, kw_only=True)
    tokens: RequestTokens = field(default=UNKNOWN_TOKENS, kw_only=True)


@dataclass(frozen=True, slots=True)
class JoinRequest(Generic[RequestT]):
    """One request that becomes part of a group.

    ``join_key``: equal for requests that may join the same group. ``ticket``: holds its candidate, which the group
    takes over, as it runs on if this caller disconnects. ``name``: the caller's name for the group, if any.
    ``tokens``: that it takes.
    """

    request: RequestT
    request_id: str
    plan: Plan
    prompt_key: str
    join_key: str
    ticket: Ticket
    name: str | None = None
    tokens: RequestTokens = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class GroupContext(Generic[RequestT, OutputT]):
    """What all groups of one server share.

    ``scorer``: scores candidates, ``None`` where nothing can. ``starts``: where candidates wait for their turn to
    start. ``clock``: monotonic seconds.
    """

    engine: Engine[RequestT, OutputT]
    observer: GroupEvents
    scorer: Pruner | None
    starts: StartQueue
    clock: Callable[[], float]
