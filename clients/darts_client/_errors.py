"""Everything this package raises about the server:

* DartsError
  + ConnectionFailed     no connection, or it broke
  + TimedOut             no answer in time
  + StatusError          the server answered with an error status
    - BadRequest         400, 409, 422
    - Unauthorized       401, 403
    - NotFound           404
    - Overloaded         429, 503
    - ServerFault        any other 5xx
  + ProtocolError        an answer that is not what was asked for

A mistake in the arguments that needs no server to be seen is a ValueError or a TypeError.
"""


class DartsError(Exception):
    """Base of all errors of this package."""


class ConnectionFailed(DartsError):
    """The server could not be reached, or the connection broke before the answer was complete."""


class TimedOut(DartsError):
    """The server did not answer in time."""


class ProtocolError(DartsError):
    """The server's answer is not what was asked for, and must not be trained on."""


class StatusError(DartsError):
    """The server answered with an error status.

    `type`, `param` and `code` are those of OpenAI's error object, `retry_after` is the `Retry-After` header in seconds;
    each is None where the server sent none.
    """

    # Only the message has no default: an exception is unpickled, in another worker, from its positional arguments.
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
    """The server refused the request as it stands; `param` names the field, if the server said which."""


class Unauthorized(StatusError):
    """The API key is missing, wrong, or not enough."""


class NotFound(StatusError):
    """No such route or model, or nothing is kept under this id any more."""


class Overloaded(StatusError):
    """The server takes no work at the moment; `retry_after` says when it may again."""


class ServerFault(StatusError):
    """The server failed."""
