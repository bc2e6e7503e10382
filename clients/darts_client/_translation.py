"""The one place where httpx's exceptions and HTTP's statuses become errors of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ._errors import (
    BadRequest,
    ConnectionFailed,
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
    except httpx.TimeoutException as exc:
        raise TimedOut(f"{what}: {_described(exc)}") from exc
    except httpx.TransportError as exc:
        raise ConnectionFailed(f"{what}: {_described(exc)}") from exc
    except httpx.RequestError as exc:
        raise ProtocolError(f"{what}: {_described(exc)}") from exc


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if its status is a success; otherwise its error is raised."""
    if response.is_success:
        return response
    raise error_for(response)


def error_for(response: httpx.Response) -> StatusError:
    """The error that a response with an error status stands for."""
    status = response.status_code
    kind = _BY_STATUS.get(status, ServerFault if status >= 500 else StatusError)
    error = _error_object(response)
    message = _text(error.get("message")) or _text(error.get("detail")) or response.reason_phrase
    code = error.get("code")
    return kind(
        f"HTTP {status}: {message[:_MESSAGE_CHARS]}",
        status_code=status,
        type=_text(error.get("type")),
        param=_text(error.get("param")),
        code=code if isinstance(code, str | int) else None,
        retry_after=_retry_after(response),
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
