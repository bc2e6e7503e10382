from typing import Any

import pytest

from darts_server.rollout.turns.chat_history import ChatHistory

OPENING: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
CALL = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 2}'}}


def history_after(answer: dict[str, Any], opening: list[dict[str, Any]] = OPENING) -> ChatHistory:
    return ChatHistory([*opening, answer, {"role": "user", "content": "And 3 + 3?"}])


@pytest.mark.parametrize(
    ("text", "sent_again"),
    [
        ("It is 4.", "It is 4."),
        (" It is 4.\n", "It is 4."),
        ("<think>2, 3, 4</think>\n\nIt is 4.", "It is 4."),
        ("<think>2, 3, 4</think>It is 4.", "<think>2, 3, 4</think>It is 4."),
        ("It is 4.", [{"type": "text", "text": "It is 4."}]),
        ("\ud800", "\ud800"),
    ],
)
def test_an_answer_is_found_again_in_the_history(text: str, sent_again: object) -> None:
    later = history_after({"role": "assistant", "content": sent_again})
    assert set(ChatHistory(OPENING).keys_of(text)) & set(later.answers)


@pytest.mark.parametrize(
    "sent_again",
    [
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": "It is 4."},
        {"role": "assistant", "content": None},
    ],
)
def test_other_answers_are_not_taken_for_it(sent_again: dict[str, Any]) -> None:
    assert not set(ChatHistory(OPENING).keys_of("It is 4.")) & set(history_after(sent_again).answers)


def test_an_equal_answer_in_the_examples_of_another_prompt_is_not_taken_for_it() -> None:
    few_shot = history_after({"role": "assistant", "content": "4"}, [{"role": "user", "content": "1 + 3?"}])
    assert not set(ChatHistory(OPENING).keys_of("4")) & set(few_shot.answers)


@pytest.mark.parametrize("arguments", ['{"b": 2, "a": 2}', '{"a":2,"b":2}', {"a": 2, "b": 2}])
def test_a_tool_call_is_found_again_in_whatever_form_its_arguments_are(arguments: object) -> None:
    answered = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "so"}
    function = {"name": "add", "arguments": arguments}
    later = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert ChatHistory(OPENING).key_of(answered) in history_after(later).answers


@pytest.mark.parametrize(
    "calls",
    [
        [{"function": {"name": "add", "arguments": "{"}}],
        [{"function": {"arguments": "[" * 200_000}}],
        [{}],
        [None],
        "no list",
    ],
)
def test_a_malformed_tool_call_is_no_error(calls: object) -> None:
    message = {"role": "assistant", "content": [None, 3], "tool_calls": calls}
    assert ChatHistory(OPENING).key_of(message) in history_after(message).answers


def test_keys_of_different_callers_differ() -> None:
    later = ChatHistory([*OPENING, {"role": "assistant", "content": "4"}], "a")
    assert set(ChatHistory(OPENING, "a").keys_of("4")) & set(later.answers)
    assert not set(ChatHistory(OPENING, "b").keys_of("4")) & set(later.answers)


def test_images_count_by_their_type() -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:…"}}]}
    opening = [*OPENING, picture]
    assert set(ChatHistory(opening).keys_of("a cat")) & set(
        history_after({"role": "assistant", "content": "a cat"}, opening).answers
    )
