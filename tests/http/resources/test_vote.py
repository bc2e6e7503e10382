"""Requests of votes: refused fields are named, and the description is complete."""

import json
from typing import Any

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import parse
from darts_server.http.openapi import json_body
from darts_server.http.resources.vote import EXAMPLES, VoteIn

REQUEST: dict[str, Any] = {"prompt": "7a-5b*4>", "n": 8, "pattern": "#([0-9])"}


def read(body: dict[str, Any]) -> VoteIn:
    return parse(VoteIn, json.dumps(body).encode())


def test_a_prompt_is_text_token_ids_or_a_chat() -> None:
    assert read(REQUEST).to_vote_request().prompt.text == "7a-5b*4>"
    assert read(REQUEST | {"prompt": [5, 6], "key": "k"}).to_vote_request().prompt.token_ids == [5, 6]
    chat = [{"role": "user", "content": "7"}]
    question = read({"messages": chat, "n": 1, "pattern": {"choices": ["7", "8"]}}).to_vote_request()
    assert (json.loads(question.prompt.messages or b""), question.pattern) == (chat, ["7", "8"])
    assert (question.weights, question.score) == ("majority", None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "body"),
        ({"messages": [{}]}, "body"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"pattern": ["7"]}, "pattern"),
        ({"pattern": {"choices": []}}, "pattern.choices"),
        ({"pattern": {"choices": [7]}}, "pattern.choices[0]"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(REQUEST | change)
    assert refused.value.field == field


def test_the_description_is_complete_and_its_examples_are_valid() -> None:
    assert "$ref" not in json.dumps(json_body(VoteIn, *EXAMPLES))
    for example in EXAMPLES:
        read(example)
