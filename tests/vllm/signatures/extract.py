"""Writes down what vLLM's source says of each name that we lean on, for :mod:`tests.vllm.test_compat`.

    python tests/vllm/signatures/extract.py SRC OUT

SRC is a directory that has the package ``vllm`` in it: ``site-packages``, or an unpacked wheel. OUT is a JSON file, one
for each series that is not installed where the tests run, such as ``tests/vllm/signatures/0.26.json``. Nothing is
imported, so a version need not be installed. The file of the newest series, `REFERENCE`, has all names, and those of
others what is different there: record them again after it, or when a name is added.

By name, as ``module:object``, ``module:Class.attribute`` or ``module:function[text in it]``, the file has one of::

    "class(Base) needs x, y"      with the fields that must be given
    "def (self, x, *, y=)"        also "async def" and "property"
    "attribute"                   of a module or class, or set on self in a method
    "is module:object"            imported from there
    "there"                       the text is in the function, or the module is there

Names that a version does not have are left out, or null where the reference has them.
"""

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

REFERENCE = "0.32"
FOLDER = Path(__file__).parent
FLAGS = {
    "FrontendArgs": "api_key chat_template disable_uvicorn_access_log enable_scale_out enable_ssl_refresh "
    "h11_max_header_count h11_max_incomplete_event_size host port ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers "
    "ssl_keyfile uvicorn_log_level",
    "make_arg_parser": "[--api-server-count] [--grpc] [--headless] [model_tag]",
    "validate_parsed_serve_args": "",
}
# By module and object, or "" for the module itself: attributes, and texts in brackets. What has moved stands in both
# places.
LEANED_ON = {
    "vllm": {"LLM": "", "SamplingParams": ""},
    "vllm.config": {"VllmConfig": ""},
    "vllm.config.model": {
        "ModelConfig": "get_hidden_size get_vocab_size hf_text_config logprobs_mode max_model_len model "
        "quantization revision word_embeddings_untied_by_checkpoint"
    },
    "vllm.config.load": {"LoadConfig": "load_format"},
    "vllm.config.lora": {"LoRAConfig": "max_lora_rank"},
    "vllm.config.parallel": {
        "ParallelConfig": "data_parallel_size pipeline_parallel_size tensor_parallel_size world_size"
    },
    "vllm.config.scheduler": {"SchedulerConfig": "enable_chunked_prefill max_num_batched_tokens max_num_seqs"},
    "vllm.config.vllm": {
        "VllmConfig": "load_config lora_config num_speculative_tokens parallel_config scheduler_config "
        "shutdown_timeout speculative_config"
    },
    "vllm.distributed.device_communicators.shm_broadcast": {"sched_yield": ""},
    "vllm.distributed.parallel_state": {
        "GroupCoordinator": "is_last_rank rank_in_group",
        "get_pp_group": "",
        "get_tp_group": "",
    },
    "vllm.engine.arg_utils": {
        "AsyncEngineArgs": "aggregate_engine_logging create_engine_config disable_log_stats enable_chunked_prefill "
        "enable_log_requests enforce_eager from_cli_args max_num_batched_tokens model otlp_traces_endpoint revision "
        "served_model_name shutdown_timeout spec_method spec_model spec_tokens speculative_config worker_extension_cls"
    },
    "vllm.entrypoints.chat_utils": {"load_chat_template": ""},
    "vllm.entrypoints.anthropic.serving": {
        "AnthropicServingMessages": "create_chat_completion create_error_response message_stream_converter"
    },
    "vllm.entrypoints.generate.api_router": {
        "init_generate_state": "[state.anthropic_serving_messages] [state.openai_serving_chat] "
        "[state.openai_serving_chat_batch] [state.openai_serving_completion] [state.openai_serving_responses]"
    },
    "vllm.entrypoints.launcher": {"serve_http": ""},
    "vllm.entrypoints.launchers.api_server.app_state": {"init_app_state": ""},
    "vllm.entrypoints.launchers.app": {"build_app": ""},
    "vllm.entrypoints.launchers.cli_args": FLAGS,
    "vllm.entrypoints.launchers.launcher": {"serve_http": "", "setup_server": ""},
    "vllm.entrypoints.launchers.utils.server_utils": {"get_uvicorn_log_config": ""},
    "vllm.entrypoints.llm": {"LLM": "generate"},
    "vllm.entrypoints.openai.api_server": {"build_app": "", "init_app_state": "", "setup_server": ""},
    "vllm.entrypoints.openai.chat_completion.batch_serving": {"OpenAIServingChatBatch": "create_batch_chat_completion"},
    "vllm.entrypoints.openai.chat_completion.serving": {"OpenAIServingChat": "create_chat_completion"},
    "vllm.entrypoints.openai.cli_args": FLAGS,
    "vllm.entrypoints.openai.completion.serving": {"OpenAIServingCompletion": "create_completion"},
    "vllm.entrypoints.openai.responses.serving": {
        "OpenAIServingResponses": "_convert_generation_error_to_streaming_response _run_background_request "
        "create_error_response create_responses response_store response_store_lock "
        "responses_background_stream_generator responses_stream_generator"
    },
    "vllm.entrypoints.openai.models.serving": {"OpenAIServingModels": "is_base_model lora_id_counter lora_requests"},
    "vllm.entrypoints.scale_out.factories": {"init_scale_out_state": "[state.serving_tokens]"},
    "vllm.entrypoints.scale_out.token_in_token_out.serving": {
        "ServingTokens": "serve_tokens serve_tokens_stream_generator"
    },
    "vllm.entrypoints.serve.utils.api_utils": {"cli_env_setup": ""},
    "vllm.entrypoints.serve.utils.server_utils": {"get_uvicorn_log_config": ""},
    "vllm.envs": {"VLLM_API_KEY": "", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "", "enable_envs_cache": ""},
    "vllm.exceptions": {
        "GracefulHTTPError": "",
        "VLLMClientError": "",
        "VLLMError": "",
        "VLLMNotFoundError": "",
        "VLLMServerError": "",
        "VLLMUnprocessableEntityError": "",
        "VLLMValidationError": "",
    },
    "vllm.logger": {"": "", "configure_logging_from_args": ""},
    "vllm.logprobs": {"Logprob": "logprob", "SampleLogprobs": "", "append_logprobs_for_next_position": ""},
    "vllm.lora.layers.base_linear": {"BaseLinearLayerWithLoRA": ""},
    "vllm.lora.model_manager": {"LoRAModelManager": "modules packed_modules_mapping"},
    "vllm.lora.request": {"LoRARequest": "load_inplace lora_int_id lora_name lora_path"},
    "vllm.lora.worker_manager": {"WorkerLoRAManager": "_adapter_manager"},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": "quant_method"},
    "vllm.model_executor.model_loader.reload.layerwise": {"finalize_layerwise_reload": "", "get_layerwise_info": ""},
    "vllm.outputs": {
        "CompletionOutput": "cumulative_logprob finish_reason index logprobs sampling_mask stop_reason text token_ids",
        "RequestOutput": "finished outputs prompt_logprobs prompt_token_ids request_id",
        "SamplingMask": "token_ids",
    },
    "vllm.platforms": {"current_platform": ""},
    "vllm.platforms.interface": {"Platform": "is_cpu"},
    "vllm.renderers.base": {"BaseRenderer": "default_cmpl_tok_params render_chat_async render_cmpl render_cmpl_async"},
    "vllm.renderers.chat_utils": {"load_chat_template": ""},
    "vllm.renderers.inputs.preprocess": {"parse_model_prompt": ""},
    "vllm.renderers.params": {"ChatParams": "chat_template chat_template_kwargs"},
    "vllm.sampling_params": {
        "RequestOutputKind": "CUMULATIVE DELTA FINAL_ONLY",
        "SamplingParams": "clone detokenize extra_args from_optional logprobs max_tokens n output_kind prompt_logprobs "
        "seed skip_clone structured_outputs",
        "RepetitionDetectionParams": "",
        "StructuredOutputsParams": "_backend choice grammar json structural_tag",
    },
    "vllm.tokenizers": {"TokenizerLike": ""},
    "vllm.tokenizers.detokenizer_utils": {"convert_ids_list_to_tokens": ""},
    "vllm.transformers_utils.repo_utils": {"get_model_path": ""},
    "vllm.usage.usage_lib": {"UsageContext": "OPENAI_API_SERVER"},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ""},
    "vllm.v1.core.sched.output": {
        "NewRequestData": "prompt_embeds prompt_token_ids req_id sampling_params",
        "SchedulerOutput": "finished_req_ids num_scheduled_tokens scheduled_new_reqs scheduled_spec_decode_tokens",
    },
    "vllm.v1.engine": {
        "EngineCoreOutput": "ec_transfer_params events finish_reason kv_transfer_params new_logprobs new_sampling_mask "
        "new_token_ids num_nans_in_logits pooling_output prefill_stats request_id routed_experts",
        "EngineCoreOutputs": "engine_index finished_requests outputs scheduler_stats start_wave timestamp "
        "utility_output wave_complete",
        "EngineCoreRequest": "cache_salt client_index data_parallel_rank lora_request mm_features prompt_embeds "
        "prompt_token_ids request_id resumable sampling_params",
        "EngineCoreRequestType": "ABORT ADD EXECUTOR_FAILED UTILITY",
        "FinishReason": "ABORT",
    },
    "vllm.v1.engine.async_llm": {
        "AsyncLLM": "_add_request _run_output_handler _supported_tasks abort add_lora add_request collective_rpc "
        "engine_core errored finish_weight_update from_vllm_config generate get_supported_tasks input_processor "
        "is_paused logger_manager model_config output_handler output_processor pause_generation remove_lora "
        "renderer reset_mm_cache reset_prefix_cache resume_generation shutdown sleep start_draft_weight_update "
        "start_weight_update tokenizer update_weight_version update_weights vllm_config wake_up"
    },
    "vllm.v1.engine.core": {
        "EngineCore": "abort_requests preprocess_add_request scheduler",
        "EngineCoreProc": "ENGINE_CORE_DEAD _send_abort_outputs input_queue output_queue process_input_sockets "
        "process_output_sockets",
    },
    "vllm.v1.engine.core_client": {
        "_process_utility_output": "",
        "AsyncMPClient": "_call_utility_async _ensure_output_queue_task _send_input _send_input_message "
        "abort_requests_async add_request_async call_utility_async client_count client_index core_engines "
        "get_output_async outputs_queue",
        "BackgroundResources": "engine_dead engine_manager output_socket",
        "EngineCoreClient": "make_async_mp_client",
        "MPClient": "_apply_ready_response core_engine decoder encoder engine_ranks_managed ensure_alive input_socket "
        "resources shutdown utility_results",
    },
    "vllm.v1.engine.detokenizer": {
        "IncrementalDetokenizer": "from_new_request get_next_output_text num_output_tokens output_token_ids update"
    },
    "vllm.v1.engine.exceptions": {"EngineDeadError": ""},
    "vllm.v1.engine.input_processor": {"InputProcessor": "process_inputs"},
    "vllm.v1.engine.logprobs": {
        "NONES": "",
        "LogprobsProcessor": "_update_sample_logprobs cumulative_logprob from_new_request logprobs num_logprobs "
        "tokenizer",
    },
    "vllm.v1.engine.output_processor": {
        "OutputProcessor": "_update_stats_from_output abort_requests add_request external_req_ids "
        "get_num_unfinished_requests propagate_error request_states",
        "RequestOutputCollector": "get output request_id",
        "RequestState": "detokenizer logprobs_processor queue routed_experts_chunks sampling_mask_chunks",
    },
    "vllm.v1.outputs": {"LogprobsLists": "logprob_token_ids logprobs sampled_token_ranks"},
    "vllm.v1.serial_utils": {"MsgpackDecoder": "decode oob_tensor_provider", "MsgpackEncoder": "encode"},
    "vllm.v1.structured_output.backend_guidance": {"validate_guidance_grammar": ""},
    "vllm.v1.structured_output.backend_outlines": {"validate_structured_output_request_outlines": ""},
    "vllm.v1.structured_output.backend_xgrammar": {"validate_xgrammar_grammar": ""},
    "vllm.v1.executor": {"Executor": "get_class"},
    "vllm.v1.engine.utils": {"CoreEngineProcManager": "finished_procs"},
    "vllm.v1.metrics.loggers": {"StatLoggerManager": "record"},
    "vllm.v1.worker.gpu.input_batch": {
        "InputBatch": "cu_num_logits logits_indices num_computed_tokens_np req_ids seq_lens"
    },
    "vllm.v1.worker.gpu.model_runner": {
        "ExecuteModelState": "hidden_states input_batch",
        "GPUModelRunner": "device execute_model execute_model_state is_pooling_model model_config model_state "
        "num_speculative_steps pcp_manager req_states vllm_config",
    },
    "vllm.v1.worker.gpu.model_states.interface": {"ModelState": "num_new_sampled_tokens_per_step"},
    "vllm.v1.worker.gpu_input_batch": {"InputBatch": "num_computed_tokens_cpu req_id_to_index req_ids"},
    "vllm.v1.worker.gpu_model_runner": {
        "ExecuteModelState": "sample_hidden_states scheduler_output",
        "GPUModelRunner": "device execute_model execute_model_state get_model input_batch is_pooling_model "
        "model_config reload_weights vllm_config",
    },
    "vllm.v1.worker.lora_model_runner_mixin": {"LoRAModelRunnerMixin": "lora_manager"},
    "vllm.v1.worker.gpu_worker": {"Worker": "reload_weights"},
    "vllm.v1.metrics.stats": {
        "IterationStats": "inter_token_latencies_iter num_generation_tokens",
        "PrefixCacheStats": "requests",
        "SchedulerStats": "connector_prefix_cache_stats cudagraph_stats ec_connector_stats iteration_details "
        "kv_cache_eviction_events kv_connector_stats perf_stats prefix_cache_stats spec_decoding_stats",
    },
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The modules under a directory, parsed when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed = cache(self._parse)

    def describe(self, name: str) -> str | None:
        """What the source says of ``name``."""
        name, _, text = name.removesuffix("]").partition("[")
        module, _, path = name.partition(":")
        if not path:
            return "there" if self._parsed(module) else None
        first, _, attribute = path.partition(".")
        if (found := self._find(module, first)) is None:
            return None
        home, node = found
        if text:
            return "there" if isinstance(node, Function) and text in _texts(node) else None
        if attribute:
            inner = self._attribute(home, node, attribute)
            return None if inner is None else _described(inner)
        return _described(node) if home == module else f"is {home}:{first}"

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The statement that makes ``name``, and the module that it is in."""
        for node in _statements(self._parsed(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(self._absolute(module, node), alias.name)
            elif name in _made(node):
                return module, node
        return None

    def _attribute(self, module: str, node: ast.stmt | None, name: str) -> ast.stmt | None:
        if not isinstance(node, ast.ClassDef):
            return None
        for inner in node.body:
            if name in _made(inner):
                return inner
        for anywhere in ast.walk(node):
            if isinstance(anywhere, ast.stmt) and f"self.{name}" in _targets(anywhere):
                return anywhere
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := self._find(module, base.id)) is not None:
                inherited = self._attribute(*found, name)
                if inherited is not None:
                    return inherited
        return None

    def _parse(self, module: str) -> Sequence[ast.stmt]:
        path = self._root.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(path.read_text()).body if path.exists() else []

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self._root.joinpath(*module.split(".")).is_dir()
        parts = module.split(".")[: None if package and node.level == 1 else -node.level + package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, and those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _made(node: ast.stmt) -> list[str]:
    """The names that a statement makes."""
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    return _targets(node)


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def _texts(function: Function) -> set[str]:
    """Strings in a function, and what it assigns to."""
    strings = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return strings | {name for n in ast.walk(function) if isinstance(n, ast.stmt) for name in _targets(n)}


def _described(node: ast.stmt) -> str:
    if isinstance(node, ast.ClassDef):
        needed = [ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign) and n.value is None]
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class({bases})" + (f" needs {', '.join(needed)}" if needed else "")
    if not isinstance(node, Function):
        return "attribute"
    if any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
        return "property"
    return f"{'async ' * isinstance(node, ast.AsyncFunctionDef)}def ({parameters(node.args)})"


def parameters(arguments: ast.arguments) -> str:
    """Names of parameters; those that may be left out end with ``=``."""
    positional = [a.arg for a in [*arguments.posonlyargs, *arguments.args]]
    required = len(positional) - len(arguments.defaults)
    shown = [f"{name}=" if i >= required else name for i, name in enumerate(positional)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [
        a.arg if d is None else f"{a.arg}=" for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return ", ".join(shown)


def names() -> Iterator[str]:
    """Every name that we lean on."""
    for module, objects in LEANED_ON.items():
        for name, inside in objects.items():
            yield f"{module}:{name}"
            for inner in inside.split():
                yield f"{module}:{name}{inner}" if inner.startswith("[") else f"{module}:{name}.{inner}"


def extract(root: Path) -> dict[str, str]:
    """What the ``vllm`` under ``root`` says of the names that it has."""
    source = Source(root)
    return {name: said for name in names() if (said := source.describe(name)) is not None}


def recorded(series: str) -> dict[str, str]:
    """What the files of a series and of the reference say."""
    said: dict[str, str | None] = {}
    for each in (REFERENCE, series):
        said |= json.loads((FOLDER / f"{each}.json").read_text())
    return {name: text for name, text in said.items() if text is not None}


def main(root: str, out: str) -> None:
    """Write the file."""
    said: dict[str, str | None] = {**extract(Path(root))}
    if Path(out).stem != REFERENCE:
        reference = recorded(REFERENCE)
        said = {name: said.get(name) for name in said | reference if said.get(name) != reference.get(name)}
    Path(out).write_text(json.dumps(said, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
