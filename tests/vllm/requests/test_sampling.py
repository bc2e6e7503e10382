import json
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.requests.sampling import SamplingReader, check_logprobs, json_type

NEUTRAL_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
PROCESSED = SamplingReader("processed_logprobs")
RAW = SamplingReader("raw_logprobs")
CHANGING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {"5": 1.0}},
    {"allowed_token_ids": [5, 6]},
    {"bad_words": ["7"]},
    {"min_tokens": 3},
    {"structured_outputs": {"regex": "[0-9]"}},
]


def test_parameters_that_a_request_does_not_name_are_neutral() -> None:
    found = PROCESSED.resolve({"max_tokens": 7, "logprobs": True})
    assert NEUTRAL_SAMPLING.items() <= found.items()
    assert (found["max_tokens"], found["logprobs"]) == (7, 0)
    assert not {"seed", "stop", "logit_bias", "n", "output_kind", "extra_args"} & found.keys()


@pytest.mark.parametrize("sampling", [*CHANGING, {"seed": 5, "stop": "a", "stop_token_ids": [3]}])
def test_parameters_in_force_are_json(sampling: dict[str, Any]) -> None:
    found = PROCESSED.resolve(sampling)
    assert found.keys() >= sampling.keys()
    json.dumps(found)


@pytest.mark.parametrize("changing", CHANGING)
def test_raw_logprobs_are_refused_where_another_distribution_is_sampled(changing: dict[str, Any]) -> None:
    [name] = changing
    with pytest.raises(InvalidRequest, match=f"before {name}.*--logprobs-mode processed_logprobs") as error:
        RAW.resolve({**changing, "logprobs": True})
    assert error.value.field == "sampling.logprobs"
    RAW.resolve(changing)
    PROCESSED.resolve({**changing, "logprobs": True})


def test_the_error_names_the_field_of_the_caller() -> None:
    check_logprobs(SamplingParams(temperature=0.5), "processed_logprobs", "logprobs")
    check_logprobs(SamplingParams(), "raw_logprobs", "logprobs")
    with pytest.raises(InvalidRequest, match="before temperature") as error:
        check_logprobs(SamplingParams(temperature=0.5), "raw_logprobs", "logprobs")
    assert error.value.field == "logprobs"
    with pytest.raises(InvalidRequest, match="no log-probs but raw_logits; start the server"):
        check_logprobs(SamplingParams(), "raw_logits", "logprobs")


def test_raw_logprobs_of_the_models_own_distribution_are_returned() -> None:
    everything_else = {"seed": 3, "stop": ["a"], "ignore_eos": True, "max_tokens": 9, "detokenize": True}
    RAW.resolve({**NEUTRAL_SAMPLING, **everything_else, "top_k": -1, "logprobs": 5})


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_returned_as_logprobs(mode: str) -> None:
    SamplingReader(mode).resolve({})
    with pytest.raises(InvalidRequest, match=f"no log-probs but {mode}"):
        SamplingReader(mode).resolve({"logprobs": 0})


def test_prompts_of_a_batch_share_parameters_that_are_parsed_once() -> None:
    reader = SamplingReader("processed_logprobs")
    sampling = {"max_tokens": None, "stop": ["a"]}
    reader.resolve(sampling)
    first = reader.read(sampling, 4)
    first.max_tokens = 10
    second = reader.read(sampling, 8)
    assert (first.n, first.max_tokens) == (4, 10)
    assert (second.n, second.max_tokens) == (8, None), "each prompt has its own limit"
    assert first.stop is second.stop
    assert reader.read({**sampling, "stop": ["b"]}, 1).stop == ["b"]
    assert reader.read(sampling, 1).stop == ["a"]


def test_a_choice_that_vllm_converts_for_one_prompt_is_still_there_for_the_next() -> None:
    reader = SamplingReader("processed_logprobs")
    sampling = {"structured_outputs": {"choice": ["yes", "no"]}}
    first = reader.read(sampling, 1).structured_outputs
    assert first is not None
    first.choice = None
    first.grammar = "root ::= ..."
    second = reader.read(sampling, 1).structured_outputs
    assert second is not None
    assert (second.choice, second.grammar) == (["yes", "no"], None)
    assert reader.resolve(sampling)["structured_outputs"] == reader.resolve({**sampling})["structured_outputs"]


def test_parameters_that_were_refused_are_refused_again() -> None:
    wrong = {"max_tokens": 0}
    for _ in range(2):
        with pytest.raises(InvalidRequest) as error:
            PROCESSED.read(wrong, 1)
        assert error.value.field == "sampling.max_tokens"


def test_arrays_that_python_callers_may_pass_are_no_part_of_a_parameters_type_in_json() -> None:
    # Later versions of vLLM take an array for ``prompt_logprob_token_ids``, which msgspec allows in no union.
    assert json_type(np.ndarray | list[list[int]] | None) == list[list[int]] | None
    assert json_type(int | None) == int | None
    assert json_type(bool) is bool
