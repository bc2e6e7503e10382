"""Translate our exceptions to HTTP responses in OpenAI's error form."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from darts_server import exceptions
from darts_server.exceptions import DartsError, EngineRefused, InvalidRequest, SessionOver, Unauthorized

STATUS: dict[type[DartsError], HTTPStatus] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    exceptions.NotFound: HTTPStatus.NOT_FOUND,
    exceptions.Conflict: HTTPStatus.CONFLICT,
    exceptions.TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    exceptions.NotAcceptable: HTTPStatus.NOT_ACCEPTABLE,
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    exceptions.Forbidden: HTTPStatus.FORBIDDEN,
    exceptions.Overloaded: HTTPStatus.TOO_MANY_REQUESTS,
    exceptions.GroupAborted: HTTPStatus.SERVICE_UNAVAILABLE,
    exceptions.EngineBusy: HTTPStatus.SERVICE_UNAVAILABLE,
    exceptions.EngineDead: HTTPStatus.SERVICE_UNAVAILABLE,
    EngineRefused: HTTPStatus.BAD_REQUEST,
    exceptions.ServerStopping: HTTPStatus.SERVICE_UNAVAILABLE,
    exceptions.StateError: HTTPStatus.SERVICE_UNAVAILABLE,
    exceptions.StateFull: HTTPStatus.INSUFFICIENT_STORAGE,
    exceptions.UpdateError: HTTPStatus.SERVICE_UNAVAILABLE,
    exceptions.UpdateRunning: HTTPStatus.CONFLICT,
    exceptions.UpdateUnsupported: HTTPStatus.NOT_IMPLEMENTED,
    exceptions.DiskFull: HTTPStatus.INSUFFICIENT_STORAGE,
    DartsError: HTTPStatus.INTERNAL_SERVER_ERROR,
}

SESSION_OVER = "darts_session_over"
"""Type of errors of a session that is over, whatever their status."""
# vLLM's names for the statuses. OpenAI's names where vLLM has no name.
TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.NOT_ACCEPTABLE: "NotAcceptableError",
    HTTPStatus.CONFLICT: "ConflictError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.NOT_IMPLEMENTED: "NotImplementedError",
}


def status_of(error: DartsError) -> HTTPStatus:
    if isinstance(error, SessionOver):
        return HTTPStatus(error.status)
    # The closest base class in the table counts.
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def error_fields(error: DartsError) -> dict[str, Any]:
    status = status_of(error)
    # The engine's refusal may be caused by our own check of a field.
    cause = error.__cause__ if isinstance(error, EngineRefused) else error
    error_type = TYPES.get(status, "InternalServerError")
    if isinstance(error, SessionOver):
        error_type = SESSION_OVER
    return {
        "message": str(error),
        "type": error_type,
        "param": cause.field if isinstance(cause, InvalidRequest) else None,
        "code": status.value,
    }


def headers_of(error: DartsError) -> dict[str, str]:
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, SessionOver):
        # The clients of OpenAI and Anthropic send a request again after 409, unless this header forbids it.
        return {"X-Should-Retry": "false"}
    if error.retry_after is None:
        return {}
    return {"Retry-After": str(error.retry_after)}


def install_handlers(app: FastAPI) -> None:
    """Answer our exceptions and HTTPException in OpenAI's form. vLLM has another form for HTTPException."""

    @app.exception_handler(DartsError)
    async def respond(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, DartsError)
        return JSONResponse(
            {"error": error_fields(error)}, status_code=status_of(error).value, headers=headers_of(error)
        )

    @app.exception_handler(HTTPException)
    async def respond_to_http_exception(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        body = {"message": error.detail, "type": TYPES.get(status, status.phrase), "param": None, "code": status.value}
        return JSONResponse({"error": body}, status_code=status.value, headers=error.headers)
