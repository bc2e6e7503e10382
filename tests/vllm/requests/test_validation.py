from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.requests.prompt_request import PromptRequest
from darts_server.vllm.requests.sampling import REFUSALS, SamplingReader
from darts_server.vllm.requests.structured_outputs import MAX_SAMPLING_BYTES
from darts_server.vllm.requests.validation import MAX_SEED, MIN_SEED, check_request

SIZE = 64
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(get_vocab_size=lambda: SIZE),
    scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
    lora_config=None,
    speculative_config=None,
)
TOKENS = {"type": "token", "prompt_token_ids": [5]}
ENCODER = MsgpackEncoder()
DECODER = MsgpackDecoder(EngineCoreRequest)
READER = SamplingReader("processed_logprobs")
DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


def request(prompt: Any = TOKENS, params: SamplingParams | None = None, **options: Any) -> PromptRequest:
    return PromptRequest(prompt, params or SamplingParams(), "request", options)


def refused(checked: PromptRequest) -> str:
    """Return the refused field."""
    with pytest.raises(InvalidRequest) as raised:
        check_request(CONFIG, checked)
    return raised.value.field


def changed(**values: Any) -> SamplingParams:
    """Set values that the constructor would refuse or convert."""
    params = SamplingParams()
    for name, value in values.items():
        setattr(params, name, value)
    return params


def test_a_usual_request_passes() -> None:
    check_request(CONFIG, request(trace_headers={"traceparent": "00"}, priority=3))
    check_request(CONFIG, request({"type": "embeds", "prompt_token_ids": [SIZE]}))
    check_request(CONFIG, request("text"))
    check_request(CONFIG, request({"type": "token", "prompt_token_ids": [5] * MAX_SAMPLING_BYTES}))
    check_request(CONFIG, request(params=changed(n=8, temperature=0.0)))


def with_params(**values: Any) -> PromptRequest:
    return request(params=changed(**values))


@pytest.mark.parametrize(
    ("checked", "field"),
    [
        # Values that cannot be decoded.
        (with_params(ignore_eos=None), "ignore_eos"),
        (with_params(stop=["a", 3]), "stop"),
        (with_params(stop=["\ud800"]), "stop"),
        (with_params(top_k=2**64), "top_k"),
        (with_params(extra_args={"deep": DEEP}), "extra_args"),
        (request(priority=2**64), "priority"),
        (request(trace_headers={"traceparent": 4}), "trace_headers"),
        (request(reasoning_parser_kwargs={"deep": DEEP}), "reasoning_parser_kwargs"),
        (request(TOKENS | {"cache_salt": 3}), "cache_salt"),
        (request(TOKENS | {"prompt_token_ids": [True]}), "prompt_token_ids"),
        # Token ids that the model does not have.
        *((request(TOKENS | {"prompt_token_ids": [5, token, 6]}), "prompt") for token in (-1, SIZE, 2**70)),
        # A parameter that changes the log-probs of other requests.
        (with_params(logprob_token_ids=[1]), "logprob_token_ids"),
        (with_params(logprob_token_ids=[], logprobs=1), "logprob_token_ids"),
        # Values that are too large.
        (with_params(stop=["a" * MAX_SAMPLING_BYTES]), "stop"),
        (with_params(logit_bias=dict.fromkeys(range(MAX_SAMPLING_BYTES), 1.0)), "logit_bias"),
        (with_params(extra_args={"any": "a" * MAX_SAMPLING_BYTES}), "extra_args"),
        (with_params(structured_outputs=StructuredOutputsParams(regex="a" * MAX_SAMPLING_BYTES)), "structured_outputs"),
    ],
)
def test_fields_that_an_engine_cannot_take_are_refused_by_name(checked: PromptRequest, field: str) -> None:
    assert refused(checked).partition("[")[0] == field


def test_parameters_that_contradict_each_other_only_once_they_are_decoded_are_refused() -> None:
    with pytest.raises(REFUSALS, match="min_tokens"):
        check_request(CONFIG, with_params(min_tokens=9, max_tokens=8))


def test_any_token_id_is_accepted_where_the_models_configuration_has_no_vocabulary_size() -> None:
    config: Any = SimpleNamespace(**vars(CONFIG) | {"model_config": SimpleNamespace(get_vocab_size=lambda: 0)})
    check_request(config, request(TOKENS))


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
def test_parameters_that_drafts_cannot_have_are_refused_by_name(params: dict[str, Any]) -> None:
    config: Any = SimpleNamespace(**vars(CONFIG) | {"speculative_config": object()})
    check_request(config, request(params=SamplingParams()))
    with pytest.raises(InvalidRequest, match="cannot verify drafts") as refused:
        check_request(config, request(params=SamplingParams(**params)))
    assert [refused.value.field] == list(params)


@given(st.integers(1, 1024), st.integers(MIN_SEED - 2000, MIN_SEED) | st.integers(MAX_SEED - 2000, MAX_SEED + 2000))
def test_a_seed_is_accepted_if_and_only_if_that_of_each_candidate_is_in_range(n: int, seed: int) -> None:
    params = SamplingParams(n=n, seed=seed)
    if params.seed is None or (seed >= MIN_SEED and seed + n - 1 <= MAX_SEED):
        check_request(CONFIG, request(params=params))
    else:
        assert refused(request(params=params)) == "seed"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(set(SamplingParams.__struct_fields__) - {"n"})), VALUES)
def test_every_accepted_request_is_decoded_by_the_engine(name: str, value: Any) -> None:
    checked = request(params=changed(**{name: value}))
    try:
        check_request(CONFIG, checked)
    except REFUSALS:
        return
    message = EngineCoreRequest("id", [5], None, checked.params, None, 0.0, None, None, None)
    DECODER.decode(ENCODER.encode(message))


@given(st.dictionaries(st.text(max_size=20) | st.sampled_from(["stop", "seed", "logprobs", "logit_bias"]), VALUES))
def test_any_sampling_is_read_or_refused_by_name(sampling: dict[str, Any]) -> None:
    refused_field = "sampling"
    try:
        assert READER.read(sampling, 3).n == 3
    except InvalidRequest as error:
        refused_field = error.field
    assert refused_field.startswith("sampling")


@pytest.mark.parametrize(("flag", "number"), [(True, 0), (False, None), (5, 5)])
def test_logprobs_may_be_a_flag(flag: bool | int, number: int | None) -> None:
    assert READER.read({"logprobs": flag}, 1).logprobs == number
