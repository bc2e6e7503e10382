"""A repair of vLLM's CPU build, without which drafts change what is sampled.

vLLM expands temperature, top-p and top-k of each request to its drafted tokens, on a CPU into a copy of another type
(vllm-project/vllm issue 55005, in 0.31 and 0.32). Answers of the tiny model then have 140 tokens on average, not 36.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tensor = Any
"""A torch.Tensor. vLLM loads its plugins before torch in some processes, so torch is imported in functions alone."""


def expand_to_tokens(
    output: Tensor,
    values: Tensor,
    token_ends: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803  # vLLM's name
) -> None:
    """Write each request's value to all its drafted tokens.

    ``output``: [tokens]. ``values``: [requests]. ``token_ends``: [requests], the end of each request's tokens. vLLM
    passes ``MAX_NUM_TOKENS``, which its kernel for GPUs needs.
    """
    import torch

    token_counts = torch.diff(token_ends, prepend=token_ends.new_zeros(1)).long()
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(torch.repeat_interleave(replaced, token_counts, output_size=output.shape[0]))


def repair_sampling() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    # vLLM's function writes to a copy that it drops, so the parameters of drafted tokens are undefined. vLLM looks the
    # function up by its name after it has loaded its plugins (``WorkerWrapperBase.init_worker``).
    cpu_triton_utils._expand_kernel_impl = expand_to_tokens


def expands_rightly(device: "torch.device") -> bool:
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    values = torch.tensor([0.5, 0.0, 2.0], device=device)
    token_ends = torch.tensor([2, 3, 5], dtype=torch.int32, device=device)
    expanded = expand_batch_to_tokens(
        values,
        token_ends,
        5,
        replace_from=0,
        replace_to=1,
    )
    return expanded.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0]
