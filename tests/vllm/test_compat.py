"""Compare the names and calls that we use with the installed vLLM's source, and what is recorded of another series."""

import ast
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import exceptions
from vllm.v1.engine.exceptions import EngineDeadError

import darts_server.vllm
from darts_server.exceptions import CandidateFailed, EngineBusy, EngineDead, EngineRefused
from darts_server.vllm.compat import GENERATION_HANDLERS, TESTED_SERIES, entrypoints, version_warning, vllm_version
from darts_server.vllm.compat.engine import truncate_optional
from darts_server.vllm.engine import translate
from tests.vllm.signatures import extract

VLLM = Path(inspect.getfile(import_module("vllm"))).parents[1]
INSTALLED = ".".join((vllm_version() or "").split(".")[:2])
RECORDED: Mapping[str, Mapping[str, str]] = {
    path.stem: json.loads(path.read_text()) for path in Path(extract.__file__).parent.glob("*.json")
} | {INSTALLED: extract.extract(VLLM)}
ROOM = Path(darts_server.vllm.__file__).parent
SOURCES = [*sorted(ROOM.rglob("*.py")), ROOM.parents[1] / "examples" / "tiny_rl" / "engine.py"]
MOVED = ("vllm.renderers.chat_utils:load_chat_template", "vllm.entrypoints.chat_utils:load_chat_template")
"""Each series has one of them."""
# Our calls, as written in the source, and what they call.
LLM = "vllm.v1.engine.async_llm:AsyncLLM"
DETOKENIZER = "vllm.v1.engine.detokenizer:IncrementalDetokenizer"
LOGPROBS = "vllm.v1.engine.logprobs:LogprobsProcessor"
METHODS = {
    "AsyncEngineArgs.from_cli_args": "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args",
    "IncrementalDetokenizer.from_new_request": f"{DETOKENIZER}.from_new_request",
    "ShapingLLM.from_vllm_config": f"{LLM}.from_vllm_config",
    "SamplingParams.from_optional": "vllm.sampling_params:SamplingParams.from_optional",
    "current_platform.is_cpu": "vllm.platforms.interface:Platform.is_cpu",
    "decoder.decode": "vllm.v1.serial_utils:MsgpackDecoder.decode",
    "detokenizer.get_next_output_text": f"{DETOKENIZER}.get_next_output_text",
    "detokenizer.update": f"{DETOKENIZER}.update",
    "super().update_from_output": f"{LOGPROBS}.update_from_output",
    "processor._update_sample_logprobs": f"{LOGPROBS}._update_sample_logprobs",
    "encoder.encode": "vllm.v1.serial_utils:MsgpackEncoder.encode",
    "engine_args.create_engine_config": "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config",
    "finalize_layerwise_reload": "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload",
    "get_pp_group": "vllm.distributed.parallel_state:get_pp_group",
    "get_tp_group": "vllm.distributed.parallel_state:get_tp_group",
    "get_model_path": "vllm.transformers_utils.repo_utils:get_model_path",
    "llm.collective_rpc": f"{LLM}.collective_rpc",
    "llm.get_supported_tasks": f"{LLM}.get_supported_tasks",
    "llm.reset_mm_cache": f"{LLM}.reset_mm_cache",
    "llm.shutdown": f"{LLM}.shutdown",
    "parse_model_prompt": "vllm.renderers.inputs.preprocess:parse_model_prompt",
    "renderer.render_chat_async": "vllm.renderers.base:BaseRenderer.render_chat_async",
    "renderer.render_cmpl_async": "vllm.renderers.base:BaseRenderer.render_cmpl_async",
    "renderer.render_cmpl": "vllm.renderers.base:BaseRenderer.render_cmpl",
    "runner.model_config.get_hidden_size": "vllm.config.model:ModelConfig.get_hidden_size",
    "self._collector.get": "vllm.v1.engine.output_processor:RequestOutputCollector.get",
    "self._llm.abort": f"{LLM}.abort",
    "self._llm.add_request": f"{LLM}.add_request",
    "self._llm.collective_rpc": f"{LLM}.collective_rpc",
    "self.engine_core._call_utility_async": "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
    "AsyncLLM.pause_generation": f"{LLM}.pause_generation",
    "self._llm.remove_lora": f"{LLM}.remove_lora",
    "AsyncLLM.resume_generation": f"{LLM}.resume_generation",
    "llm.input_processor.process_inputs": "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "self.params.clone": "vllm.sampling_params:SamplingParams.clone",
    "state.detokenizer.num_output_tokens": f"{DETOKENIZER}.num_output_tokens",
    "super()._add_request": f"{LLM}._add_request",
    "super().abort": f"{LLM}.abort",
    "super().add_lora": f"{LLM}.add_lora",
    "super().finish_weight_update": f"{LLM}.finish_weight_update",
    "super().generate": f"{LLM}.generate",
    "super().shutdown": f"{LLM}.shutdown",
    "super().start_weight_update": f"{LLM}.start_weight_update",
    "super().update_weights": f"{LLM}.update_weights",
    "worker.model_runner.get_model": "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "worker.reload_weights": "vllm.v1.worker.gpu_worker:Worker.reload_weights",
}


@pytest.fixture(params=list(RECORDED))
def recorded(request: pytest.FixtureRequest) -> Mapping[str, str]:
    return RECORDED[request.param]


