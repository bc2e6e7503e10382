"""Single requests that are joined to groups."""

from dataclasses import dataclass
from typing import Generic

from darts_server.engine.port import UNKNOWN_TOKENS, RequestT, RequestTokens
from darts_server.rollout.plan import Plan
from darts_server.serving.admission import Ticket


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
