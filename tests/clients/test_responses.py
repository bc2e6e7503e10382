from typing import Any

import httpx
import pytest

from darts_client import ProtocolError
from darts_client._requests import CompletionRequest, Prompts, completion_request
from darts_client._responses import first_model, parse_groups, parse_models

from .answers import MODELS, answer, choice, completion, full_completion


def asked(prompts: Prompts = "a", group_size: int = 2, logprobs: bool = True, **sampling: Any) -> CompletionRequest:
    return completion_request(
        prompts,
        model="tiny",
        group_size=group_size,
        max_tokens=16,
        temperature=1.0,
        seed=None,
        policy=None,
        logprobs=logprobs,
        sampling=sampling,
    )


def refusal(request: CompletionRequest, *choices: dict[str, Any]) -> str:
    with pytest.raises(ProtocolError) as caught:
        parse_groups(request, answer(completion(*choices)))
    return str(caught.value)


def test_each_prompt_gets_its_group_in_prompt_order_however_choices_are_ordered() -> None:
    request = asked([[1], [2], [3]])
    body = full_completion(request.body)
    body["choices"].reverse()
    groups = parse_groups(request, answer(body))
    assert [group.prompt_token_ids for group in groups] == [(1,), (2,), (3,)]
    assert [group.number for group in groups] == [0, 1, 2]
    assert [[t.text for t in group.trajectories] for group in groups] == [
        ["answer 0", "answer 1"],
        ["answer 2", "answer 3"],
        ["answer 4", "answer 5"],
    ]
    assert [[t.index for t in group.trajectories] for group in groups] == [[0, 1]] * 3


def test_a_trajectory_has_its_tokens_logprobs_and_finish_reason() -> None:
    [group] = parse_groups(asked(group_size=1), answer(completion(choice(0, (5, 6, 7), finish_reason="length"))))
    [trajectory] = group.trajectories
    assert trajectory.token_ids == (5, 6, 7)
    assert trajectory.logprobs == (-0.5, -0.5, -0.5)
    assert trajectory.finish_reason == "length"
    assert group.lengths == (3,)


def test_without_logprobs_there_are_none() -> None:
    body = completion(choice(0, logprobs=None), choice(1, logprobs=None))
    [group] = parse_groups(asked(logprobs=False), answer(body))
    assert [t.logprobs for t in group.trajectories] == [None, None]


def test_the_prompt_may_be_missing() -> None:
    [group] = parse_groups(asked([1, 2]), answer(completion(choice(0), choice(1))))
    assert group.prompt_token_ids is None


def test_the_group_id_is_the_header_or_else_the_answers_id() -> None:
    body = completion(choice(0), choice(1))
    [shaped] = parse_groups(asked(), answer(body, {"X-Darts-Group-Id": "g-1"}))
    [plain] = parse_groups(asked(), answer(body))
    assert (shaped.group_id, plain.group_id) == ("g-1", "cmpl-1")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_choices_is_refused(count: int) -> None:
    message = refusal(asked(), *(choice(k) for k in range(count)))
    assert message == f"1 prompt(s) with 2 choices each make 2, got {count}"


def test_an_index_given_twice_is_refused() -> None:
    assert refusal(asked(), choice(1), choice(1)) == "choice 1 appears twice"


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_of_no_prompt_is_refused(index: int) -> None:
    assert refusal(asked(), choice(0), choice(index)) == f"choice {index} is not among 0..1"


@pytest.mark.parametrize("reason", ["abort", "error", "", None])
def test_a_trajectory_that_did_not_end_by_itself_is_refused(reason: str | None) -> None:
    message = refusal(asked(), choice(0), choice(1, finish_reason=reason))
    assert message == f"choice 1 ended with {reason!r}, not with stop or length"


def test_missing_token_ids_are_refused() -> None:
    assert "choice 0 has no token_ids" in refusal(asked(), choice(0) | {"token_ids": None}, choice(1))


def test_missing_logprobs_are_refused() -> None:
    assert refusal(asked(), choice(0), choice(1, logprobs=None)) == "choice 1 has no logprobs"


def test_fewer_logprobs_than_tokens_are_refused() -> None:
    short = choice(1, logprobs={"token_logprobs": [-0.5]})
    assert refusal(asked(), choice(0), short) == "choice 1 has 2 tokens but 1 logprobs"


def test_a_logprob_that_is_no_number_is_refused() -> None:
    message = refusal(asked(), choice(0), choice(1, logprobs={"token_logprobs": [-0.5, None]}))
    assert message.startswith("/v1/completions: choices.1.logprobs.token_logprobs.1:")


def test_choices_that_slid_into_the_next_group_are_refused() -> None:
    # One too few of the first prompt and one too many of the second leave no gap in the indices.
    slid = (choice(0, prompt=[1]), choice(1, prompt=[2]), choice(2, prompt=[2]), choice(3, prompt=[2]))
    assert refusal(asked(["a", "b"]), *slid) == "the choices of prompt 0 answer different prompts"


def test_exchanged_prompts_are_refused() -> None:
    exchanged = (choice(0, prompt=[2]), choice(1, prompt=[1]))
    assert refusal(asked([[1], [2]], group_size=1), *exchanged) == "the choices of prompt 0 answer another prompt"


def test_a_prompt_that_the_server_was_told_to_truncate_may_differ() -> None:
    request = asked([1, 2, 3], group_size=1, truncate_prompt_tokens=2)
    [group] = parse_groups(request, answer(completion(choice(0, prompt=[2, 3]))))
    assert group.prompt_token_ids == (2, 3)


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]", b'{"choices": null}', b'{"choices": [{"index": "0"}]}'])
def test_what_is_no_completion_is_refused(content: bytes) -> None:
    response = httpx.Response(200, content=content, request=httpx.Request("POST", "http://server/v1/completions"))
    with pytest.raises(ProtocolError, match=r"^/v1/completions: ") as caught:
        parse_groups(asked(), response)
    assert caught.value.__cause__ is not None


def test_models_keep_the_servers_order() -> None:
    assert parse_models(answer(MODELS)) == ["tiny", "tiny:raw"]


def test_without_a_model_there_is_no_first() -> None:
    assert first_model(["a", "b"]) == "a"
    with pytest.raises(ProtocolError, match="lists no model"):
        first_model([])
