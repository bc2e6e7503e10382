"""Single requests that are joined to groups: as they come, and while they wait."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from darts_server.engine.port import UNKNOWN_TOKENS, OutputT, RequestT, RequestTokens
from darts_server.rollout.plan import Plan
from darts_server.rollout.run import GroupRun
from darts_server.serving.admission import Ticket


@dataclass(frozen=True, slots=True)
class JoinRequest(Generic[RequestT]):
    """One request that becomes part of a group.

    ``join_key``: equal for requests that may join the same group. ``ticket``: holds its candidate, which the group
    takes over, as it runs on if this caller disconnects. ``name``: the caller's name for the group, if any.
    ``own_id``: the caller's own id of the request, if any. ``tokens``: that it takes.
    """

    request: RequestT
    request_id: str
    plan: Plan
    prompt_key: str
    join_key: str
    ticket: Ticket
    name: str | None = None
    own_id: str | None = None
    tokens: RequestTokens = UNKNOWN_TOKENS


@dataclass(frozen=True, slots=True)
class JoinedRequest(Generic[RequestT, OutputT]):
    """A request that waits for a trajectory of its group.

    ``index``: of the candidate that runs for it; ``None`` if that has ended. ``abort``: aborts it, so that its caller
    is answered with what the candidate has generated, and returns that.
    """

    run: GroupRun[RequestT, OutputT]
    index: int | None
    abort: Callable[[], "asyncio.Future[OutputT | None]"]
