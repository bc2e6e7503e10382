import pickle
from typing import Any

import httpx
import pytest
from httpx_sse import SSEError

import darts_client
from darts_client import (
    BadRequest,
    ConnectionFailed,
    DartsError,
    NotFound,
    Overloaded,
    ProtocolError,
    ServerFault,
    SessionOver,
    StatusError,
    TimedOut,
    Unauthorized,
)
from darts_client._errors import raise_for_status, translate_errors


def public_errors() -> list[type[DartsError]]:
    return [kind for kind in vars(darts_client).values() if isinstance(kind, type) and issubclass(kind, DartsError)]


@pytest.mark.parametrize("kind", public_errors())
def test_errors_can_be_pickled(kind: type[DartsError]) -> None:
    unpickled = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(unpickled) is kind
    assert str(unpickled) == "what happened"
    if isinstance(unpickled, StatusError):
        fields = {"status_code": 429, "type": "t", "param": "p", "code": 7, "retry_after": 2.0}
        assert pickle.loads(pickle.dumps(kind("busy", **fields))).__dict__ == fields


def error_for(response: httpx.Response) -> StatusError:
    with pytest.raises(StatusError) as caught:
        raise_for_status(response)
    return caught.value


KINDS: dict[type[StatusError], tuple[int, ...]] = {
    BadRequest: (400, 409, 422),
    Unauthorized: (401, 403),
    NotFound: (404,),
    Overloaded: (429, 503),
    ServerFault: (500, 501),
    StatusError: (307, 413),
}


@pytest.mark.parametrize(
    ("status", "kind"), [(status, kind) for kind, statuses in KINDS.items() for status in statuses]
)
def test_each_status_has_its_error(status: int, kind: type[StatusError]) -> None:
    error = error_for(httpx.Response(status, json={"error": {"message": "no"}}))
    assert type(error) is kind
    assert error.status_code == status


@pytest.mark.parametrize("status", [409, 410])
def test_a_session_that_is_over_has_an_error_of_its_own_with_either_status(status: int) -> None:
    error = error_for(httpx.Response(status, json={"error": {"message": "stopped", "type": "darts_session_over"}}))
    assert type(error) is SessionOver
    assert error.status_code == status


def test_the_error_has_the_fields_of_the_error_object() -> None:
    body = {"error": {"message": "n is too large", "type": "invalid_request_error", "param": "n", "code": 400}}
    error = error_for(httpx.Response(400, json=body))
    assert str(error) == "HTTP 400: n is too large"
    assert (error.type, error.param, error.code) == ("invalid_request_error", "n", 400)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"json": {"error": "Unauthorized"}}, "Unauthorized"),
        ({"json": {"object": "error", "message": "old form"}}, "old form"),
        ({"json": {"detail": "Not Found"}}, "Not Found"),
        ({"json": {"detail": [{"loc": ["body", "n"]}]}}, "[{'loc': ['body', 'n']}]"),
        ({"json": ["a", "list"]}, "['a', 'list']"),
        ({"json": None}, "Not Found"),
        ({"json": {"error": {"message": None, "code": [1]}}}, "Not Found"),
        ({"text": "<h1>gateway</h1>\n"}, "<h1>gateway</h1>"),
        ({"content": b"\xff\xfe"}, "\ufffd\ufffd"),
        ({"content": b""}, "Not Found"),
        ({"text": "x" * 10_000}, "x" * 500),
    ],
)
def test_an_error_body_of_any_form_yields_a_message(body: dict[str, Any], message: str) -> None:
    error = error_for(httpx.Response(404, **body))
    assert str(error) == f"HTTP 404: {message}"
    assert error.code is None


@pytest.mark.parametrize(("value", "seconds"), [("3", 3.0), ("soon", None), ("-1", None), (None, None)])
def test_retry_after_is_seconds_or_none(value: str | None, seconds: float | None) -> None:
    headers = {} if value is None else {"Retry-After": value}
    assert error_for(httpx.Response(429, headers=headers)).retry_after == seconds


@pytest.mark.parametrize(
    ("foreign", "kind"),
    [
        (httpx.ReadTimeout(""), TimedOut),
        (httpx.ConnectTimeout("slow"), TimedOut),
        (httpx.ConnectError("refused"), ConnectionFailed),
        (httpx.RemoteProtocolError("disconnected"), ConnectionFailed),
        (httpx.DecodingError("not gzip"), ProtocolError),
        (SSEError("not a stream"), ProtocolError),
    ],
)
def test_httpx_errors_are_translated_and_remain_the_cause(foreign: httpx.RequestError, kind: type[DartsError]) -> None:
    with (
        pytest.raises(kind, match=rf"^GET /health: {type(foreign).__name__}") as caught,
        translate_errors("GET /health"),
    ):
        raise foreign
    assert caught.value.__cause__ is foreign
