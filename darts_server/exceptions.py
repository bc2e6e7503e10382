"""The exceptions of this project, in one tree::

DartsError
    InvalidRequest
        NotFound
        Conflict
        TooLarge
        NotAcceptable
    Unauthorized
    Forbidden
    Overloaded
        QuotaReached
    ServerStopping
    InvalidSetting
    GroupFailed
    GroupAborted
    SessionOver
    SessionFailed
    EngineError
        CandidateFailed
        EngineRefused
        EngineBusy
        EngineDead
            WeightsLost
    StateError
        StateFull
        StateDamaged
        StateTooNew
    UpdateError
        UpdateRunning
        UpdateUnsupported
        UpdateFailed
        DiskFull
    IllegalMove
"""

from collections.abc import Iterable

RETRY_SECONDS = 5
"""``Retry-After`` of a refused request: in some hundred decode steps, some waiting candidates have started."""


class DartsError(Exception):
    """Base of all exceptions. ``retry_after``: seconds for the ``Retry-After`` header, if a retry may help."""

    def __init__(self, message: str = "", retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


# vLLM's handlers answer a `ValueError` with status 400.
class InvalidRequest(DartsError, ValueError):
    """The request is invalid in ``field``, and nothing was started."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def field_name(path: Iterable[str | int]) -> str:
    """Join keys and indices into the name of a field, such as ``prompts[3].text``."""
    name = ""
    for part in path:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}"
    return name.removeprefix(".")


class NotFound(InvalidRequest):
    """The requested resource does not exist."""


class Conflict(InvalidRequest):
    """The request contradicts an earlier request under the same name."""


class TooLarge(InvalidRequest):
    """The body is larger than the route's limit."""


class NotAcceptable(InvalidRequest):
    """The request accepts no form of the answer."""


class Unauthorized(DartsError):
    """The request has no valid key for the route."""


class Forbidden(DartsError):
    """The route is closed to this caller, or disabled by a setting."""


class Overloaded(DartsError):
    """Too many requests are pending."""


class QuotaReached(Overloaded):
    """The caller has too many requests in flight."""


class ServerStopping(DartsError):
    """The server is shutting down."""


class InvalidSetting(DartsError):
    """The server does not start. The message names the setting, its value and the allowed values."""


class GroupFailed(DartsError):
    """Too few trajectories of a prompt could finish."""


class GroupAborted(DartsError):
    """The caller disconnected, or the request was aborted."""


class SessionOver(DartsError):
    """The session of an agent is over. ``status``: HTTP status for the harness, or 200 for an empty answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SessionFailed(DartsError):
    """The session of an agent is unusable: its tool failed, or no request came for a while."""


class EngineError(DartsError):
    """Base of errors of the engine. The engine's own exception is the ``__cause__``."""


class CandidateFailed(EngineError):
    """A candidate failed. Another candidate may succeed."""


class EngineRefused(EngineError):
    """The engine rejects the request as invalid, so the group fails without a retry."""


class EngineBusy(EngineError):
    """The engine's own queue is full."""


class EngineDead(EngineError):
    """The engine is gone or makes no progress, so no candidate can finish."""


class WeightsLost(EngineDead):
    """A weight update and the restoration of the old weights failed, so every candidate would be wrong."""


class StateError(DartsError):
    """The learned state cannot be read or written. The message names the file and the remedy."""


class StateFull(StateError):
    """The disk is full."""


class StateDamaged(StateError):
    """The state is damaged, or belongs to another program. It was not changed."""


class StateTooNew(StateError):
    """A newer version of this server wrote the state. It was not changed."""


class UpdateError(DartsError):
    """The weights were not updated, and the old version is served."""


class UpdateRunning(UpdateError):
    """Another update is in progress."""


class UpdateUnsupported(UpdateError):
    """The weights cannot be replaced. The message names the flag or the property of the model."""


class UpdateFailed(UpdateError):
    """A phase of an update failed or timed out."""


class DiskFull(UpdateError):
    """The staging folder has no room for the weights."""


class IllegalMove(DartsError):
    """The present state does not allow the event: a bug of ours."""
