"""Names of vLLM that we use: the installed version has the signatures that were recorded from the newest version.

Where versions differ, our code works with stand-ins for each.
"""

import ast
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import vllm
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

import darts_server.vllm
from darts_server.vllm import compat
from darts_server.vllm.compat import COMPARED_SERIES, GENERATION_HANDLERS, TESTED_SERIES, version_warning, vllm_version
from tests.vllm.signatures.compare import MOVED, RECORD, compare, signature, unpacked

ROOM = Path(darts_server.vllm.__file__).parent
SOURCES = [*sorted(ROOM.rglob("*.py")), ROOM.parents[1] / "examples" / "tiny_rl" / "engine.py"]
NODES = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
INSTALLED = ".".join((vllm_version() or "").split(".")[:2])
RECORDED: dict[str, str] = json.loads(RECORD.read_text())
NEW_IN_33 = {
    # Chunks of a chat's stream are objects.
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.chat_completion_stream_generator_raw",
    # A flag, and the renderer's option for it.
    "vllm.entrypoints.common.cli_args:FrontendArgs.reasoning_effort_map",
    "vllm.renderers.online_renderer:OnlineRenderer.__init__",
    # A module became a package.
    "vllm.renderers.chat_utils:load_chat_template",
    # A pause that rejects new requests.
    "vllm.v1.engine.core_client:AsyncMPClient.pause_generation_async",
    # It has three parameters more, which we pass on.
    "vllm.v1.sample.rejection_sampler:rejection_sample",
}
DIFFERENT = {
    "0.31": NEW_IN_33
    | {
        # It has one parameter more.
        "vllm.entrypoints.launchers.launcher:serve_http",
        # We create no such object.
        "vllm.v1.core.sched.output:SchedulerOutput",
        # It has one parameter less.
        "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
    },
    "0.32": NEW_IN_33,
    "0.33": set[str](),
}
"""Names that differ from the newest version, for each series. Our code works with all."""
EARLIER = {
    ("vllm.entrypoints.chat_utils", "load_chat_template"),
    ("vllm.entrypoints.launchers", "cli_args"),
    ("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),
}
"""Imports of earlier places of moved names."""


def test_the_installed_vllm_has_the_signatures_of_the_newest_vllm() -> None:
    installed = Path(vllm.__file__).parents[1]
    assert {name for name in RECORDED if signature(installed, name) != RECORDED[name]} == DIFFERENT[INSTALLED]


def test_every_name_that_we_import_is_recorded() -> None:
    # If this fails, add the name to the file of signatures and record the file again, see extract.py.
    modules = {name.partition(":")[0] for name in RECORDED}
    imported = {
        (node.module or "", alias.name)
        for node in NODES
        if isinstance(node, ast.ImportFrom) and re.match(r"vllm\b", node.module or "") and not node.level
        for alias in node.names
    }
    missing = {name for name in imported if ":".join(name) not in RECORDED and ".".join(name) not in modules}
    assert missing == EARLIER


def test_every_flag_that_we_read_is_a_flag_of_vllm() -> None:
    read = {
        node.attr
        for node in NODES
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
    }
    fields = {name.rpartition(".")[2] for name in RECORDED if "FrontendArgs." in name or "EngineArgs." in name}
    added = {name.partition("[")[2].strip("-]").replace("-", "_") for name in RECORDED if "make_arg_parser[" in name}
    assert {"host", "model_tag", "headless"} <= read <= fields | added


def test_the_generation_handlers_exist_and_take_a_request_and_a_raw_request() -> None:
    makers = {name.partition("[")[2] for name in RECORDED}
    methods = {name.rpartition(".")[2]: signature for name, signature in RECORDED.items()}
    for attribute, method in GENERATION_HANDLERS:
        assert f"state.{attribute}]" in makers
        assert methods[method] == "async def (self, request, raw_request=)"


@pytest.mark.parametrize("version", [None, "0.310.0", "0.34.1", "0.26.0", *(f"{series}.0" for series in TESTED_SERIES)])
def test_only_versions_of_other_series_give_a_warning(version: str | None) -> None:
    warning = version_warning(version)
    if version is not None and version.rpartition(".")[0] in TESTED_SERIES:
        assert warning is None
    else:
        assert warning == f"vLLM {version} is not tested with darts-server; 0.31 and 0.32 are"


def test_a_version_that_was_only_compared_gives_a_warning_that_says_so() -> None:
    assert RECORD.stem == COMPARED_SERIES
    assert COMPARED_SERIES not in TESTED_SERIES
    assert version_warning("0.33.0") == (
        "vLLM 0.33.0 is not tested with darts-server, only its source was compared; 0.31 and 0.32 are"
    )


# --- differences ----------------------------------------------------------------


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    """Let `name` be a module with these attributes, and its parents packages that have it."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, last = name.rpartition(".")
    if parent not in sys.modules:
        stand_in(monkeypatch, parent, __path__=[])
    monkeypatch.setattr(sys.modules[parent], last, module, raising=False)
    return module


def test_flags_are_found_at_the_places_of_the_installed_version_and_of_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert callable(compat.import_cli_args().make_arg_parser)
    moved = stand_in(monkeypatch, "vllm.entrypoints.common.cli_args")
    assert compat.import_cli_args() is moved


def test_a_package_without_the_moved_modules_is_passed_over_as_in_vllm_32(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "vllm.entrypoints.common", __path__=[])
    assert callable(compat.import_cli_args().make_arg_parser)
    compat.prepare_environment()


def test_the_environment_is_prepared_by_the_function_at_its_new_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stand_in(monkeypatch, "vllm.entrypoints.common.startup", cli_env_setup=lambda: calls.append("called"))
    compat.prepare_environment()
    assert calls == ["called"]


def test_the_renderer_gets_the_map_of_reasoning_efforts_if_vllm_has_the_flag() -> None:
    efforts = {"medium": "low"}
    assert compat.renderer_options(Namespace(reasoning_effort_map=efforts)) == {"reasoning_effort_map": efforts}
    assert compat.renderer_options(Namespace()) == {}


def test_an_error_of_a_stream_is_found_in_text_and_in_objects() -> None:
    error = ErrorInfo(message="was aborted", type="InternalServerError", param=None, code=503)
    response = ErrorResponse(error=error)
    assert compat.find_stream_error(f"data: {response.model_dump_json()}\n\n") == error.model_dump()
    assert compat.find_stream_error(response) == error.model_dump()
    assert compat.find_stream_error('data: {"choices": []}\n\n') is None
    assert compat.find_stream_error(SimpleNamespace(choices=[])) is None


class Client:
    """vLLM's client of an engine. Since 0.33 it has a second pause, after which the engine rejects new requests."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause_scheduler_async(self, mode: str) -> None:
        self.calls.append(f"pause_scheduler {mode}")


class NewClient(Client):
    async def pause_generation_async(self, mode: str) -> None:
        self.calls.append(f"pause_generation {mode}")


@pytest.mark.anyio
async def test_a_pause_lets_the_engine_queue_new_requests() -> None:
    client = NewClient()
    compat.queue_while_paused(client)
    await client.pause_generation_async("abort")
    assert client.calls == ["pause_scheduler abort"]


def test_a_client_without_the_second_pause_is_left_as_it_is() -> None:
    client = Client()
    compat.queue_while_paused(client)
    assert not hasattr(client, "pause_generation_async")


# --- the comparison -------------------------------------------------------------


def test_a_comparison_shows_changed_signatures_and_sources_of_moved_names_too(tmp_path: Path) -> None:
    [(now, before), *_] = MOVED.items()
    recorded = {f"{now}parse": "def (a, b=)", f"{now}same": "def ()", "vllm.gone:Name": "class"}
    old_text = "def parse(a: int):\n    'Old.'\n    return a\n\ndef same(): 'Old.'"
    new_text = "def parse(a: int, b=1):\n    'New.'\n    return b\n\ndef same(): 'New.'"
    files = {"old": {before: old_text, "vllm.gone:": "class Name: ..."}, "new": {now: new_text}}
    for version, modules in files.items():
        for module, text in modules.items():
            path = tmp_path / version / f"{module.removesuffix(':').replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    with ZipFile(tmp_path / "new.whl", "w") as wheel:
        for path in (tmp_path / "new").rglob("*.py"):
            wheel.write(path, path.relative_to(tmp_path / "new"))

    with unpacked(tmp_path / "old") as old, unpacked(tmp_path / "new.whl") as new:
        lines = list(compare(old, new, recorded))
    middle = lines.index("# Sources")
    assert lines[1:middle] == [
        *(f"{now}parse", "  def (a)", "  def (a, b=)"),
        *("vllm.gone:Name", "  class", "  None"),
    ]
    assert [line for line in lines[middle:] if line[:1] in "+-" and line[:3] not in ("+++", "---")] == [
        "-def parse(a: int):",
        "-    return a",
        "+def parse(a: int, b=1):",
        "+    return b",
    ]
