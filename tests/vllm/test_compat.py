"""Names of vLLM that we use: the installed version has the signatures that were recorded from the newest version."""

import ast
import json
import re
from pathlib import Path

import pytest
import vllm

import darts_server.vllm
from darts_server.vllm.compat import GENERATION_HANDLERS, TESTED_SERIES, version_warning, vllm_version
from tests.vllm.signatures import extract

ROOM = Path(darts_server.vllm.__file__).parent
SOURCES = [*sorted(ROOM.rglob("*.py")), ROOM.parents[1] / "examples" / "tiny_rl" / "engine.py"]
NODES = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
INSTALLED = ".".join((vllm_version() or "").split(".")[:2])
RECORDED: dict[str, str] = json.loads((Path(extract.__file__).parent / f"{TESTED_SERIES[-1]}.json").read_text())
DIFFERENT = {
    # It has one parameter more.
    "vllm.entrypoints.launchers.launcher:serve_http",
    # It was moved.
    "vllm.renderers.chat_utils:load_chat_template",
    # We create no such object.
    "vllm.v1.core.sched.output:SchedulerOutput",
    # It has one parameter less.
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
}
"""Names that differ in the previous series. Our code works with both."""


def test_the_installed_vllm_has_the_signatures_of_the_newest_vllm() -> None:
    installed = extract.extract(Path(vllm.__file__).parents[1], RECORDED)
    different = {name for name in RECORDED if installed[name] != RECORDED[name]}
    assert different == (set() if TESTED_SERIES[-1] == INSTALLED else DIFFERENT)


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
    assert missing == {("vllm.entrypoints.chat_utils", "load_chat_template")}, "which was moved"


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


@pytest.mark.parametrize("version", [None, "0.310.0", "0.33.1", "0.26.0", *(f"{series}.0" for series in TESTED_SERIES)])
def test_only_versions_of_other_series_give_a_warning(version: str | None) -> None:
    warning = version_warning(version)
    if version is not None and version.rpartition(".")[0] in TESTED_SERIES:
        assert warning is None
    else:
        assert warning == f"vLLM {version} is not tested with darts-server; 0.31 and 0.32 are"
