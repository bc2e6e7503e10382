"""Which answers are kept, and which engine gets which."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from darts_server.drafts.history import ANSWER_BYTES, MAX_MEMORIES, PROMPT_BYTES, History, hash_prompt

KEY = hash_prompt([1, 2, 3], None)
OTHER = hash_prompt([1, 2, 4], None)
MANY = 1 << 30


class Saved(dict[int, bytes]):
    """Stands for the file."""

    def put(self, number: int, value: bytes | None) -> None:
        if value is None:
            self.pop(number, None)
        else:
            self[number] = value

    def rows(self) -> list[tuple[int, bytes | None]]:
        return sorted(self.items())


def tokens(*token_ids: int) -> bytes:
    return array("i", token_ids).tobytes()


def sent(history: History, key: bytes, memory: int) -> list[tuple[int, list[int]]]:
    return [(age, np.frombuffer(answer, np.int32).tolist()) for age, answer in history.take_unsent(key, memory)]


@pytest.fixture
def saved() -> Saved:
    return Saved()


def make(saved: Saved, limit: int = MANY) -> History:
    return History(limit, saved.put)


def test_prompts_and_adapters_have_keys_of_their_own() -> None:
    keys = [
        hash_prompt([1, 2], None),
        hash_prompt([1, 2], "a"),
        hash_prompt([1, 2], "b"),
        hash_prompt([2, 1], None),
        hash_prompt([], "a"),
    ]
    assert len(set(keys)) == 5
    assert hash_prompt([1, 2], "a") == hash_prompt((1, 2), "a")


def test_a_memory_gets_what_it_has_not_generated_once_and_the_newest_first(saved: Saved) -> None:
    history = make(saved)
    history.add(KEY, tokens(5), memory=1)
    history.add(KEY, tokens(6), memory=2)
    history.add(KEY, tokens(7), memory=1)
    assert sent(history, KEY, 2) == [(0, [7]), (0, [5])]
    assert sent(history, KEY, 2) == []
    assert sent(history, KEY, 1) == [(0, [6])]
    history.add(KEY, tokens(8), memory=1)
    assert sent(history, KEY, 2) == [(0, [8])]
    assert sent(history, KEY, 3) == [(0, [8]), (0, [7]), (0, [6]), (0, [5])]


def test_answers_that_did_not_arrive_are_sent_again(saved: Saved) -> None:
    history = make(saved)
    history.add(KEY, tokens(5), memory=1)
    assert sent(history, KEY, 2) == [(0, [5])]
    history.send_again(KEY, 2)
    history.send_again(OTHER, 2)
    assert sent(history, KEY, 2) == [(0, [5])]


def test_other_prompts_get_nothing(saved: Saved) -> None:
    history = make(saved)
    history.add(KEY, tokens(5), memory=1)
    assert sent(history, OTHER, 2) == []
    assert history.prompts == 1


def test_answers_age_with_each_change_of_the_weights(saved: Saved) -> None:
    history = make(saved)
    for version in (0, 0, 1, 4):
        history.age_if_new_version(version)
        history.add(KEY, tokens(version), memory=1)
    assert sent(history, KEY, 2) == [(0, [4]), (1, [1]), (2, [0]), (2, [0])]


def test_a_restart_loses_nothing_and_its_answers_are_older(saved: Saved) -> None:
    history = make(saved)
    history.age_if_new_version(7)
    history.add(KEY, tokens(5, 6), memory=1)
    history.age_if_new_version(8)
    history.add(OTHER, tokens(7), memory=1)
    again = make(saved)
    assert again.restore(saved.rows(), vocabulary=10) == 0
    again.age_if_new_version(0)
    assert (again.bytes, again.prompts) == (history.bytes, 2)
    assert sent(again, KEY, 1) == [(2, [5, 6])]
    assert sent(again, OTHER, 1) == [(1, [7])]
    again.add(KEY, tokens(9), memory=1)
    assert len(saved) == 3


def test_damaged_answers_and_answers_of_another_model_are_counted_and_dropped(saved: Saved) -> None:
    history = make(saved)
    for token in (5, 6, 10, -1):
        history.add(KEY, tokens(token), memory=1)
    rows = [*saved.rows(), (11, None), (12, b"short"), (13, saved[1] + b"x"), (14, saved[1][:20])]
    again = make(saved)
    assert again.restore(rows, vocabulary=10) == 6
    assert sent(again, KEY, 1) == [(1, [6]), (1, [5])]
    assert sorted(saved) == [1, 2]
    again.add(KEY, tokens(3), memory=1)
    assert sorted(saved) == [1, 2, 15]


def test_the_oldest_answers_are_dropped_at_the_limit(saved: Saved) -> None:
    history = make(saved, limit=3 * (ANSWER_BYTES + 4))
    for number, key in enumerate([KEY, OTHER, KEY, KEY]):
        history.add(key, tokens(number), memory=1)
    assert history.bytes == 3 * (ANSWER_BYTES + 4)
    assert sent(history, KEY, 2) == [(0, [3]), (0, [2])]
    history.add(KEY, tokens(4), memory=1)
    assert history.prompts == 1
    assert sent(history, OTHER, 2) == []
    assert sorted(saved) == [3, 4, 5]


def test_a_lower_limit_holds_after_a_restart(saved: Saved) -> None:
    history = make(saved)
    for number in range(4):
        history.add(KEY, tokens(number), memory=1)
    again = make(saved, limit=0)
    again.restore(saved.rows(), vocabulary=10)
    assert (again.bytes, again.prompts, dict(saved)) == (0, 0, {})


def test_a_prompt_keeps_its_newest_answers(saved: Saved) -> None:
    history = make(saved)
    third = PROMPT_BYTES // 4 // 3 + 1
    for token in range(4):
        history.add(KEY, tokens(*[token] * third), memory=1)
    found = sent(history, KEY, 2)
    assert [answer[0] for _, answer in found] == [3, 2]
    # The beginning of an answer that is longer than all answers of a prompt may be.
    history.add(KEY, tokens(*range(PROMPT_BYTES)), memory=1)
    assert sent(history, KEY, 3) == [(0, list(range(PROMPT_BYTES // 4)))]


def test_many_engines_that_come_and_go_take_no_more_memory(saved: Saved) -> None:
    history = make(saved)
    history.add(KEY, tokens(5), memory=0)
    for memory in range(1, 3 * MAX_MEMORIES):
        assert sent(history, KEY, memory) == [(0, [5])]
    assert len(history._prompts[KEY].last_sent) == MAX_MEMORIES
    assert sent(history, KEY, 3 * MAX_MEMORIES - 1) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_history_agrees_with_a_plain_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    saved = Saved()
    limit = 20 * (ANSWER_BYTES + 40)
    history = make(saved, limit)
    plain: list[tuple[bytes, int, int, list[int]]] = []
    seen: dict[tuple[bytes, int], int] = {}
    version = 0
    keys = [hash_prompt([number], None) for number in range(4)]
    for step in range(1, 200):
        version += int(rng.random() < 0.1)
        history.age_if_new_version(version)
        key = keys[rng.integers(4)]
        memory = int(rng.integers(1, 4))
        if rng.random() < 0.7:
            token_ids = rng.integers(0, 9, rng.integers(1, 20)).tolist()
            history.add(key, tokens(*token_ids), memory)
            plain.append((key, version, memory, [step, *token_ids]))
            while sum(4 * len(entry[3]) - 4 + ANSWER_BYTES for entry in plain) > limit:
                plain.pop(0)
        else:
            found: Sequence[tuple[int, list[int]]] = [
                (version - made, token_ids[1:])
                for of, made, by, token_ids in reversed(plain)
                if of == key and by != memory and token_ids[0] > seen.get((key, memory), 0)
            ]
            assert sent(history, key, memory) == found
            seen[key, memory] = step
    assert len(saved) == len(plain)
