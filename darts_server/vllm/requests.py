"""Pass a request's shaping options from vLLM's HTTP handlers to ``generate()``, in context variables."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Set
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Protocol

from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.identifiers import SESSION_HEADERS, check_name
from darts_server.serving.admission import Ticket
from darts_server.types import OFF, RequestOptions
from darts_server.vllm.compat import GENERATION_HANDLERS

RAW_SUFFIX = ":raw"
"""Suffix of the alias under which a served model is never shaped."""
REQUEST_ID_HEADER = "X-Request-Id"
"""To vLLM it goes before the ``request_id`` of a body."""

XARGS = "vllm_xargs"
SAMPLING_PARAMS = "sampling_params"

Handler = Callable[..., Awaitable[Any]]
ReadOptions = Callable[[Mapping[str, str]], RequestOptions]
CheckOptions = Callable[[RequestOptions, Mapping[str, Any]], None]
"""Checks the options of header and model name with those in ``vllm_xargs``; raises ``InvalidRequest``."""


class Extension(Protocol):
    """Reads further fields of a parsed request, and adds some to its answer."""

    def before(self, request: Any) -> None:
        """Raises ``InvalidRequest``."""
        ...

    def after(self, request: Any, answer: Any) -> None: ...


@dataclass(slots=True)
class RouteCall:
    """What ``generate()`` reads of the call of a route that it serves, and notes.

    ``options``: of its headers and model name. ``session``: that a header names. ``beams``: of a beam search, over all
    its prompts; it calls ``generate()`` for every token of every beam, and is admitted once: ``ticket`` holds them from
    the first call to the end. ``groups``: ids of those that it is served as. ``named``: prompts that the caller's
    prompt key is used for.
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    session: str | None = None
    beams: int = 0
    ticket: Ticket | None = None
    groups: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    def name_prompt(self, fingerprint: str, key: str | None) -> str:
        """Return the key of a prompt's statistics: the caller's, if it has sent one.

        Raises:
            InvalidRequest: the request has several prompts, whose lengths must not be recorded under one key.
        """
        if key is None:
            return fingerprint
        self.named.add(fingerprint)
        if len(self.named) > 1:
            raise InvalidRequest(
                "X-Darts-Prompt-Key", "names one prompt, and the request has several; send them one by one"
            )
        return key


_route: ContextVar[RouteCall | None] = ContextVar("darts_request", default=None)  # vLLM's handlers pass nothing on


def current_route() -> RouteCall:
    """Return the call of a route that is being handled; a new one outside of them."""
    return _route.get() or RouteCall()


def attach(
    state: State,
    read_options: ReadOptions,
    raw_names: Set[str],
    check_options: CheckOptions = lambda options, xargs: None,
    extensions: Iterable[Extension] = (),
) -> None:
    """Wrap every generation handler, so that it reads headers and model name before it calls ``generate()``.

    ``check_options``: raises for options that ``generate()`` would refuse. Streams of the Responses API call that after
    their status was sent. ``extensions``: further fields of requests and answers.
    """
    extensions = tuple(extensions)

    def behind(handler: Handler) -> Handler:
        @wraps(handler)
        async def handle(request: Any, raw_request: Any = None) -> Any:
            headers: Mapping[str, str] = {} if raw_request is None else raw_request.headers
            # Before vLLM logs the id.
            check_name("request_id", str(getattr(request, "request_id", None) or ""))
            check_name(REQUEST_ID_HEADER, headers.get(REQUEST_ID_HEADER.lower(), ""))
            for extension in extensions:
                extension.before(request)
            options = read_options(headers)
            if getattr(request, "model", None) in raw_names:
                options = replace(options, policy=OFF)
            await move_xargs(request, raw_request)
            params = getattr(request, SAMPLING_PARAMS, None)
            xargs: Mapping[str, Any] = getattr(request, XARGS, None) or getattr(params, "extra_args", None) or {}
            # Of the Responses API, which calls `generate` while its stream is read.
            is_late = hasattr(request, "input") and hasattr(request, "previous_response_id")
            if is_late:
                check_options(options, xargs)
            beams = 0
            if getattr(request, "use_beam_search", False):
                prompts, beams = getattr(request, "prompt", None), getattr(request, "n", None) or 1
                if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
                    beams *= len(prompts)
                if (policy := xargs.get("darts_policy", options.policy)) not in (None, OFF):
                    raise InvalidRequest("policy", f"{policy!r} cannot shape a beam search; leave out one of them")
            session_header = next((name for name in SESSION_HEADERS if headers.get(name)), "")
            check_name(session_header, session := headers.get(session_header, ""))
            call = RouteCall(options, session or None, beams)
            token = _route.set(call)
            try:
                answer = await handler(request, raw_request)
            finally:
                _route.reset(token)
                if call.ticket is not None:
                    call.ticket.release()
            for extension in extensions:
                extension.after(request, answer)
            metadata = getattr(getattr(raw_request, "state", None), "request_metadata", None)
            if call.groups and metadata is not None:
                # What finds the groups: the id of the response, or that of the one it shares with other requests.
                shared = len(set(call.groups)) == 1 and not call.groups[0].startswith(metadata.request_id)
                raw_request.state.darts_group_id = call.groups[0] if shared else metadata.request_id
            return _stream_in(call, answer) if is_late and isinstance(answer, AsyncGenerator) else answer

        return handle

    for attribute, method in GENERATION_HANDLERS:
        if (serving := getattr(state, attribute, None)) is not None:
            setattr(serving, method, behind(getattr(serving, method)))


async def _stream_in(call: RouteCall, answer: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Read a stream with the context of its request, in the task that sends it and ends with it."""
    _route.set(call)
    async with aclosing(answer):
        async for part in answer:
            yield part


async def move_xargs(request: Any, raw_request: Any) -> None:
    """Move extra arguments of the token route to where it has them, ``extra_args`` of the sampling parameters.

    Its model has no ``vllm_xargs`` and drops them, in the request and in the sampling parameters.

    Raises:
        InvalidRequest: they are no object, or are in two places with different values.
    """
    params = getattr(request, SAMPLING_PARAMS, None)
    if raw_request is None or params is None:
        return
    body = await raw_request.body()  # it was read before, and is kept
    if XARGS.encode() not in body:
        return
    sent = json.loads(body)
    places = {XARGS: sent.get(XARGS), f"{SAMPLING_PARAMS}.{XARGS}": (sent.get(SAMPLING_PARAMS) or {}).get(XARGS)}
    merged = dict(params.extra_args or {})
    for place, xargs in places.items():
        if xargs is None:
            continue
        if not isinstance(xargs, dict):
            raise InvalidRequest(place, "must be an object; correct or omit it")
        for name, value in xargs.items():
            if merged.setdefault(name, value) != value:
                raise InvalidRequest(f"{place}.{name}", "has another value in another place; send it once")
    params.extra_args = merged or None