def test_other_versions_than_the_tested_ones_give_a_warning() -> None:
    assert INSTALLED in TESTED_SERIES
    assert set(RECORDED) <= set(TESTED_SERIES)
    assert [version_warning(f"{series}.0") for series in TESTED_SERIES] == [None] * len(TESTED_SERIES)
    for version in (None, "0.310.0", "0.34.1"):
        assert f"vLLM {version} is not tested with darts-server" in (version_warning(version) or "")


def test_every_series_has_every_name(recorded: Mapping[str, str]) -> None:
    [missing] = set(extract.names()) - set(recorded)
    assert missing in MOVED


def test_our_modules_import_only_names_that_each_series_has() -> None:
    # If a name fails here that both series have, add it to extract.py and record the other series again.
    known = set(extract.names())
    modules = {name.partition(":")[0] for name in known}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    assert f"{node.module}:{alias.name}" in known or f"{node.module}.{alias.name}" in modules, source


def test_our_calls_fit_the_parameters_of_each_series(recorded: Mapping[str, str]) -> None:
    moved = next(name for name in MOVED if name in recorded)
    targets = METHODS | {"load_chat_template": moved}
    seen = set()
    for function, args, keywords in (made for source in SOURCES for made in calls(ast.parse(source.read_text()))):
        if (target := targets.get(function)) is None:
            continue
        seen.add(function)
        parameters = recorded[target].partition("(")[2].removesuffix(")")
        # Called on the class, with the object as first argument, or bound.
        bound = parameters.startswith(("self", "cls")) and not function.startswith("AsyncLLM.")
        given = [None for a in args if not isinstance(a, ast.Starred)]
        named = {k.arg: None for k in keywords if k.arg is not None}
        whole = len(given) == len(args) and len(named) == len(keywords)
        signature = inspect.signature(eval(f"lambda {parameters.replace('=', '=None')}: None"))
        (signature.bind if whole else signature.bind_partial)(*[None] * bound, *given, **named)
    assert seen == set(targets)


def calls(tree: ast.AST) -> Iterator[tuple[str, list[ast.expr], list[ast.keyword]]]:
    """Yield all calls and their arguments: direct ones, through a partial, and functions assigned to another name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="partial"), args=[function, *args], keywords=keywords):
                yield ast.unparse(function), args, keywords
            case ast.Call(func=function, args=args, keywords=keywords):
                yield ast.unparse(function), args, keywords
            case ast.Assign(value=ast.Attribute() as function):
                yield ast.unparse(function), [], []


def test_every_flag_that_we_read_is_one_of_vllms(recorded: Mapping[str, str]) -> None:
    read = {
        node.attr
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args"
    }
    fields = {n.rpartition(".")[2] for n in recorded if "FrontendArgs." in n or "EngineArgs." in n}
    added = {n.partition("[")[2].strip("-]").replace("-", "_") for n in recorded if "make_arg_parser[" in n}
    assert {"host", "model_tag", "headless"} <= read <= fields | added


def test_the_request_for_the_detokenizer_has_all_required_fields(recorded: Mapping[str, str]) -> None:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOM / "outputs.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "EngineCoreRequest"
    )
    needed = recorded["vllm.v1.engine:EngineCoreRequest"].partition(" needs ")[2]
    assert [k.arg for k in call.keywords] == needed.split(", ")


def test_the_generation_handlers_exist_and_take_a_request_and_a_raw_request(recorded: Mapping[str, str]) -> None:
    makers = {name.partition("[")[2] for name in recorded}
    methods = {name.rpartition(".")[2]: said for name, said in recorded.items()}
    for attribute, method in GENERATION_HANDLERS:
        assert f"state.{attribute}]" in makers
        assert methods[method] == "async def (self, request, raw_request=)"


def test_our_warnings_stay_enabled_where_a_library_raises_the_root_loggers_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, root = logging.getLogger("darts_server"), logging.getLogger()
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    monkeypatch.setattr(root, "level", logging.ERROR)
    monkeypatch.setattr(entrypoints, "configure_logging_from_args", lambda _: None)
    entrypoints.configure_logging(SimpleNamespace())  # type: ignore[arg-type]
    assert logging.getLogger("darts_server.store").isEnabledFor(logging.WARNING)


def test_rejected_requests_are_distinguished_from_failures() -> None:
    for error in (exceptions.VLLMValidationError, exceptions.VLLMNotFoundError, ValueError, TypeError):
        assert isinstance(translate(error("no")), EngineRefused)
    assert isinstance(translate(exceptions.QueueOverflowError()), EngineBusy)
    assert isinstance(translate(EngineDeadError()), EngineDead)
    assert isinstance(translate(RuntimeError("oh")), CandidateFailed)


def test_fields_that_only_some_versions_have_are_truncated() -> None:
    @dataclass
    class Mask:
        token_ids: list[list[int]]

    @dataclass
    class Span:
        version: str
        start: int
        end: int

    def truncated(**fields: Any) -> dict[str, Any]:
        completion: Any = SimpleNamespace(**fields)
        return truncate_optional(completion, 2)

    assert truncated() == truncated(sampling_mask=None) == {}
    assert truncated(sampling_mask=Mask([[1], [2, 3], [4]])) == {"sampling_mask": Mask([[1], [2, 3]])}
    spans = [Span("a", 0, 1), Span("b", 1, 3), Span("c", 3, 4)]
    assert truncated(token_ids=[7] * 4, routed_experts=[*range(6)], weight_versions=spans) == {
        "routed_experts": [0, 1, 2, 3],
        "weight_versions": [Span("a", 0, 1), Span("b", 1, 2)],
    }
