"""Compare the names and calls that we use with the recorded source of each series of vLLM, and the installed one."""

import ast
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import darts_server.vllm
from darts_server.vllm.compat import COMPARED_SERIES, GENERATION_HANDLERS, TESTED_SERIES, version_warning, vllm_version
from tests.vllm.fakes import Fake, in_place_of_vllm
from tests.vllm.signatures import extract

INSTALLED = ".".join((vllm_version() or "").split(".")[:2])
RECORDED = {series: extract.recorded(series) for series in (extract.REFERENCE, *COMPARED_SERIES)}
RECORDED[INSTALLED] = extract.extract(Path(inspect.getfile(import_module("vllm"))).parents[1])
REFERENCE = extract.REFERENCE
"""The series that the others are compared with, which has every name that we use."""
OTHERS = [series for series in RECORDED if series != REFERENCE]
OLD = "0.26"
ROOM = Path(darts_server.vllm.__file__).parent
SOURCES = [*sorted(ROOM.rglob("*.py")), ROOM.parents[1] / "examples" / "tiny_rl" / "engine.py"]

CLI_ARGS = ("entrypoints.launchers.cli_args", "entrypoints.openai.cli_args")
# Where moved names are in one series or another: those that are re-exported, and those wrapped.
MOVED = {
    "build_app": ("entrypoints.launchers.app", "entrypoints.openai.api_server"),
    "init_app_state": ("entrypoints.launchers.api_server.app_state", "entrypoints.openai.api_server"),
    "load_chat_template": ("renderers.chat_utils", "entrypoints.chat_utils"),
    "setup_server": ("entrypoints.launchers.launcher", "entrypoints.openai.api_server"),
    "serve_http": ("entrypoints.launchers.launcher", "entrypoints.launcher"),
    "get_uvicorn_log_config": (
        "entrypoints.launchers.utils.server_utils",
        "entrypoints.serve.utils.server_utils",
    ),
    "validate_parsed_serve_args": CLI_ARGS,
}
WRAPPED = {"make_arg_parser": CLI_ARGS, "FrontendArgs": CLI_ARGS}
# Names that 0.26 does not have.
NEW = {
    "vllm.entrypoints.openai.cli_args:FrontendArgs.enable_scale_out",
    "vllm.exceptions:GracefulHTTPError",
    "vllm.exceptions:VLLMClientError",
    "vllm.exceptions:VLLMError",
    "vllm.exceptions:VLLMServerError",
    "vllm.logger:configure_logging_from_args",
    "vllm.config.model:ModelConfig.word_embeddings_untied_by_checkpoint",
    "vllm.outputs:CompletionOutput.sampling_mask",
    "vllm.outputs:SamplingMask",
    "vllm.outputs:SamplingMask.token_ids",
    "vllm.v1.engine:EngineCoreOutput.new_sampling_mask",
    "vllm.v1.engine.output_processor:RequestState.sampling_mask_chunks",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",
    "vllm.v1.metrics.stats:SchedulerStats.ec_connector_stats",
}
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
    "self._llm.add_request": f"{LLM}.add_request",
    "self._llm.collective_rpc": f"{LLM}.collective_rpc",
    "core._call_utility_async": "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async",
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
def series(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def place(name: str, series: str) -> str:
    """Return where a moved name is in a series: in the newest of its places there, as older ones may stay behind."""
    places = (f"vllm.{module}:{name}" for module in (MOVED | WRAPPED)[name])
    return next(place for place in places if place in RECORDED[series])


def in_series(name: str, series: str) -> str:
    """Return where a name of the reference, or a part of it, is in another one."""
    path = name.partition(":")[2]
    first = path.partition(".")[0].partition("[")[0]
    if first not in MOVED | WRAPPED or not name.startswith(place(first, REFERENCE)):
        return name
    return place(first, series) + path.removeprefix(first)


@pytest.fixture
def vllm(series: str) -> Iterator[Fake]:
    with in_place_of_vllm(RECORDED[series]) as fake:
        yield fake


@pytest.mark.parametrize("tested", TESTED_SERIES)
def test_a_version_of_a_tested_series_gives_no_warning(tested: str) -> None:
    assert version_warning(f"{tested}.0") is None


def test_the_installed_version_is_of_a_known_series() -> None:
    assert INSTALLED in (*TESTED_SERIES, *COMPARED_SERIES)


@pytest.mark.parametrize("compared", COMPARED_SERIES)
def test_a_version_of_a_compared_series_gives_a_warning(compared: str) -> None:
    assert version_warning(f"{compared}.0") == (
        f"vLLM {compared}.0 is tested with darts-server by its signatures alone; "
        f"{' and '.join(TESTED_SERIES)} are tested by running them"
    )


@pytest.mark.parametrize("version", [None, "0.310.0", "0.33.1", "0.2.6"])
def test_other_versions_give_a_warning(version: str | None) -> None:
    assert f"vLLM {version} is not tested with darts-server" in (version_warning(version) or "")


@pytest.mark.parametrize("compared", OTHERS)
def test_every_series_has_every_name_except_the_listed_new_ones(compared: str) -> None:
    there = {in_series(name, compared) for name in RECORDED[REFERENCE]}
    assert there - set(RECORDED[compared]) == (NEW if compared == OLD else set())
    assert {name for name, said in RECORDED[compared].items() if not said.startswith("is ")} <= there


def test_every_name_is_recorded_in_some_series() -> None:
    recorded = {name for names in RECORDED.values() for name in names}
    # The flag is looked for in all places of its class, and is newer than the oldest of them.
    assert set(extract.names()) - recorded == {"vllm.entrypoints.openai.cli_args:FrontendArgs.enable_scale_out"}


def test_our_modules_import_only_names_that_each_series_has(vllm: Fake) -> None:
    # If a name fails here that both series have, add it to extract.py and record both series again.
    for source in SOURCES:
        parts = source.relative_to(ROOM.parents[1]).with_suffix("").parts
        import_module(".".join(parts).removesuffix(".__init__"))


def test_moved_names_are_imported_from_their_place_in_each_series(series: str, vllm: Fake) -> None:
    chosen = import_module("darts_server.vllm.compat.entrypoints")
    for name in MOVED:
        assert getattr(chosen, name) is vllm.get(place(name, series))
    assert sorted(chosen.__all__) == sorted([*MOVED, "cli_env_setup", "configure_logging", "make_arg_parser"])


def test_our_calls_fit_the_parameters_of_each_series(series: str, vllm: Fake) -> None:
    moved = {name: place(name, series) for name in MOVED}
    targets = METHODS | moved | {"_make_arg_parser": place("make_arg_parser", series)}
    seen = set()
    for function, args, keywords in (made for source in SOURCES for made in calls(ast.parse(source.read_text()))):
        if (target := targets.get(function)) is None:
            continue
        seen.add(function)
        method = RECORDED[series][target].partition("(")[2].startswith(("self", "cls"))
        bound = method and not function.startswith(
            "AsyncLLM."
        )  # called on the class, with the object as first argument
        given = [None for a in args if not isinstance(a, ast.Starred)]
        named = {k.arg: None for k in keywords if k.arg is not None}
        whole = len(given) == len(args) and len(named) == len(keywords)
        signature = inspect.signature(vllm.get(target))
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


def test_every_flag_that_we_read_is_one_of_vllms(series: str) -> None:
    read = {
        node.attr
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args"
    }
    fields = {n.rpartition(".")[2] for n in RECORDED[series] if "FrontendArgs." in n or "EngineArgs." in n}
    added = {n.partition("[")[2].strip("-]").replace("-", "_") for n in RECORDED[series] if "make_arg_parser[" in n}
    assert {"host", "model_tag", "headless"} <= read <= fields | added


def test_the_request_for_the_detokenizer_has_all_required_fields(series: str) -> None:
    (call,) = (
        node
        for node in ast.walk(ast.parse((ROOM / "outputs.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "EngineCoreRequest"
    )
    needed = RECORDED[series]["vllm.v1.engine:EngineCoreRequest"].partition(" needs ")[2]
    assert [k.arg for k in call.keywords] == needed.split(", ")


def test_the_generation_handlers_exist_and_take_a_request_and_a_raw_request(series: str) -> None:
    makers = {name.partition("[")[2] for name in RECORDED[series]}
    methods = {name.rpartition(".")[2]: said for name, said in RECORDED[series].items()}
    for attribute, method in GENERATION_HANDLERS:
        assert f"state.{attribute}]" in makers
        assert methods[method] == "async def (self, request, raw_request=)"


def test_the_flag_for_the_token_route_is_accepted_in_each_series(series: str, vllm: Fake) -> None:
    parser = vllm.get("vllm.utils.argparse_utils:FlexibleArgumentParser")()
    import_module("darts_server.vllm.compat.entrypoints").make_arg_parser(parser)
    assert vllm.calls == [place("make_arg_parser", series)]
    added = vars(parser.parse_known_args(["--enable-scale-out"])[0])
    assert added == ({"enable_scale_out": True} if series == OLD else {})


@pytest.fixture
def unset_levels() -> Iterator[None]:
    ours, root = logging.getLogger("darts_server"), logging.getLogger()
    levels = ours.level, root.level
    ours.setLevel(logging.NOTSET)
    yield
    ours.setLevel(levels[0])
    root.setLevel(levels[1])


@pytest.mark.usefixtures("unset_levels")
def test_logging_is_configured_if_vllm_can_and_our_warnings_stay_enabled(series: str, vllm: Fake) -> None:
    import_module("darts_server.vllm.compat.entrypoints").configure_logging(None)
    assert vllm.calls == ([] if series == OLD else ["vllm.logger:configure_logging_from_args"])
    logging.getLogger().setLevel(logging.ERROR)
    assert logging.getLogger("darts_server.store").isEnabledFor(logging.WARNING)


def test_rejected_requests_are_distinguished_from_failures(vllm: Fake) -> None:
    engine, ours = import_module("darts_server.vllm.engine"), import_module("darts_server.exceptions")
    of_vllm = [v for v in vars(import_module("vllm.exceptions")).values() if isinstance(v, type)]
    refusals = [e for e in of_vllm if e.__name__ not in ("VLLMError", "VLLMServerError", "GracefulHTTPError")]
    assert len(refusals) >= 2
    for error in (*refusals, ValueError, TypeError):
        assert isinstance(engine.translate(error("no")), ours.EngineRefused)
    for busy in (e for e in of_vllm if e.__name__ == "GracefulHTTPError"):
        assert isinstance(engine.translate(busy("full")), ours.EngineBusy)
    dead = vllm.get("vllm.v1.engine.exceptions:EngineDeadError")
    assert isinstance(engine.translate(dead("gone")), ours.EngineDead)
    assert isinstance(engine.translate(RuntimeError("oh")), ours.CandidateFailed)


@pytest.mark.usefixtures("vllm")
def test_fields_that_only_some_versions_have_are_truncated() -> None:
    @dataclass
    class Mask:
        token_ids: list[list[int]]

    @dataclass
    class Span:
        version: str
        start: int
        end: int

    truncate = import_module("darts_server.vllm.deferred").truncate_optional
    assert truncate(SimpleNamespace(), 1) == truncate(SimpleNamespace(sampling_mask=None), 1) == {}
    truncated = truncate(SimpleNamespace(sampling_mask=Mask([[1], [2, 3], [4]])), 2)
    assert truncated == {"sampling_mask": Mask([[1], [2, 3]])}
    spans = [Span("a", 0, 1), Span("b", 1, 3), Span("c", 3, 4)]
    completion = SimpleNamespace(token_ids=[7] * 4, routed_experts=[*range(6)], weight_versions=spans)
    assert truncate(completion, 2) == {
        "routed_experts": [0, 1, 2, 3],
        "weight_versions": [Span("a", 0, 1), Span("b", 1, 2)],
    }


@pytest.mark.anyio
async def test_a_finished_weight_update_counts_with_and_without_a_name(series: str, vllm: Fake) -> None:
    methods = []

    async def call_utility(utility: str, method: str, *args: object, engine: bytes) -> list[None]:
        methods.append(method)
        return [None]

    shaping = import_module("darts_server.vllm.llm").ShapingLLM
    llm = shaping.__new__(shaping)
    llm.engine_core = SimpleNamespace(core_engines=[b"0"], _call_utility_async=call_utility)
    await llm.finish_weight_update()
    assert llm.weight_version == 1
    if series != OLD:
        await llm.finish_weight_update("v2")
        await llm.finish_weight_update(weight_version="v3")
        assert llm.weight_version == 3
    assert set(vllm.calls) == {f"{LLM}.finish_weight_update"}
    assert set(methods) == {"darts_pack_heads"}
