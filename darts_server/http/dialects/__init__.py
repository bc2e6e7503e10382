"""Routes and fields by which trainers call servers of their own: thin aliases of ours, one file for each trainer.

They are off unless ``--dialect`` names them. Each goes through the same checks, access rules and coordination as the
route of ours or of vLLM's that it stands for; :mod:`darts_server.http.security.route_table` says who may call it.
"""

from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, FastAPI

from darts_server.http.dialects import areal, nemo_rl, prime_rl, skyrl
from darts_server.http.dialects.controls import Controls
from darts_server.http.openapi import FAILURES
from darts_server.http.security.access import RouteAccess

ROUTES: Mapping[str, Callable[[Controls], APIRouter]] = {
    "areal": areal.routes,
    "prime-rl": prime_rl.routes,
    "skyrl": skyrl.routes,
}
CHECKED_BY_HANDLER: Mapping[str, Mapping[tuple[str, str], RouteAccess]] = {
    "skyrl": {("POST", skyrl.RPC): RouteAccess.ADMIN}  # it refuses all methods but three
}
"""Access of routes that the route table closes to admins too, and that these dialects open for some requests."""
EXTENSIONS = {"nemo-rl": nemo_rl.CompletionTokenIds}
"""Of the bodies of vLLM's generation routes."""


def add_routes(application: FastAPI, dialects: Sequence[str], controls: Controls) -> None:
    """Add the routes of these dialects, before vLLM's: a dialect may give one of those a second meaning."""
    api = APIRouter(tags=["dialects"], responses=FAILURES)
    for dialect in dialects:
        if dialect in ROUTES:
            api.include_router(ROUTES[dialect](controls))
    application.router.routes[:0] = api.routes


def opened_routes(dialects: Sequence[str]) -> dict[tuple[str, str], RouteAccess]:
    """Return the access of routes, by method and path, that differs from the route table's."""
    return {route: access for dialect in dialects for route, access in CHECKED_BY_HANDLER.get(dialect, {}).items()}


def extensions(dialects: Sequence[str]) -> list[nemo_rl.CompletionTokenIds]:
    """Create the extensions of these dialects."""
    return [EXTENSIONS[dialect]() for dialect in dialects if dialect in EXTENSIONS]
