"""Exceptions and outputs of vLLM's engine that differ between its series."""

from dataclasses import replace
from typing import Any

from vllm import exceptions
from vllm.outputs import CompletionOutput

# Raised for requests that vLLM rejects. 0.31 has two base classes for them; in 0.26 all but one are ValueErrors.
REFUSALS: tuple[type[Exception], ...] = (
    (exceptions.VLLMClientError, ValueError, TypeError, OverflowError)
    if hasattr(exceptions, "VLLMClientError")
    else (exceptions.VLLMNotFoundError, ValueError, TypeError, OverflowError)
)
# Raised by `--max-num-queued-reqs` and `--max-num-queued-tokens`, which 0.26 does not have.
BUSY: tuple[type[Exception], ...] = (exceptions.GracefulHTTPError,) if hasattr(exceptions, "GracefulHTTPError") else ()


def truncate_optional(completion: CompletionOutput, tokens: int) -> dict[str, Any]:
    """Return the fields of a truncated output that only some versions and options of vLLM give it, if it has them.

    They are the sampling mask (which tokens could be sampled), the experts of each token, those of the prompt first,
    and the weight versions.
    """
    changes: dict[str, Any] = {}
    if (mask := getattr(completion, "sampling_mask", None)) is not None:
        changes["sampling_mask"] = replace(mask, token_ids=mask.token_ids[:tokens])
    if (experts := getattr(completion, "routed_experts", None)) is not None:
        changes["routed_experts"] = experts[: len(experts) - max(0, len(completion.token_ids) - tokens)]
    if (spans := getattr(completion, "weight_versions", None)) is not None:
        changes["weight_versions"] = [replace(one, end=min(one.end, tokens)) for one in spans if one.start < tokens]
    return changes


async def set_weight_version(llm: Any, version: int) -> None:
    """Set the version that vLLM's own routes report; 0.26 has none that do."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(version))
