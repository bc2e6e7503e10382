"""vLLM's priorities, which `--scheduling-policy priority` starts waiting requests by: the lowest first."""

from vllm.v1.engine.async_llm import AsyncLLM

FIELD = "priority"
"""The argument of ``generate()``."""
LEVEL = 1 << 40
"""Between two priorities of callers: more milliseconds than a server runs."""
MOST = (1 << 22) - 1
"""The priority of callers beyond which all are the same: with the order they have 63 bits."""


def has_priorities(llm: AsyncLLM) -> bool:
    return bool(llm.vllm_config.scheduler_config.policy == "priority")


def combined(priority: int, order: float) -> int:
    """Return a priority for vLLM: that of the caller, and among equal ones ``order``, in seconds."""
    level, place = min(max(priority, -MOST), MOST), round(1000 * order)
    return level * LEVEL + min(max(place, -LEVEL // 2), LEVEL // 2 - 1)
