import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils

from darts_server.vllm.engine_core.cpu_sampling import expand_to_tokens, repair_sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_a_value_is_written_to_all_drafted_tokens_of_its_request(dtype: torch.dtype) -> None:
    output = torch.full((6,), 99, dtype=dtype)
    ends = torch.tensor([1, 1, 4, 6], dtype=torch.int32)
    expand_to_tokens(output, torch.tensor([3, 4, 0, 5], dtype=dtype), ends, 0, 7, MAX_NUM_TOKENS=8)
    assert output.tolist() == [3, 7, 7, 7, 5, 5]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's kernels for GPUs are right")
def test_vllms_function_is_replaced_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_triton_utils, "_expand_kernel_impl", None)
    repair_sampling()
    assert cpu_triton_utils._expand_kernel_impl is expand_to_tokens
