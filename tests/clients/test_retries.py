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
from darts_client._retries import FIRST_DELAY, LONGEST_DELAY, LONGEST_WISH, Patience, Retrying
from darts_client._translation import translated


def of_httpx(error: httpx.RequestError) -> DartsError:
    try:
        with translated("GET /"):
            raise error
    except DartsError as ours:
        return ours


REFUSED = of_httpx(httpx.ConnectError("refused"))
NO_CONNECTION = of_httpx(httpx.ConnectTimeout("slow"))
BROKEN = of_httpx(httpx.ReadError("reset"))
SILENT = of_httpx(httpx.ReadTimeout("slow"))
GATEWAY = ServerFault("bad gateway", status_code=502)
FAULT = ServerFault("failed", status_code=500)
BUSY = Overloaded("busy", status_code=503, retry_after=1.0)


def passes(error: DartsError, *, idempotent: bool, stalls: bool = False) -> bool:
    retrying = Retrying(1, idempotent=idempotent, stalls=stalls)
    try:
        retrying.delay_after(error)
    except type(error):
        return False
    return True


@pytest.mark.parametrize("error", [REFUSED, NO_CONNECTION, BUSY])
def test_what_the_server_did_not_take_is_always_sent_again(error: DartsError) -> None:
    assert passes(error, idempotent=False)


@pytest.mark.parametrize("error", [BROKEN, GATEWAY])
def test_what_it_may_have_taken_is_sent_again_only_if_that_does_nothing_twice(error: DartsError) -> None:
    assert passes(error, idempotent=True)
    assert not passes(error, idempotent=False)


def test_a_silence_is_a_lost_connection_on_streams_alone() -> None:
    assert passes(SILENT, idempotent=True, stalls=True)
    assert not passes(SILENT, idempotent=True)
    assert not passes(SILENT, idempotent=False, stalls=True)


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("no", status_code=400),
        NotFound("gone", status_code=404),
        FAULT,
        Overloaded("the engine is gone", status_code=503),
        Overloaded("come tomorrow", status_code=429, retry_after=LONGEST_WISH + 1),
        ProtocolError("nonsense"),
    ],
)
def test_what_would_not_change_is_raised_at_once(error: DartsError) -> None:
    assert not passes(error, idempotent=True, stalls=True)


def delays(draw: Callable[[], float], error: DartsError, count: int = 8) -> list[float]:
    retrying = Retrying(count, idempotent=True, draw=draw)
    return [retrying.delay_after(error) for _ in range(count)]


def test_delays_double_up_to_a_bound_and_differ_by_up_to_a_half() -> None:
    longest = delays(lambda: 1.0, BROKEN)
    assert longest[:4] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert longest[-1] == LONGEST_DELAY
    assert delays(lambda: 0.0, BROKEN) == [delay / 2 for delay in longest]


def test_the_servers_wish_is_the_least() -> None:
    assert delays(lambda: 0.0, BUSY)[:4] == [1.0, 1.0, 1.0, 2.0]


def test_after_the_last_try_the_error_is_raised() -> None:
    retrying = Retrying(2, idempotent=True)
    for _ in range(2):
        retrying.delay_after(BROKEN)
    with pytest.raises(ConnectionFailed):
        retrying.delay_after(BROKEN)


def test_no_retries_is_none() -> None:
    with pytest.raises(TimedOut):
        Retrying(0, idempotent=True).delay_after(NO_CONNECTION)
    with pytest.raises(ValueError, match="retries"):
        Patience(retries=-1)
