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
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.sampling import REFUSALS, SamplingReader
from darts_server.vllm.structured_outputs import MAX_SAMPLING_BYTES
from darts_server.vllm.validation import MAX_SEED, MIN_SEED, check_request

SIZE = 64
CONFIG: Any = SimpleNamespace(
    model_config=SimpleNamespace(get_vocab_size=lambda: SIZE),
    scheduler_config=SimpleNamespace(enable_chunked_prefill=False),
    lora_config=None,
)
TOKENS = {"type": "token", "prompt_token_ids": [5]}
DEEP: Any = []
for _ in range(5000):
    DEEP = [DEEP]


def request(prompt: Any = TOKENS, params: SamplingParams | None = None, **options: Any) -> PromptRequest:
    return PromptRequest(prompt, params or SamplingParams(), "request", options)


def refused(checked: PromptRequest) -> str:
    """Return the field that is refused."""
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ignore_eos", None),
        ("temperature", True),
        ("min_tokens", 1.5),
        ("stop", ["a", 3]),
        ("top_k", 2**64),
        ("extra_args", {"deep": DEEP}),
        ("stop", ["\ud800"]),
    ],
)
def test_a_parameter_that_the_engine_cannot_decode_is_named(name: str, value: Any) -> None:
    assert refused(request(params=changed(**{name: value}))).partition("[")[0] == name


@pytest.mark.parametrize("values", [{"logprob_token_ids": [1]}, {"logprob_token_ids": [], "logprobs": 1}])
def test_a_parameter_that_changes_the_log_probs_of_others_is_refused(values: dict[str, Any]) -> None:
    assert refused(request(params=changed(**values))) == "logprob_token_ids"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ["a" * MAX_SAMPLING_BYTES]),
        ("stop_token_ids", list(range(MAX_SAMPLING_BYTES))),
        ("bad_words", ["abc"] * MAX_SAMPLING_BYTES),
        ("logit_bias", dict.fromkeys(range(MAX_SAMPLING_BYTES), 1.0)),
        ("allowed_token_ids", list(range(MAX_SAMPLING_BYTES))),
        ("extra_args", {"any": "a" * MAX_SAMPLING_BYTES}),
        ("structured_outputs", StructuredOutputsParams(regex="a" * MAX_SAMPLING_BYTES)),
    ],
)
def test_parameters_are_limited_in_size_and_the_largest_is_named(name: str, value: Any) -> None:
    assert refused(request(params=changed(**{name: value}))) == name


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": 2**64}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"trace_headers": {"traceparent": 4}}, "trace_headers"),
        ({"reasoning_parser_kwargs": {"deep": DEEP}}, "reasoning_parser_kwargs"),
    ],
)
def test_an_option_that_the_engine_cannot_decode_is_named(options: dict[str, Any], field: str) -> None:
    assert refused(request(**options)) == field


def test_parameters_that_contradict_each_other_only_once_they_are_decoded_are_refused() -> None:
    with pytest.raises(REFUSALS, match="min_tokens"):
        check_request(CONFIG, request(params=changed(min_tokens=9, max_tokens=8)))


@pytest.mark.parametrize("prompt", [{"cache_salt": 3}, {"prompt_token_ids": [True]}])
def test_a_prompt_that_the_engine_cannot_decode_is_refused(prompt: dict[str, Any]) -> None:
    assert refused(request(TOKENS | prompt)).partition("[")[0] in ("cache_salt", "prompt_token_ids")


@pytest.mark.parametrize("token", [-1, SIZE, 2**70])
def test_a_token_id_that_the_model_does_not_have_is_refused(token: int) -> None:
    assert refused(request(TOKENS | {"prompt_token_ids": [5, token, 6]})) == "prompt"


def test_any_token_id_is_accepted_where_the_models_configuration_has_no_vocabulary_size() -> None:
    config: Any = SimpleNamespace(**vars(CONFIG) | {"model_config": SimpleNamespace(get_vocab_size=lambda: 0)})
    check_request(config, request(TOKENS))


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
def test_whatever_passes_is_decoded_by_the_engine(name: str, value: Any) -> None:
    checked = request(params=changed(**{name: value}))
    try:
        check_request(CONFIG, checked)
    except REFUSALS:
        return
    message = EngineCoreRequest("id", [5], None, checked.params, None, 0.0, None, None, None)
    MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(message))


@given(st.dictionaries(st.text(max_size=20) | st.sampled_from(["stop", "seed", "logprobs", "logit_bias"]), VALUES))
def test_any_sampling_is_read_or_refused_by_name(sampling: dict[str, Any]) -> None:
    refused_field = "sampling"
    try:
        assert SamplingReader("processed_logprobs").read(sampling, 3).n == 3
    except InvalidRequest as error:
        refused_field = error.field
    assert refused_field.startswith("sampling")


@pytest.mark.parametrize(("flag", "number"), [(True, 0), (False, None), (5, 5)])
def test_logprobs_may_be_a_flag(flag: bool | int, number: int | None) -> None:
    assert SamplingReader("processed_logprobs").read({"logprobs": flag}, 1).logprobs == number
