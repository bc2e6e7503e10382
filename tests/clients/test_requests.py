from typing import Any

import pytest

from darts_client._requests import CompletionRequest, Prompts, completion_request, split_prompts


def build(prompts: Prompts = "a", **changes: Any) -> CompletionRequest:
    plain: dict[str, Any] = {
        "model": "tiny",
        "group_size": 2,
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": None,
        "policy": None,
        "logprobs": True,
        "sampling": {},
    }
    return completion_request(prompts, **(plain | changes))


@pytest.mark.parametrize(
    ("prompts", "listed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([[1], "a"], [[1], "a"]),
    ],
)
def test_prompts_come_in_every_form(prompts: Prompts, listed: list[str | list[int]]) -> None:
    assert split_prompts(prompts) == listed


def test_no_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts is empty"):
        split_prompts([])


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(TypeError):
        split_prompts([[1, 2.5]])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        split_prompts([1, [2]])  # type: ignore[arg-type]


def test_the_body_asks_for_a_group_with_tokens_and_their_logprobs() -> None:
    assert build(["a", "b"]).body == {
        "model": "tiny",
        "prompt": ["a", "b"],
        "n": 2,
        "max_tokens": 16,
        "temperature": 1.0,
        "return_token_ids": True,
        "logprobs": 0,
    }


def test_logprobs_can_be_left_out() -> None:
    assert "logprobs" not in build(logprobs=False).body


def test_a_seed_of_zero_is_a_seed() -> None:
    assert build(seed=0).body["seed"] == 0


def test_the_policy_is_a_header() -> None:
    assert build(policy="off").headers == {"X-Darts-Policy": "off"}
    assert build().headers == {}


def test_other_sampling_names_go_through() -> None:
    body = build(sampling={"top_p": 0.9, "stop": ["\n"]}).body
    assert (body["top_p"], body["stop"]) == (0.9, ["\n"])


@pytest.mark.parametrize("name", ["prompt", "n", "stream", "return_token_ids"])
def test_the_names_that_the_parser_relies_on_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build(sampling={name: 1})


def test_text_and_tokens_in_one_request_are_refused() -> None:
    mixed: list[str | list[int]] = ["a", [1]]
    with pytest.raises(ValueError, match="not both"):
        build(mixed)


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size"):
        build(group_size=0)
