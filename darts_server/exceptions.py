"""The one exception tree.

::

    DartsError
    ├── InvalidRequest       the caller's mistake; names the field and the remedy
    │   ├── NotFound         what was asked for is not there
    │   ├── Conflict         what was asked for contradicts what was asked for before
    │   └── TooLarge         the request's body has more bytes than the route takes
    ├── Unauthorized         the caller showed no key that opens the route
    ├── Forbidden            the route is not for this caller, with or without a key
    ├── Overloaded           too much waits for the engine; another time it may go
    │   └── QuotaReached     the caller has too much under way
    ├── ServerStopping       the server was told to stop
    ├── InvalidSetting       the operator's mistake; stops the start
    ├── GroupFailed          too few trajectories of a prompt could finish
    ├── GroupAborted         someone asked the engine to abort the whole request
    ├── EngineError
    │   ├── CandidateFailed  one candidate failed; another may succeed
    │   ├── EngineRefused    the engine does not take this request; trying again does not help
    │   └── EngineDead       the engine is gone
    │       ├── EngineHung   the engine does nothing any more
    │       └── WeightsLost  its weights are undefined
    ├── StateError           the learned state cannot be read or written now
    │   ├── StateFull        the disk is full
    │   ├── StateDamaged     a state file is another program's, or damaged
    │   └── StateTooNew      a newer version wrote it
    ├── UpdateError          the weights were not updated; the old ones are served
    │   ├── UpdateRunning    another update is in progress
    │   ├── UpdateUnsupported  the weights of this server cannot be replaced
    │   ├── UpdateFailed     a phase failed or timed out
    │   └── DiskFull         the staging folder has no room for the weights
    └── IllegalMove          a bug: an event that a state machine does not allow
"""


class DartsError(Exception):
    """Base of everything this project raises on purpose."""


class InvalidRequest(DartsError, ValueError):
    """Bad input from a caller: nothing was started.

    It is a ``ValueError`` too, so that code that never heard of us also takes it for the caller's mistake.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(InvalidRequest):
    """What a caller asked for is not there, or not any more."""


class Conflict(InvalidRequest):
    """What a caller asked for contradicts what was asked for before, under the same name."""


class TooLarge(InvalidRequest):
    """The request's body has more bytes than the route takes."""


class Unauthorized(DartsError):
    """The caller showed no key that opens the route."""


class Forbidden(DartsError):
    """The route is not for this caller, and the server has no key that would open it."""


class Overloaded(DartsError):
    """Too much waits for the engine. ``retry_after``: seconds after which it is worth another try."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaReached(Overloaded):
    """The caller has too much under way."""


class ServerStopping(DartsError):
    """The server was told to stop, and takes no work. ``retry_after``: seconds after which it is worth another try."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class InvalidSetting(DartsError):
    """A setting that stops the start. The message names key, value and what is allowed."""


class GroupFailed(DartsError):
    """Too few trajectories of one prompt could finish."""


class GroupAborted(DartsError):
    """The request was aborted from outside while its group was running."""


class EngineError(DartsError):
    """Something went wrong in the engine. The engine's own exception is the ``__cause__``."""


class CandidateFailed(EngineError):
    """One candidate failed; another one may succeed."""


class EngineRefused(EngineError):
    """The engine does not take this request, and would not take it a second time."""


class EngineDead(EngineError):
    """The engine is gone; no candidate will ever finish."""


class EngineHung(EngineDead):
    """The engine has work and does nothing."""


class WeightsLost(EngineDead):
    """A weight update failed, and restoring the old weights failed too: every candidate would be wrong."""


class StateError(DartsError):
    """The learned state cannot be read or written now. The message names the file and the remedy."""


class StateFull(StateError):
    """The disk has no room for the learned state."""


class StateDamaged(StateError):
    """A state file, or a state to restore, is another program's or damaged. It was not changed."""


class StateTooNew(StateError):
    """A newer version of this server wrote the state. It was not changed."""


class UpdateError(DartsError):
    """The weights were not updated: the old version is served. The message says why."""


class UpdateRunning(UpdateError):
    """Another update is in progress."""


class UpdateUnsupported(UpdateError):
    """The weights of this server cannot be replaced. The message names the flag or property of the model."""


class UpdateFailed(UpdateError):
    """A phase of an update failed or timed out."""


class DiskFull(UpdateError):
    """The staging folder has no room for the weights."""


class IllegalMove(DartsError):
    """An event that is not legal in the state the group, the candidate or the weights are in."""
