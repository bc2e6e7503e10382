"""Parts of every request: URLs, headers, timeouts, and the rules for sending a request again."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from ._errors import ConnectionFailed, DartsError, Overloaded, ServerFault, StatusError, TimedOut, was_never_sent

API = "/darts/v1"

FIRST_DELAY = 0.5
MAX_DELAY = 10.0
# If a server asks for a longer pause, the caller should decide.
MAX_RETRY_AFTER = 60.0
# A gateway lost its server. The request may have been served, so only an idempotent request is sent again.
_GATEWAY_STATUSES = frozenset({502, 504})

# The route only reads the engine's state, so a later answer means that the server is not well.
HEALTH_TIMEOUT = 10.0
# Loading a model takes a minute or more, so two probes a second cost nothing.
HEALTH_POLL_INTERVAL = 0.5
# Answers of a server that is still starting, or of its proxy. Waiting does not cure any other error.
STARTING_ERRORS = (ConnectionFailed, TimedOut, Overloaded, ServerFault)


def root_url(base_url: str) -> str:
    """Return the server's root, whether or not the URL ends in `/v1`.

    >>> root_url("http://localhost:8000/v1/")
    'http://localhost:8000'
    """
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}")
    return base_url.rstrip("/").removesuffix("/v1")


def auth_headers(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    return {"Authorization": f"Bearer {api_key}"}


def quote_segment(name: str) -> str:
    """Escape a name for use as one segment of a path.

    >>> quote_segment("../a b")
    '%2E%2E%2Fa%20b'
    """
    # `quote` leaves dots alone, and `..` would climb out of the path.
    return quote(name, safe="").replace(".", "%2E")


def batch_path(batch_id: str) -> str:
    return f"{API}/rollouts/{quote_segment(batch_id)}"


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Timeouts in seconds, and the number of retries."""

    timeout: float = 600.0
    """For a response that is not streamed."""
    connect_timeout: float = 10.0
    idle_timeout: float = 60.0
    """For the next bytes of a stream."""
    retries: int = 5

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")

    def request_timeout(self, timeout: float | None = None) -> httpx.Timeout:
        """Return httpx's timeouts for a response that is not streamed."""
        # The server is silent while it generates, so the timeout of a read includes the generation.
        if timeout is None:
            timeout = self.timeout
        return httpx.Timeout(timeout, connect=self.connect_timeout)

    def stream_timeout(self, limit: "TimeLimit") -> httpx.Timeout:
        connect = limit.shorten(self.connect_timeout)
        # The server sends comments while it generates, so a silent stream is a lost connection.
        read = limit.shorten(self.idle_timeout)
        return httpx.Timeout(self.timeout, connect=connect, read=read)


class RetrySchedule:
    """The retries of one request.

    Args:
        idempotent: whether the request may be served twice.
        random: returns numbers in [0, 1) for the jitter.
    """

    def __init__(
        self,
        retries: int,
        *,
        idempotent: bool,
        retry_timeouts: bool = False,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._remaining_retries = retries
        self._next_delay = FIRST_DELAY
        self._idempotent = idempotent
        self._retry_timeouts = retry_timeouts
        self._random = random

    def delay_after(self, error: DartsError) -> float:
        """Return the seconds to wait before the next try, at least the server's `Retry-After`.

        Raises:
            DartsError: `error` itself, if another try is not safe or cannot help, or no retry is left.
        """
        if self._remaining_retries <= 0 or not self._is_retryable(error):
            raise error
        self._remaining_retries -= 1

        # Jitter of up to half the delay spreads clients that failed at the same moment.
        delay = self._next_delay * (1 + self._random()) / 2
        self._next_delay = min(2 * self._next_delay, MAX_DELAY)
        if isinstance(error, StatusError) and error.retry_after is not None:
            return max(delay, error.retry_after)
        return delay

    def _is_retryable(self, error: DartsError) -> bool:
        match error:
            case Overloaded():
                # The server has refused the work. Without `Retry-After` a retry cannot help.
                return error.retry_after is not None and error.retry_after <= MAX_RETRY_AFTER
            case StatusError():
                return self._idempotent and error.status_code in _GATEWAY_STATUSES
            case ConnectionFailed():
                return self._idempotent or was_never_sent(error)
            case TimedOut():
                # Unless the timeout means a lost connection, the server is slow, and a retry would take as long.
                return (self._idempotent and self._retry_timeouts) or was_never_sent(error)
            case _:
                return False


class TimeLimit:
    """A limit in seconds from now, or None for no limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def shorten(self, seconds: float) -> float:
        if self._end is None:
            return seconds
        # httpx needs a positive timeout.
        remaining = max(self._end - self._clock(), 0.001)
        return min(seconds, remaining)

    @property
    def is_over(self) -> bool:
        return self._end is not None and self._clock() >= self._end

    def raise_if_over(self) -> None:
        if self.is_over:
            raise TimedOut(f"the batch was not complete after {self._seconds:g} s")
