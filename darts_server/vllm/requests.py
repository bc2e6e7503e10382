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
from darts_server.types import RequestOptions
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
class BeamSearch:
    """A beam search calls ``generate()`` for every token of every beam, and is admitted once.

    ``beams``: over all its prompts. ``ticket``: holds them from the first call to the end; ``None`` before.
    """

    beams: int
    ticket: Ticket | None = None


@dataclass(slots=True)
class _Context:
    """What ``generate()`` reads of the current request, and notes.

    ``groups``: ids of those that it is served as. ``named``: prompts that the caller's prompt key is used for.
    """

    options: RequestOptions
    search: BeamSearch | None = None
    session: str | None = None
    groups: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)


_context: ContextVar[_Context | None] = ContextVar("darts_request", default=None)


def current_beam_search() -> BeamSearch | None:
    """The beam search of the current request, if it is one."""
    context = _context.get()
    return None if context is None else context.search


def current_options() -> RequestOptions:
    """The options of the current request."""
    context = _context.get()
    return RequestOptions() if context is None else context.options


def current_session() -> str | None:
    """The session that a header of the current request names, if any."""
    context = _context.get()
    return None if context is None else context.session


def note_shaped(request_id: str) -> None:
    """Record that a part of the current request is served as a group of that id."""
    if (context := _context.get()) is not None:
        context.groups.append(request_id)


def note_named_prompt(fingerprint: str) -> None:
    """Record that the caller's prompt key is used for a prompt of the current request.

    Raises:
        InvalidRequest: the request has several prompts, whose lengths must not be recorded under one key.
    """
    if (context := _context.get()) is not None:
        context.named.add(fingerprint)
        if len(context.named) > 1:
            raise InvalidRequest(
                "X-Darts-Prompt-Key", "names one prompt, and the request has several; send them one by one"
            )


def with_raw_names(served: list[str]) -> list[str]:
    """Append the unshaped alias of each served name."""
    return [*served, *(name + RAW_SUFFIX for name in served)]


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

    async def read(request: Any, raw_request: Any) -> _Context:
        headers: Mapping[str, str] = {} if raw_request is None else raw_request.headers
        _check_ids(request, headers)
        for extension in extensions:
            extension.before(request)
        options = read_options(headers)
        if getattr(request, "model", None) in raw_names:
            options = replace(options, policy="off")
        await move_xargs(request, raw_request)
        if _is_response_request(request):
            check_options(options, read_xargs(request))
        search = None
        if getattr(request, "use_beam_search", False):
            search = BeamSearch(_count_beams(request))
            _check_unshaped(options, read_xargs(request))
        return _Context(options, search, _read_session(headers))

    def behind(handler: Handler) -> Handler:
        @wraps(handler)
        async def handle(request: Any, raw_request: Any = None) -> Any:
            context = await read(request, raw_request)
            token = _context.set(context)
            try:
                answer = await handler(request, raw_request)
            finally:
                _context.reset(token)
                if context.search is not None and context.search.ticket is not None:
                    context.search.ticket.release()
            for extension in extensions:
                extension.after(request, answer)
            metadata = getattr(getattr(raw_request, "state", None), "request_metadata", None)
            if context.groups and metadata is not None:
                raw_request.state.darts_group_id = _answered_id(context.groups, metadata.request_id)
            # The Responses API calls `generate` while its stream is read.
            is_late = isinstance(answer, AsyncGenerator) and _is_response_request(request)
            return _stream_in(context, answer) if is_late else answer

        return handle

    for attribute, method in GENERATION_HANDLERS:
        if (serving := getattr(state, attribute, None)) is not None:
            setattr(serving, method, behind(getattr(serving, method)))


async def _stream_in(context: _Context, answer: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Read a stream with the context of its request, in the task that sends it and ends with it."""
    _context.set(context)
    async with aclosing(answer):
        async for part in answer:
            yield part


def read_xargs(request: Any) -> Mapping[str, Any]:
    """The extra arguments of a request of any route."""
    return getattr(request, XARGS, None) or getattr(getattr(request, SAMPLING_PARAMS, None), "extra_args", None) or {}


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


def _is_response_request(request: Any) -> bool:
    """Whether a request is one of the Responses API."""
    return hasattr(request, "input") and hasattr(request, "previous_response_id")


def _check_unshaped(options: RequestOptions, xargs: Mapping[str, Any]) -> None:
    policy = xargs.get("darts_policy", options.policy)
    if policy not in (None, "off"):
        raise InvalidRequest("policy", f"{policy!r} cannot shape a beam search; leave out one of them")


def _read_session(headers: Mapping[str, str]) -> str | None:
    """
    Raises:
        InvalidRequest: its name is too long, or not printable.
    """
    for name in SESSION_HEADERS:
        if session := headers.get(name):
            check_name(name, session)
            return session
    return None


def _check_ids(request: Any, headers: Mapping[str, str]) -> None:
    """Check the id that vLLM uses for a request, before vLLM logs it.

    Raises:
        InvalidRequest
    """
    check_name("request_id", str(getattr(request, "request_id", None) or ""))
    check_name(REQUEST_ID_HEADER, headers.get(REQUEST_ID_HEADER.lower(), ""))


def _count_beams(request: Any) -> int:
    prompts, beams = getattr(request, "prompt", None), getattr(request, "n", None) or 1
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        return len(prompts) * beams
    return beams


def _answered_id(groups: list[str], response_id: str) -> str:
    """The id that finds a response's groups: its own, or that of the one group it shares with other requests."""
    shared = len(set(groups)) == 1 and not groups[0].startswith(response_id)
    return groups[0] if shared else response_id
