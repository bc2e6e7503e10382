"""The exceptions of this project, in one tree.

::

    DartsError
    ├── InvalidRequest         the caller's mistake: names the field and the remedy
    │   ├── NotFound           the requested resource does not exist
    │   ├── Conflict           contradicts an earlier request under the same name
    │   ├── TooLarge           the request's body exceeds the route's limit
    │   └── NotAcceptable      the answer has none of the forms that the request accepts
    ├── Unauthorized           no valid key for the route
    ├── Forbidden              the route is closed to this caller, with any key
    ├── Overloaded             too many requests are pending: retry later
    │   └── QuotaReached       this caller has too many requests in flight
    ├── ServerStopping         the server is shutting down
    ├── InvalidSetting         the operator's mistake: the server does not start
    ├── GroupFailed            too few trajectories of a prompt could finish
    ├── GroupAborted           the group was aborted from outside
    ├── EngineError
    │   ├── CandidateFailed    one candidate failed: another may succeed
    │   ├── EngineRefused      the engine rejected the request: do not retry
    │   ├── EngineBusy         the engine's own queue is full: retry later
    │   └── EngineDead         the engine is gone: no candidate can finish
    │       └── WeightsLost    the engine's weights are undefined after a failed update
    ├── StateError             the learned state cannot be read or written
    │   ├── StateFull          no space left on its disk
    │   ├── StateDamaged       a state file is not ours or is incomplete
    │   └── StateTooNew        a newer version of this server wrote it
    ├── UpdateError            the weights were not updated: the old ones are served
    │   ├── UpdateRunning      another update is in progress
    │   ├── UpdateUnsupported  this model or configuration cannot be updated
    │   ├── UpdateFailed       a step of the update failed or timed out
    │   └── DiskFull           no space left to stage the weights
    └── IllegalMove            a bug: an event that the state machine does not allow
"""

RETRY_SECONDS = 5
"""``Retry-After`` of a refused request: in some hundred decode steps, some waiting candidates have started."""


class DartsError(Exception):
    """Base of all exceptions of this project.

    ``retry_after``: seconds for the ``Retry-After`` header, or None if a retry does not help.
    """

    def __init__(self, message: str = "", retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvalidRequest(DartsError, ValueError):
    """The request is invalid, and nothing was started. ``field``: the invalid field of the request.

    vLLM's handlers answer a ``ValueError`` with status 400.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(InvalidRequest):
    """The requested resource does not exist, or does not exist any more."""


class Conflict(InvalidRequest):
    """The request contradicts an earlier one under the same name."""


class TooLarge(InvalidRequest):
    """The request's body is larger than the route's limit."""


class NotAcceptable(InvalidRequest):
    """The answer has none of the forms that the request accepts."""


class Unauthorized(DartsError):
    """The request has no valid key for the route."""


class Forbidden(DartsError):
    """The route is closed to this caller, or disabled by the server's settings."""


class Overloaded(DartsError):
    """Too many requests are pending."""


class QuotaReached(Overloaded):
    """The caller has too many requests in flight."""


class ServerStopping(DartsError):
    """The server is shutting down and accepts no requests."""


class InvalidSetting(DartsError):
    """A setting is invalid, and the server does not start. The message names the key, the value and what is allowed."""


class GroupFailed(DartsError):
    """Too few trajectories of one prompt could finish."""


class GroupAborted(DartsError):
    """The group was aborted: its caller disconnected, or the request was aborted on the engine."""


class EngineError(DartsError):
    """Base of errors of the engine. The engine's own exception is the ``__cause__``."""


class CandidateFailed(EngineError):
    """One candidate failed. The group may start another."""


class EngineRefused(EngineError):
    """The engine rejected the request as invalid. The group fails without a retry."""


class EngineBusy(EngineError):
    """The engine's own queue is full."""


class EngineDead(EngineError):
    """The engine is gone, or makes no progress. No candidate can finish any more."""


class WeightsLost(EngineDead):
    """A weight update failed, and so did restoring the old weights. Every candidate would be wrong."""


class StateError(DartsError):
    """The learned state cannot be read or written now. The message names the file and the remedy."""


class StateFull(StateError):
    """The disk has no room for the learned state."""


class StateDamaged(StateError):
    """A state file, or a state to restore, is damaged or belongs to another program. It was not changed."""


class StateTooNew(StateError):
    """A newer version of this server wrote the state. It was not changed."""


class UpdateError(DartsError):
    """The weights were not updated, and the old version is served. The message says why."""


class UpdateRunning(UpdateError):
    """Another update is in progress."""


class UpdateUnsupported(UpdateError):
    """The weights of this server cannot be replaced. The message names the flag or property of the model."""


class UpdateFailed(UpdateError):
    """A phase of an update failed or timed out."""


class DiskFull(UpdateError):
    """The staging folder has no room for the weights."""


class IllegalMove(DartsError):
    """An event is illegal in the current state of the group, the candidate or the weights: a bug of ours."""
