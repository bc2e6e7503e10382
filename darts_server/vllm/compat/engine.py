"""What vLLM's engine raises and returns."""

from dataclasses import replace
from typing import Any

from vllm import exceptions
from vllm.outputs import CompletionOutput

# Raised of a request that is not taken. 0.31 has two bases for them. In 0.26 they are ValueErrors, but for one.
REFUSALS: tuple[type[Exception], ...] = (
    (exceptions.VLLMClientError, exceptions.GracefulHTTPError, ValueError, TypeError)
    if hasattr(exceptions, "VLLMClientError")
    else (exceptions.VLLMNotFoundError, ValueError, TypeError)
)


def cut_mask(completion: CompletionOutput, tokens: int) -> dict[str, Any]:
    """The field that tells what could have been sampled, of the first ``tokens`` alone; none in 0.26."""
    mask = getattr(completion, "sampling_mask", None)
    return {} if mask is None else {"sampling_mask": replace(mask, token_ids=mask.token_ids[:tokens])}


async def set_weight_version(llm: Any, version: int) -> None:
    """Set the version that vLLM's own routes report; 0.26 has none that do."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(version))
