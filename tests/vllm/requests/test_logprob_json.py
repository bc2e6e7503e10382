"""The JSON of log-probs equals byte for byte what vLLM's routes make of vLLM's own log-probs."""

import json
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.outputs import CompletionOutput

from darts_server.vllm.api.logprob_answers import make_chat_form, make_completion_form, make_tokens_form
from darts_server.vllm.compat import answers_token_ids_as_texts
from darts_server.vllm.requests.logprob_json import ArrayLogprobs, Form, write_numbers, write_slices
from darts_server.vllm.requests.outputs import DeferredCompletion
from tests.vllm.requests.test_outputs import Case, DeferringFrontend, Frontend, draw_case, entries, run, tokenizer

SERVING: Any = SimpleNamespace(
    return_tokens_as_token_ids=False,
    _get_decoded_token=OpenAIServingCompletion._get_decoded_token,
)
SERVING._get_top_logprobs = OpenAIServingChat._get_top_logprobs.__get__(SERVING)


def draw_case_with_logprobs(random: Random) -> Case:
    case = draw_case(random)
    assume(case.params.logprobs is not None and case.params.detokenize)
    return case


def arrays_of(case: Case) -> ArrayLogprobs:
    (completion,) = run(DeferringFrontend(case)).outputs
    assert isinstance(completion, DeferredCompletion)
    return ArrayLogprobs(completion)


def written(logprobs: ArrayLogprobs, form: Form) -> str:
    return "".join(write_slices(logprobs, form))


def vllms_own(make: Any, wanted: CompletionOutput, options: dict[str, Any]) -> str:
    made = make(SERVING, token_ids=wanted.token_ids, top_logprobs=wanted.logprobs, **options)
    return json.dumps(made.model_dump(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def draw_options(random: Random, case: Case) -> dict[str, Any]:
    top = cast(int, case.params.logprobs)
    return {
        "num_output_top_logprobs": random.choice([0, max(top, 1), top + 3]),
        "logprob_token_ids": random.choice([None, None, [1, 2]]),
        "return_as_token_id": random.choice([None, False, True]),
    }


@given(st.randoms(use_true_random=False))
def test_completions(random: Random) -> None:
    case = draw_case_with_logprobs(random)
    options = draw_options(random, case)
    wanted = run(Frontend(case)).outputs[0]
    own = vllms_own(
        OpenAIServingCompletion._create_completion_logprobs,
        wanted,
        options | {"tokenizer": tokenizer(case.tokenizer)},
    )
    assert written(arrays_of(case), make_completion_form(SERVING, options)) == own


@given(st.randoms(use_true_random=False))
def test_chats(random: Random) -> None:
    case = draw_case_with_logprobs(random)
    options = draw_options(random, case)
    if random.random() < 0.3:
        options["num_output_top_logprobs"] = None
    wanted = run(Frontend(case)).outputs[0]
    own = vllms_own(OpenAIServingChat._create_chat_logprobs, wanted, options | {"tokenizer": tokenizer(case.tokenizer)})
    assert written(arrays_of(case), make_chat_form(SERVING, options)) == own


@pytest.mark.skipif(not answers_token_ids_as_texts(), reason="this vLLM answers tokens in a form of its own")
@given(st.randoms(use_true_random=False), st.booleans())
def test_tokens(random: Random, detokenize: bool) -> None:
    case = draw_case_with_logprobs(random)
    if not case.params.stop:
        params = case.params.clone()
        params.detokenize = detokenize
        case = replace(case, params=params)
    options = {"num_output_top_logprobs": random.choice([None, 0, 1, 5])}
    wanted = run(Frontend(case)).outputs[0]
    own = vllms_own(ServingTokens._create_tokens_logprobs, wanted, options)
    assert written(arrays_of(case), make_tokens_form(SERVING, options)) == own


@given(st.randoms(use_true_random=False))
def test_vllms_objects_are_made_when_an_entry_is_read(random: Random) -> None:
    case = draw_case_with_logprobs(random)
    wanted = run(Frontend(case)).outputs[0].logprobs
    assert wanted is not None
    logprobs = arrays_of(case)
    assert len(logprobs) == len(wanted)
    assert [list(entry.items()) for entry in logprobs] == [list((entry or {}).items()) for entry in wanted]
    assert entries(logprobs[:2]) == entries(wanted[:2])


def test_minus_infinity_has_a_number_and_other_numbers_that_json_lacks_are_refused() -> None:
    assert write_numbers(np.array([[-np.inf, -0.5]], dtype=np.float32)) == [["-9999.0", "-0.5"]]
    for number in (np.nan, np.inf):
        with pytest.raises(ValueError, match="Out of range float"):
            write_numbers(np.array([[-0.5, number]]))
