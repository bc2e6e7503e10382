"""Our request headers on vLLM's routes."""

from collections.abc import Mapping

from darts_server.exceptions import InvalidRequest
from darts_server.http.shaping.options import checked_option
from darts_server.types import RequestOptions

PREFIX = "x-darts-"
POLICY = "x-darts-policy"
PROMPT_KEY = "x-darts-prompt-key"
GROUP = "x-darts-group"
SESSION = "x-darts-session"
ON_STOP = "x-darts-on-stop"
KNOWN = (POLICY, PROMPT_KEY, GROUP, SESSION, ON_STOP)
GROUP_PARTS = {"id": "group_id", "size": "group_size"}


def read_options(headers: Mapping[str, str]) -> RequestOptions:
    """Parse our request headers. Names are case-insensitive.

    Raises:
        InvalidRequest: one of our headers is unknown, empty, malformed or repeated with different values. A misspelt
            header must not silently shape an evaluation.
    """
    ours: dict[str, str] = {}
    for name, value in headers.items():
        if not (name := name.lower()).startswith(PREFIX):
            continue
        if name not in KNOWN:
            raise InvalidRequest(name, f"unknown header; supported headers are {', '.join(KNOWN)}")
        value = _text(value)
        if ours.setdefault(name, value) != value:
            raise InvalidRequest(name, f"repeated with the values {ours[name]!r} and {value!r}; send it once")
    options = {} if GROUP not in ours else _group(ours[GROUP])
    for name, option in ((POLICY, "policy"), (PROMPT_KEY, "prompt_key"), (SESSION, "session"), (ON_STOP, "on_stop")):
        if name in ours:
            options[option] = checked_option(option, ours[name], name)
    return RequestOptions(**options)  # type: ignore[arg-type]  # checked_option returns the type of each option


def _group(value: str) -> dict[str, str | int]:
    options: dict[str, str | int] = {}
    for part in value.split(";"):
        name, equals, text = part.partition("=")
        option = GROUP_PARTS.get(name.strip().lower())
        if option is None or not equals or option in options:
            raise InvalidRequest(GROUP, f"write id=STRING;size=INT, or one of the two parts, not {value!r}")
        options[option] = checked_option(option, text.strip(), GROUP)
    return options


def _text(value: str) -> str:
    """Decode a header's value: HTTP servers decode it as Latin-1, but most clients send UTF-8."""
    try:
        return value.encode("latin-1").decode().strip()
    except UnicodeError:
        return value.strip()
