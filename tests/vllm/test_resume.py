"""Which sampling parameters candidates can go on with."""

import pytest
from vllm import SamplingParams

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.resume import check_resumable


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_log_probs_of_generated_tokens_are_kept(logprobs: int | None) -> None:
    check_resumable(SamplingParams(logprobs=logprobs))


@pytest.mark.parametrize("stop", ["a", "whole words", ["a", "bcd"]])
def test_stop_strings_of_any_length_work(stop: str | list[str]) -> None:
    check_resumable(SamplingParams(stop=stop))


@pytest.mark.parametrize("logprobs", [2, 20, -1])
def test_more_log_probs_than_are_kept_are_refused(logprobs: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_resumable(SamplingParams(logprobs=logprobs))
    assert refused.value.field == "sampling.logprobs"
