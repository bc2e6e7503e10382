"""The one place where httpx's exceptions and HTTP's statuses become errors of ours."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from httpx_sse import SSEError

from ._errors import (
    BadRequest,
    ConnectionFailed,
    DartsError,
    NotFound,
    Overloaded,
    ProtocolError,
    ServerFault,
    StatusError,
    TimedOut,
    Unauthorized,
)

_BY_STATUS: dict[int, type[StatusError]] = {
    400: BadRequest,
    409: BadRequest,
    422: BadRequest,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    429: Overloaded,
    503: Overloaded,
}

# A proxy's error page is long; its beginning says what happened.
_MESSAGE_CHARS = 500


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise our error for httpx's; `what` names the request in the message."""
    try:
        yield
    except SSEError as exc:
        raise ProtocolError(f"{what}: {_described(exc)}") from exc
    except httpx.TimeoutException as exc:
        raise TimedOut(f"{what}: {_described(exc)}") from exc
    except httpx.TransportError as exc:
        raise ConnectionFailed(f"{what}: {_described(exc)}") from exc
    except httpx.RequestError as exc:
        raise ProtocolError(f"{what}: {_described(exc)}") from exc


def never_sent(error: DartsError) -> bool:
    """Whether no byte of the request can have reached the server."""
    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if its status is a success; otherwise its error is raised."""
    if response.is_success:
        return response
    raise error_for(response)


def error_for(response: httpx.Response) -> StatusError:
    """The error that a response with an error status stands for."""
    error = _error_object(response)
    return status_error(response.status_code, error, response.reason_phrase, _retry_after(response))


def told_error(error: Mapping[str, object]) -> StatusError:
    """The error that an error object inside an answer stands for; its code is the status it would have come with."""
    code = error.get("code")
    return status_error(code if isinstance(code, int) else 500, error, "the server failed")


def status_error(
    status: int, error: Mapping[str, object], otherwise: str, retry_after: float | None = None
) -> StatusError:
    """The error of this status with what OpenAI's error object says; `otherwise`: its message if that has none."""
    kind = _BY_STATUS.get(status, ServerFault if status >= 500 else StatusError)
    message = _text(error.get("message")) or _text(error.get("detail")) or otherwise
    code = error.get("code")
    return kind(
        f"HTTP {status}: {message[:_MESSAGE_CHARS]}",
        status_code=status,
        type=_text(error.get("type")),
        param=_text(error.get("param")),
        code=code if isinstance(code, str | int) else None,
        retry_after=retry_after,
    )


def _error_object(response: httpx.Response) -> dict[str, object]:
    """OpenAI's error object; a body of another form is the message."""
    try:
        body = response.json()
    except ValueError:
        return {"message": response.text.strip()}
    error = body.get("error", body) if isinstance(body, dict) else body
    return error if isinstance(error, dict) else {"message": error}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None


def _described(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
