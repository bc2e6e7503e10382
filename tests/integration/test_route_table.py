"""Every route of the app, with all that vLLM's flags can add, is in the route table."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import vllm.entrypoints
from fastapi import FastAPI
from starlette.routing import Mount, WebSocketRoute
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask

from darts_server import app, settings
from darts_server.engine.scripted import Script, ScriptedEngine
from darts_server.http.security.access import Access
from darts_server.http.security.route_table import ANY, TABLE
from darts_server.offline.demo.server import MODEL
from darts_server.serving.gate import Gate
from darts_server.serving.lifecycle import Lifecycle
from darts_server.store import Store
from darts_server.verify.verifiers import Verifiers
from darts_server.vllm import flags
from darts_server.weights.staging import Staging

ENTRYPOINTS = Path(vllm.entrypoints.__path__[0])
OTHER_APPS = {"launchers/dp_supervisor.py", "cli/preload.py"}
"""Apps of processes that we do not start."""
DECLARED = re.compile(r"@(?:router|app)\.(get|post|put|patch|delete|head|websocket)\(\s*\"(/[^\"]*)\"")
REMEDY = "put it in darts_server/http/security/route_table.py: is it for everyone, any key, an admin key, or closed?"
EVERYTHING = (
    *("--enable-scale-out", "--enable-tokenizer-info-endpoint", "--enable-offline-docs", "--enable-lora"),
    *("--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp/profiles"}'),
)


@pytest.fixture(scope="module")
def full_app() -> Iterator[FastAPI]:
    """The app with every flag that adds routes."""
    with pytest.MonkeyPatch.context() as patch, Store() as store, Staging() as staging, ExitStack() as closing:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        args = flags.parse([str(MODEL), *EVERYTHING])
        args.enable_fault_tolerance = True
        built = build_app(args, tuple(tasks(SupportedTask)))
        port, llm = ScriptedEngine(lambda *_: Script(1)), SimpleNamespace(gate=Gate(), set_drafting=Mock())
        engine: Any = SimpleNamespace(
            llm=llm, port=port, renderer=Mock(), model=Mock(), model_name="routes", source="routes", fingerprint=""
        )
        defaults = settings.load({"dialect": "areal,nemo-rl,prime-rl,skyrl"}, None)
        rooms = app.make_rooms(defaults, engine, Access(), store, staging, closing, Verifiers([]))
        built.middleware_stack = None
        app.extend_app(built, rooms, defaults, Access(), Lifecycle(), "routes")
        yield built


def tasks(kind: Any) -> list[Any]:
    return [kind] if isinstance(kind, str) else [task for part in get_args(kind) for task in tasks(part)]


def routes(application: FastAPI) -> set[tuple[str, str]]:
    """Return method and path of each route."""
    found = set()
    for route in application.routes:
        path = getattr(route, "path", None)
        assert path is not None, f"{route!r} has no path: the route table cannot name it"
        if isinstance(route, Mount):
            found.add(("GET", path + "{rest:path}"))
        else:
            methods = {"WEBSOCKET"} if isinstance(route, WebSocketRoute) else getattr(route, "methods", None) or set()
            assert methods
            found |= {(method, path) for method in methods - {"HEAD"}}
    return found


def test_every_route_of_the_app_is_in_the_table(full_app: FastAPI) -> None:
    found = routes(full_app)
    assert {
        ("POST", "/collective_rpc"),
        ("POST", "/v1/completions"),
        ("GET", "/darts/v1/policy"),
        ("POST", "/areal_update_weights"),
    } <= found
    unclassified = [each for each in sorted(found) if not is_listed(*each)]
    assert not unclassified, REMEDY


def is_listed(method: str, template: str) -> bool:
    """Whether the table has a route as it is declared, and not only a pattern that matches it."""
    return any({method, ANY} & set(listed.get(template, "").split()) for listed in TABLE.values())


def test_no_route_handles_options_requests_which_need_no_key(full_app: FastAPI) -> None:
    assert not [path for method, path in routes(full_app) if method == "OPTIONS"]


def test_only_the_paths_of_sessions_are_read_before_the_security_middleware(full_app: FastAPI) -> None:
    names = [middleware.cls.__name__ for middleware in full_app.user_middleware]  # type: ignore[attr-defined]  # classes
    assert names[:2] == ["SessionPaths", "SecurityMiddleware"]
    assert not [each for each in full_app.user_middleware if "Authentication" in each.cls.__name__]  # type: ignore[attr-defined]  # a class


def test_every_route_in_vllms_source_is_in_the_table() -> None:
    """Includes those that only other models, tasks and flags add."""
    declared = {
        (method.upper(), path)
        for file in ENTRYPOINTS.rglob("*.py")
        if str(file.relative_to(ENTRYPOINTS)) not in OTHER_APPS
        for method, path in DECLARED.findall(file.read_text())
    }
    assert len(declared) > 60
    unclassified = [each for each in sorted(declared) if not is_listed(*each)]
    assert not unclassified, REMEDY
