"""Types of the values of settings."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode

from darts_server.types import POLICIES

NAMES = r"^$|^N(,N)*$".replace("N", r"(\*|(\*\.)?[^\s,/@:*]+)")
"""A comma-separated list of host names without port, or patterns of them: ``*.example.com``, ``*``."""

RULES = r"^R(,R)*$".replace("R", "(uniform|darts|cut|cap|limit|defer)")
"""What the policy auto may choose, separated by commas."""

LogFormat = Literal["console", "json"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
if TYPE_CHECKING:
    Policy = str
else:
    Policy = Literal[tuple(POLICIES)]

Dialect = Literal["areal", "nemo-rl", "prime-rl", "skyrl"]
"""Trainers with routes or fields of their own."""


def _names(value: object) -> object:
    """Parse ``areal,skyrl``, or a list."""
    names = value.split(",") if isinstance(value, str) else value
    stripped = [str(name).strip() for name in names] if isinstance(names, list | tuple) else [str(names)]
    if unknown := [name for name in stripped if name and name not in get_args(Dialect)]:
        raise ValueError(f"{unknown[0]!r} is unknown; known ones are {', '.join(get_args(Dialect))}")
    return tuple(dict.fromkeys(filter(None, stripped)))


Dialects = Annotated[tuple[Dialect, ...], NoDecode, BeforeValidator(_names)]


def _detection_points(value: Any) -> object:
    """Parse ascending whole numbers from ``128,512`` or from a list."""
    try:
        points = [int(part) for part in (value.split(",") if isinstance(value, str) else value)]
    except (TypeError, ValueError):
        points = []
    if not points or min(points) < 1:
        raise ValueError("must be positive whole numbers, separated by commas")
    return tuple(sorted(set(points)))


DetectAt = Annotated[tuple[int, ...], NoDecode, BeforeValidator(_detection_points)]


def _group_pattern(text: str) -> str:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression: {error}") from error
    if text and groups != 1:
        raise ValueError(f"must have one pair of parentheses, for the group's name, got {groups}")
    return text


GroupPattern = Annotated[str, AfterValidator(_group_pattern)]
