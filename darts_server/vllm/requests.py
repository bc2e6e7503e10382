"""Carries what a request asks of shaping from vLLM's HTTP handlers to ``generate()``."""

from collections.abc import Awaitable, Callable, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from starlette.datastructures import State

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.options import checked_option
from darts_server.types import RequestOptions
from darts_server.vllm.compat import GENERATION_HANDLERS

RAW_SUFFIX = ":raw"
"""Added to a served model name: the same model, never shaped."""

XARG_PREFIX = "darts_"
ELSEWHERE = {
    "policy": "header X-Darts-Policy or the model name",
    "prompt_key": "header X-Darts-Prompt-Key",
    "group_id": "header X-Darts-Group",
    "group_size": "header X-Darts-Group",
}
"""By option, where it may stand instead of ``vllm_xargs``."""

NO_WISHES = RequestOptions()
_options: ContextVar[RequestOptions] = ContextVar("darts_request_options", default=NO_WISHES)
_shaped: ContextVar[list[str] | None] = ContextVar("darts_shaped", default=None)
_named: ContextVar[set[str] | None] = ContextVar("darts_named_prompts", default=None)
_demand: ContextVar["Demand | None"] = ContextVar("darts_demand", default=None)

Handler = Callable[..., Awaitable[Any]]
ReadOptions = Callable[[Mapping[str, str]], RequestOptions]


@dataclass(slots=True)
class Demand:
    """What the request that is being handled asks of the engine so far, over all its prompts.

    ``searches``: beam search asks anew for every token of every beam, and is let in once.
    """

    searches: bool = False
    candidates: int = 0


def demanded(n: int) -> int:
    """With ``n`` more, the trajectories that the request asks for, to be let in; 0 if it is in already."""
    demand = _demand.get() or Demand()
    if demand.searches and demand.candidates:
        return 0
    demand.candidates += n
    return demand.candidates


def current_options() -> RequestOptions:
    """What the request that is being handled asked for."""
    return _options.get()


def note_shaped(request_id: str) -> None:
    """A part of the request that is being handled is served as a group of that id."""
    if (shaped := _shaped.get()) is not None:
        shaped.append(request_id)


def note_named_prompt(fingerprint: str) -> None:
    """The caller's key is used for a prompt of the request that is being handled.

    Raises:
        InvalidRequest: the request has several prompts, whose lengths must not be remembered as one's.
    """
    if (named := _named.get()) is not None:
        named.add(fingerprint)
        if len(named) > 1:
            raise InvalidRequest(
                "X-Darts-Prompt-Key", "names one prompt, and the request has several; send them one by one"
            )


def with_raw_names(served: list[str]) -> list[str]:
    """The served names, each followed at the end by its unshaped alias."""
    return [*served, *(name + RAW_SUFFIX for name in served)]


def attach(state: State, read_options: ReadOptions, raw_names: Set[str]) -> None:
    """Have every generation handler note headers and model name before it calls ``generate()``."""
    for attribute, method in GENERATION_HANDLERS:
        if (serving := getattr(state, attribute, None)) is not None:
            setattr(serving, method, _noting(getattr(serving, method), read_options, raw_names))


def merged(options: RequestOptions, extra_args: Mapping[str, Any]) -> RequestOptions:
    """What header, alias and ``vllm_xargs`` ask together.

    Raises:
        InvalidRequest: an unknown ``darts_`` argument, an impossible value, or two places that contradict each other.
    """
    asked: dict[str, Any] = {}
    for name, value in extra_args.items():
        if not name.startswith(XARG_PREFIX):
            continue
        where, option = f"vllm_xargs.{name}", name.removeprefix(XARG_PREFIX)
        if option not in ELSEWHERE:
            raise InvalidRequest(where, f"unknown; known ones are {', '.join(XARG_PREFIX + o for o in ELSEWHERE)}")
        asked[option] = checked_option(option, value, where)
        if (other := getattr(options, option)) not in (None, asked[option]):
            raise InvalidRequest(
                where, f"{asked[option]!r} contradicts {other!r} of the {ELSEWHERE[option]}; say it in one place"
            )
    return replace(options, **asked)


def _noting(handler: Handler, read_options: ReadOptions, raw_names: Set[str]) -> Handler:
    @wraps(handler)
    async def noting(request: Any, raw_request: Any = None) -> Any:
        options = read_options({} if raw_request is None else raw_request.headers)
        if getattr(request, "model", None) in raw_names:
            options = replace(options, policy="off")
        groups: list[str] = []
        demand = Demand(searches=bool(getattr(request, "use_beam_search", False)))
        tokens = _options.set(options), _shaped.set(groups), _named.set(set()), _demand.set(demand)
        try:
            answer = await handler(request, raw_request)
        finally:
            _options.reset(tokens[0])
            _shaped.reset(tokens[1])
            _named.reset(tokens[2])
            _demand.reset(tokens[3])
        metadata = getattr(getattr(raw_request, "state", None), "request_metadata", None)
        if groups and metadata is not None:
            raw_request.state.darts_group_id = _told(groups, metadata.request_id)
        return answer

    return noting


def _told(groups: list[str], response_id: str) -> str:
    """What a response tells of its groups: its own id, which finds them all, or that of the one it shares."""
    shared = len(set(groups)) == 1 and not groups[0].startswith(response_id)
    return groups[0] if shared else response_id
