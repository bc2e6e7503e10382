from typing import Any

import httpx
import pytest

from darts_client import ProtocolError
from darts_client._completions import CompletionRequest, completion_request, first_model, parse_groups, parse_models
from darts_client._prompts import Prompts

from .vllm_answers import MODELS, answer, choice, completion


def build(prompts: Prompts = "a", **changes: Any) -> CompletionRequest:
    defaults: dict[str, Any] = {"model": "tiny", "group_size": 2, "policy": None, "logprobs": True, "sampling": {}}
    return completion_request(prompts, **(defaults | changes))


def parse_error(request: CompletionRequest, *choices: dict[str, Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse_groups(request, answer(completion(*choices)))
    return str(caught.value)


def test_the_body_requests_token_ids_and_logprobs_and_neutral_sampling() -> None:
    assert build(["a", "b"]).body == {
        "model": "tiny",
        "prompt": ["a", "b"],
        "n": 2,
        "return_token_ids": True,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
    }


def test_other_sampling_parameters_are_passed_on_and_the_policy_is_a_header() -> None:
    request = build(logprobs=False, policy="off", sampling={"seed": 0, "top_p": 0.9, "stop": ["\n"]})
    assert "logprobs" not in request.body
    assert (request.body["seed"], request.body["top_p"], request.body["stop"]) == (0, 0.9, ["\n"])
    assert (request.headers, build().headers) == ({"X-Darts-Policy": "off"}, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"sampling": {name: 1}}, name) for name in ("prompt", "n", "stream", "return_token_ids")),
        ({"prompts": ["a", [1]]}, "not both"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_arguments_that_do_not_fit_one_request_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_groups_are_in_prompt_order_whatever_the_order_of_choices() -> None:
    request = build([[1], [2], [3]])
    choices = [choice(place, prompt=[1 + place // 2]) for place in reversed(range(6))]
    groups = parse_groups(request, answer(completion(*choices)))
    assert [group.prompt_token_ids for group in groups] == [(1,), (2,), (3,)]
    assert [group.number for group in groups] == [0, 1, 2]
    assert [[t.text for t in group.trajectories] for group in groups] == [
        ["answer 0", "answer 1"],
        ["answer 2", "answer 3"],
        ["answer 4", "answer 5"],
    ]
    assert [[t.index for t in group.trajectories] for group in groups] == [[0, 1]] * 3


def test_a_trajectory_has_its_tokens_logprobs_and_finish_reason_and_the_prompts_tokens_may_be_missing() -> None:
    [group] = parse_groups(build(group_size=1), answer(completion(choice(0, (5, 6, 7), finish_reason="length"))))
    [trajectory] = group.trajectories
    assert (trajectory.token_ids, trajectory.logprobs) == ((5, 6, 7), (-0.5, -0.5, -0.5))
    assert (trajectory.finish_reason, group.lengths, group.prompt_token_ids) == ("length", (3,), None)


def test_logprobs_are_none_if_not_requested() -> None:
    body = completion(choice(0, logprobs=None), choice(1, logprobs=None))
    [group] = parse_groups(build(logprobs=False), answer(body))
    assert [t.logprobs for t in group.trajectories] == [None, None]


def test_the_group_id_is_the_header_or_the_id_of_the_answer() -> None:
    body = completion(choice(0), choice(1))
    [shaped] = parse_groups(build(), answer(body, {"X-Darts-Group-Id": "g-1"}))
    [plain] = parse_groups(build(), answer(body))
    assert (shaped.group_id, plain.group_id) == ("g-1", "cmpl-1")


SHORT = choice(1, logprobs={"token_logprobs": [-0.5]})
NO_NUMBER = choice(1, logprobs={"token_logprobs": [-0.5, None]})


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "expected 2 choices, 2 for each prompt, got 0"),
        ([choice(k) for k in range(3)], "expected 2 choices, 2 for each prompt, got 3"),
        ([choice(1), choice(1)], "choice 1 appears twice"),
        ([choice(0), choice(-1)], "choice -1 is not among 0..1"),
        ([choice(0), choice(2)], "choice 2 is not among 0..1"),
        *(
            ([choice(0), choice(1, finish_reason=reason)], f"choice 1 has finish reason {reason!r}, not stop or length")
            for reason in ("abort", "error", "", None)
        ),
        ([choice(0) | {"token_ids": None}, choice(1)], "choice 0 has no token_ids"),
        ([choice(0), choice(1, logprobs=None)], "choice 1 has no logprobs"),
        ([choice(0), SHORT], "choice 1 has 2 tokens but 1 logprobs"),
        ([choice(0), NO_NUMBER], "/v1/completions: choices.1.logprobs.token_logprobs.1:"),
    ],
)
def test_choices_that_do_not_fit_the_request_are_rejected(choices: list[dict[str, Any]], message: str) -> None:
    assert parse_error(build(), *choices).startswith(message)


def test_choices_that_moved_into_the_next_group_are_rejected() -> None:
    # A choice too few for the first prompt and a choice too many for the second leave no gap in the indices.
    shifted = (choice(0, prompt=[1]), choice(1, prompt=[2]), choice(2, prompt=[2]), choice(3, prompt=[2]))
    assert parse_error(build(["a", "b"]), *shifted) == "the choices of prompt 0 answer different prompts"


def test_exchanged_prompts_are_rejected() -> None:
    exchanged = (choice(0, prompt=[2]), choice(1, prompt=[1]))
    assert parse_error(build([[1], [2]], group_size=1), *exchanged) == "the choices of prompt 0 answer another prompt"


def test_a_prompt_that_the_server_truncates_may_differ() -> None:
    request = build([1, 2, 3], group_size=1, sampling={"truncate_prompt_tokens": 2})
    [group] = parse_groups(request, answer(completion(choice(0, prompt=[2, 3]))))
    assert group.prompt_token_ids == (2, 3)


@pytest.mark.parametrize("content", [b"<html>", b'{"choices": null}'])
def test_malformed_completions_are_rejected(content: bytes) -> None:
    response = httpx.Response(200, content=content, request=httpx.Request("POST", "http://server/v1/completions"))
    with pytest.raises(ProtocolError, match=r"^/v1/completions: ") as caught:
        parse_groups(build(), response)
    assert caught.value.__cause__ is not None


def test_models_are_in_the_servers_order_and_an_empty_list_is_an_error() -> None:
    assert parse_models(answer(MODELS)) == ["tiny", "tiny:raw"]
    assert first_model(["a", "b"]) == "a"
    with pytest.raises(ProtocolError, match="lists no model"):
        first_model([])
