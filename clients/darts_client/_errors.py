"""The exceptions that this package raises about the server, and the translation of httpx's exceptions:

* DartsError
  + ConnectionFailed     no connection, or it broke
  + TimedOut             no answer in time
  + StatusError          the server answered with an error status
    - BadRequest         400, 409, 422
    - Unauthorized       401, 403
    - NotFound           404
    - SessionOver        410 or 409, for a session that is over
    - Overloaded         429, 503
    - ServerFault        any other 5xx
  + ProtocolError        the answer does not match the request
  + GroupFailed          a group of sessions failed, or was deleted

An invalid argument raises ValueError or TypeError if the client can detect it without the server.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from httpx_sse import SSEError


class DartsError(Exception):
    """Base class of all errors of this package."""


class ConnectionFailed(DartsError):
    """The server could not be reached, or the connection broke before the answer was complete."""


class TimedOut(DartsError):
    """The server did not answer in time."""


class ProtocolError(DartsError):
    """The server's answer does not match the request. Do not train on it."""


class GroupFailed(DartsError):
    """Too few sessions of a group could finish, or the group was deleted."""


class StatusError(DartsError):
    """The server answered with an error status.

    `type`, `param` and `code` come from OpenAI's error object. `retry_after` is the `Retry-After` header in seconds.
    Each is None if the server did not send it.
    """

    # Only the message has no default, because unpickling in another process passes nothing else.
    def __init__(
        self,
        message: str,
        *,
        status_code: int = 0,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after


class BadRequest(StatusError):
    """The server rejected the request. `param` names the field, if the server sent its name."""


class Unauthorized(StatusError):
    """The API key is missing, wrong, or lacks the permission."""


class NotFound(StatusError):
    """There is no such route or model, or the server no longer keeps this id."""


class SessionOver(StatusError):
    """The session is over. Its agent must send no further request."""


class Overloaded(StatusError):
    """The server accepts no work at the moment. `retry_after` is the number of seconds to wait."""


class ServerFault(StatusError):
    """The server failed."""


_CLASS_BY_STATUS: dict[int, type[StatusError]] = {
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
_MAX_MESSAGE_CHARS = 500


@contextmanager
def translate_errors(request: str) -> Iterator[None]:
    """Translate httpx's exceptions into ours. `request` names the request in the message."""
    try:
        yield
    # `SSEError` and `TimeoutException` are subclasses of `TransportError`, so they are caught first.
    except SSEError as exc:
        raise ProtocolError(f"{request}: {_describe(exc)}") from exc
    except httpx.TimeoutException as exc:
        raise TimedOut(f"{request}: {_describe(exc)}") from exc
    except httpx.TransportError as exc:
        raise ConnectionFailed(f"{request}: {_describe(exc)}") from exc
    except httpx.RequestError as exc:
        raise ProtocolError(f"{request}: {_describe(exc)}") from exc


def was_never_sent(error: DartsError) -> bool:
    """Return whether no byte of the request can have reached the server."""
    return isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


def raise_for_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    seconds = response.headers.get("Retry-After", "")
    # The header may also be a date, which is ignored.
    retry_after = float(seconds) if seconds.isdecimal() else None
    raise _status_error(response.status_code, _error_object(response), response.reason_phrase, retry_after)


def error_from_object(error: Mapping[str, object]) -> StatusError:
    """Convert an error object inside an answer. Its code is an HTTP status."""
    code = error.get("code")
    status = code if isinstance(code, int) else 500
    return _status_error(status, error, "the server failed")


def _status_error(
    status: int,
    error: Mapping[str, object],
    default_message: str,
    retry_after: float | None = None,
) -> StatusError:
    """Return the exception. `error`: OpenAI's object, or FastAPI's with a `detail`."""
    error_class = _CLASS_BY_STATUS.get(status, ServerFault if status >= 500 else StatusError)
    if error.get("type") == "darts_session_over":
        error_class = SessionOver
    message = _to_text(error.get("message")) or _to_text(error.get("detail")) or default_message
    code = error.get("code")
    return error_class(
        f"HTTP {status}: {message[:_MAX_MESSAGE_CHARS]}",
        status_code=status,
        type=_to_text(error.get("type")),
        param=_to_text(error.get("param")),
        code=code if isinstance(code, str | int) else None,
        retry_after=retry_after,
    )


def _error_object(response: httpx.Response) -> Mapping[str, object]:
    """Return OpenAI's error object. Another body becomes its message."""
    try:
        body = response.json()
    except ValueError:
        return {"message": response.text.strip()}
    if isinstance(body, dict):
        body = body.get("error", body)
    if isinstance(body, dict):
        return body
    return {"message": body}


def _to_text(value: object) -> str | None:
    return None if value is None else str(value)


def _describe(exc: Exception) -> str:
    name = type(exc).__name__
    return f"{name}: {exc}" if str(exc) else name
