"""Our request headers on vLLM's routes."""

from collections.abc import Mapping

from darts_server.exceptions import InvalidRequest
from darts_server.types import RequestOptions

PREFIX = "x-darts-"
POLICY = "x-darts-policy"
KNOWN = (POLICY,)


def read_options(headers: Mapping[str, str]) -> RequestOptions:
    """What the headers ask of shaping. Names are compared without regard to case.

    Raises:
        InvalidRequest: a header of ours that is unknown or empty. A misspelt one must not silently shape an evaluation.
    """
    ours = {name.lower(): value.strip() for name, value in headers.items() if name.lower().startswith(PREFIX)}
    for name, value in ours.items():
        if name not in KNOWN:
            raise InvalidRequest(name, f"unknown header; known ones are {', '.join(KNOWN)}")
        if not value:
            raise InvalidRequest(name, "empty; name a policy, or leave the header out")
    return RequestOptions(policy=ours.get(POLICY))
