"""Each request and its tasks have their own value of `caller`."""

from contextvars import ContextVar
from dataclasses import dataclass

from darts_server.exceptions import DartsError


@dataclass(slots=True, eq=False)
class Caller:
    name: str | None = None
    """Name of the key."""
    is_admin: bool = False
    refusal: DartsError | None = None
    answered_error: DartsError | None = None
    """Error that a route has answered in its own form."""
    request_id: str | None = None
    """The caller's own id of the request."""
    session: str | None = None
    """Id of the session that the request's URL or key names."""
    num_candidates: int = 0
    """Candidates in the request's tickets."""

    def may_see(self, owner: str | None) -> bool:
        """Return whether the caller sees groups of ``owner``. Callers without a key are the same caller."""
        return self.is_admin or owner == self.name


NO_CALLER = Caller()
caller: ContextVar[Caller] = ContextVar("darts_caller", default=NO_CALLER)
