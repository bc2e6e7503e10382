"""Read ``vllm_xargs``, vLLM's extra arguments of a request, on all routes."""

import json
from collections.abc import Mapping
from typing import Any

from darts_server.exceptions import InvalidRequest

NAME = "vllm_xargs"
SAMPLING = "sampling_params"


def read_xargs(request: Any) -> Mapping[str, Any]:
    """The extra arguments of a request of any route."""
    return getattr(request, NAME, None) or getattr(getattr(request, SAMPLING, None), "extra_args", None) or {}


async def move_xargs(request: Any, raw_request: Any) -> None:
    """Move extra arguments of the token route to where it has them, ``extra_args`` of the sampling parameters.

    Its model has no ``vllm_xargs`` and drops them, in the request and in the sampling parameters.

    Raises:
        InvalidRequest: they are no object, or are in two places with different values.
    """
    params = getattr(request, SAMPLING, None)
    if raw_request is None or params is None:
        return
    body = await raw_request.body()  # it was read before, and is kept
    if NAME.encode() not in body:
        return
    sent = json.loads(body)
    places = {NAME: sent.get(NAME), f"{SAMPLING}.{NAME}": (sent.get(SAMPLING) or {}).get(NAME)}
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
