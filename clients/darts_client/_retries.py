"""What is asked again, how often, and after how long."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from ._errors import ConnectionFailed, DartsError, Overloaded, StatusError, TimedOut
from ._translation import never_sent

FIRST_DELAY = 0.5
LONGEST_DELAY = 10.0
# A server that wants to be left alone for longer than this is for the caller to decide about.
LONGEST_WISH = 60.0
# A gateway that lost its server: the request may have been served, so only what may be served twice is sent again.
_GATEWAY = frozenset({502, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client waits, and how often it tries again.

    `timeout`: for an answer that comes whole. `connect_timeout`: for a connection. `idle_timeout`: for the next sign of
    life on a stream. `retries`: times that a request is sent again; 0 for never.
    """

    timeout: float = 600.0
    connect_timeout: float = 10.0
    idle_timeout: float = 60.0
    retries: int = 5

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")


class Retrying:
    """The tries of one request.

    `idempotent`: it may be served twice. `stalls`: a timeout is a lost connection, and not an answer that takes long.
    `draw`: random numbers in [0, 1).
    """

    def __init__(
        self, retries: int, *, idempotent: bool, stalls: bool = False, draw: Callable[[], float] = random.random
    ) -> None:
        self._left = retries
        self._delay = FIRST_DELAY
        self._idempotent = idempotent
        self._stalls = stalls
        self._draw = draw

    def delay_after(self, error: DartsError) -> float:
        """Seconds to sleep before the next try: the server's wish or more, and never the same for many clients.

        Raises:
            DartsError: `error` itself, where trying again is not safe, not useful, or was done often enough.
        """
        if self._left <= 0 or not self._may_pass(error):
            raise error
        self._left -= 1
        delay = self._delay * (1 + self._draw()) / 2
        self._delay = min(2 * self._delay, LONGEST_DELAY)
        wish = error.retry_after if isinstance(error, StatusError) else None
        return max(delay, wish or 0.0)

    def _may_pass(self, error: DartsError) -> bool:
        match error:
            case Overloaded():
                return error.retry_after is not None and error.retry_after <= LONGEST_WISH
            case StatusError():
                return self._idempotent and error.status_code in _GATEWAY
            case ConnectionFailed():
                return self._idempotent or never_sent(error)
            case TimedOut():
                return (self._idempotent and self._stalls) or never_sent(error)
            case _:
                return False
