"""Carries what a request asks of shaping from vLLM's HTTP handlers to ``generate()``."""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.types import RequestOptions
from darts_server.vllm.compat import GENERATION_HANDLERS

RAW_SUFFIX = ":raw"
"""Added to a served model name: the same model, never shaped."""

XARG_PREFIX = "darts_"
XARG_POLICY = "darts_policy"

NO_WISHES = RequestOptions()
_options: ContextVar[RequestOptions] = ContextVar("darts_request_options", default=NO_WISHES)
_shaped: ContextVar[list[str] | None] = ContextVar("darts_shaped", default=None)

Handler = Callable[..., Awaitable[Any]]
ReadOptions = Callable[[Mapping[str, str]], RequestOptions]


def current_options() -> RequestOptions:
    """What the request that is being handled asked for."""
    return _options.get()


def note_shaped(request_id: str) -> None:
    """A part of the request that is being handled is served as a group of that id."""
    if (shaped := _shaped.get()) is not None:
        shaped.append(request_id)


def with_raw_names(served: list[str]) -> list[str]:
    """The served names, each followed at the end by its unshaped alias."""
    return [*served, *(name + RAW_SUFFIX for name in served)]


def attach(state: State, read_options: ReadOptions, raw_names: frozenset[str]) -> None:
    """Have every generation handler note headers and model name before it calls ``generate()``."""
    for attribute, method in GENERATION_HANDLERS:
        if (serving := getattr(state, attribute, None)) is not None:
            setattr(serving, method, _noting(getattr(serving, method), read_options, raw_names))


def merged_policy(options: RequestOptions, extra_args: Mapping[str, Any]) -> str | None:
    """The policy named by header, alias or ``vllm_xargs``.

    Raises:
        InvalidRequest: an unknown ``darts_`` argument, or two places that contradict each other.
    """
    for name, value in extra_args.items():
        if name.startswith(XARG_PREFIX) and name != XARG_POLICY:
            raise InvalidRequest(f"vllm_xargs.{name}", f"unknown; the known one is {XARG_POLICY}")
        if name == XARG_POLICY and not isinstance(value, str):
            raise InvalidRequest(f"vllm_xargs.{name}", f"must be the name of a policy, got {value!r}")
    named = extra_args.get(XARG_POLICY)
    if named is not None and options.policy not in (None, named):
        raise InvalidRequest(
            f"vllm_xargs.{XARG_POLICY}", f"{named!r} contradicts {options.policy!r} of header or model name; name one"
        )
    return options.policy if named is None else str(named)


def _noting(handler: Handler, read_options: ReadOptions, raw_names: frozenset[str]) -> Handler:
    @wraps(handler)
    async def noting(request: Any, raw_request: Any = None) -> Any:
        options = read_options({} if raw_request is None else raw_request.headers)
        if getattr(request, "model", None) in raw_names:
            options = RequestOptions(policy="off")
        groups: list[str] = []
        tokens = _options.set(options), _shaped.set(groups)
        try:
            answer = await handler(request, raw_request)
        finally:
            _options.reset(tokens[0])
            _shaped.reset(tokens[1])
        metadata = getattr(getattr(raw_request, "state", None), "request_metadata", None)
        if groups and metadata is not None:
            raw_request.state.darts_group_id = metadata.request_id
        return answer

    return noting
