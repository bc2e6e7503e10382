from collections.abc import Callable

import httpx
import pytest

from darts_client import (
    BadRequest,
    ConnectionFailed,
    DartsError,
    NotFound,
    Overloaded,
    ProtocolError,
    ServerFault,
    TimedOut,
)
from darts_client._errors import translate_errors
from darts_client._requests import (
    FIRST_DELAY,
    MAX_DELAY,
    MAX_RETRY_AFTER,
    RetrySchedule,
    TimeLimit,
    TransportOptions,
    root_url,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def translate(error: httpx.RequestError) -> DartsError:
    try:
        with translate_errors("GET /"):
            raise error
    except DartsError as translated:
        return translated


CONNECT_ERROR = translate(httpx.ConnectError("refused"))
CONNECT_TIMEOUT = translate(httpx.ConnectTimeout("slow"))
READ_ERROR = translate(httpx.ReadError("reset"))
READ_TIMEOUT = translate(httpx.ReadTimeout("slow"))
GATEWAY = ServerFault("bad gateway", status_code=502)
FAULT = ServerFault("failed", status_code=500)
OVERLOADED = Overloaded("busy", status_code=503, retry_after=1.0)


def is_retried(error: DartsError, *, idempotent: bool, retry_timeouts: bool = False) -> bool:
    try:
        RetrySchedule(1, idempotent=idempotent, retry_timeouts=retry_timeouts).delay_after(error)
    except type(error):
        return False
    return True


def test_a_request_is_retried_if_it_was_not_accepted_or_is_idempotent_and_after_a_read_timeout_on_streams() -> None:
    for error in (CONNECT_ERROR, CONNECT_TIMEOUT, OVERLOADED):
        assert is_retried(error, idempotent=False)
    for error in (READ_ERROR, GATEWAY):
        assert is_retried(error, idempotent=True)
        assert not is_retried(error, idempotent=False)
    assert is_retried(READ_TIMEOUT, idempotent=True, retry_timeouts=True)
    assert not is_retried(READ_TIMEOUT, idempotent=True)
    assert not is_retried(READ_TIMEOUT, idempotent=False, retry_timeouts=True)


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("no", status_code=400),
        NotFound("gone", status_code=404),
        FAULT,
        Overloaded("the engine is dead", status_code=503),
        Overloaded("come tomorrow", status_code=429, retry_after=MAX_RETRY_AFTER + 1),
        ProtocolError("nonsense"),
    ],
)
def test_errors_that_another_try_does_not_cure_are_raised_at_once(error: DartsError) -> None:
    assert not is_retried(error, idempotent=True, retry_timeouts=True)


def delays(random: Callable[[], float], error: DartsError, count: int = 8) -> list[float]:
    schedule = RetrySchedule(count, idempotent=True, random=random)
    return [schedule.delay_after(error) for _ in range(count)]


def test_delays_double_up_to_a_maximum_with_jitter_of_a_half() -> None:
    longest = delays(lambda: 1.0, READ_ERROR)
    assert longest[:4] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert longest[-1] == MAX_DELAY
    assert delays(lambda: 0.0, READ_ERROR) == [delay / 2 for delay in longest]


def test_a_delay_is_at_least_retry_after() -> None:
    assert delays(lambda: 0.0, OVERLOADED)[:4] == [1.0, 1.0, 1.0, 2.0]


def test_the_error_is_raised_after_the_last_retry() -> None:
    schedule = RetrySchedule(2, idempotent=True)
    for _ in range(2):
        schedule.delay_after(READ_ERROR)
    with pytest.raises(ConnectionFailed):
        schedule.delay_after(READ_ERROR)


def test_retries_may_be_0_but_not_negative() -> None:
    with pytest.raises(TimedOut):
        RetrySchedule(0, idempotent=True).delay_after(CONNECT_TIMEOUT)
    with pytest.raises(ValueError, match="retries"):
        TransportOptions(retries=-1)


def test_a_time_limit_bounds_every_timeout_and_its_end_is_an_error() -> None:
    clock = Clock()
    limit, none = TimeLimit(10, clock), TimeLimit(None, clock)
    assert limit.shorten(60) == 10
    clock.now += 9
    limit.raise_if_over()
    assert limit.shorten(60) == 1
    clock.now += 1
    assert 0 < limit.shorten(60) < 0.1
    with pytest.raises(TimedOut, match="after 10 s"):
        limit.raise_if_over()
    none.raise_if_over()
    assert none.shorten(60) == 60


@pytest.mark.parametrize("root", ["http://server", "https://proxy/darts"])
@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_end_in_v1(root: str, end: str) -> None:
    assert root_url(root + end) == root


def test_a_url_without_a_scheme_is_rejected() -> None:
    with pytest.raises(ValueError, match="localhost:8000"):
        root_url("localhost:8000")
