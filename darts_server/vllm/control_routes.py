"""vLLM's own control routes, whose handlers turn every error into a 500: ours keep their status and form."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from darts_server.exceptions import DartsError

ABORT = "/abort_requests"
PATHS = frozenset({"/pause", "/resume", ABORT})
"""Those whose handlers catch all exceptions."""

Handler = Callable[..., Awaitable[Any]]

_errors: ContextVar[list[DartsError] | None] = ContextVar("darts_control_errors", default=None)
_aborts: ContextVar[bool] = ContextVar("darts_aborts", default=False)


def attach(application: FastAPI) -> None:
    """Wrap the handlers."""
    for route in application.routes:
        if isinstance(route, APIRoute) and route.path in PATHS and route.dependant.call is not None:
            route.dependant.call = _keep_own_errors(route.dependant.call, is_abort=route.path == ABORT)


@contextmanager
def note_own_errors() -> Iterator[None]:
    """Note the errors of ours that are raised inside, for the caller of the route."""
    try:
        yield
    except DartsError as error:
        if (errors := _errors.get()) is not None:
            errors.append(error)
        raise


@contextmanager
def abort_route() -> Iterator[bool]:
    """Whether the route that aborts requests is being handled. Inside it counts as no longer handled."""
    token = _aborts.set(False)
    try:
        yield token.old_value is True
    finally:
        _aborts.reset(token)


def _keep_own_errors(handler: Handler, *, is_abort: bool) -> Handler:
    @wraps(handler)
    async def handle(**values: Any) -> Any:
        errors: list[DartsError] = []
        tokens = _errors.set(errors), _aborts.set(is_abort)
        try:
            answer = await handler(**values)
        finally:
            _errors.reset(tokens[0])
            _aborts.reset(tokens[1])
        if errors:
            raise errors[0]
        return answer

    return handle
