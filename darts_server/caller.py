"""Who sent the request that is being handled. Each request has its own value of `caller`, and so have its tasks."""

from contextvars import ContextVar
from dataclasses import dataclass

from darts_server.exceptions import DartsError


@dataclass(slots=True, eq=False)
class Caller:
    """The caller of the request that is being handled.

    ``name``: equal for requests with the same key; ``None`` without one. ``is_admin``: it sent an admin key.
    ``refused``: why the request is refused. ``answered``: the error of ours that a route has answered in a form of its
    own. ``request_id``: the caller's own id of the request. ``held``: candidates that this request holds.
    """

    name: str | None = None
    is_admin: bool = False
    refused: DartsError | None = None
    answered: DartsError | None = None
    request_id: str | None = None
    held: int = 0

    def may_see(self, owner: str | None) -> bool:
        """Whether it may see what belongs to the caller of that name. Callers without a key are the same caller."""
        return self.is_admin or owner == self.name


NO_CALLER = Caller()
caller: ContextVar[Caller] = ContextVar("darts_caller", default=NO_CALLER)
