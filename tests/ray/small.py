"""``tests.ray.small:app``: what ``darts_server.ray:app`` builds, with small servers in place of darts-servers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from darts_server.ray.settings import read_arguments


def app(arguments: Mapping[str, object]) -> Any:
    """Build the application."""
    from darts_server.ray.application import build

    spec = read_arguments(arguments)
    return build(replace(spec, server=replace(spec.server, child="tests.ray.child")))
