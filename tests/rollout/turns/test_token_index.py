from random import Random

from hypothesis import given
from hypothesis import strategies as st

from darts_server.rollout.turns.token_index import Known, TokenIndex, hash_of

TOKENS = st.lists(st.integers(0, 3), max_size=6)
KNOWN = st.lists(st.tuples(TOKENS, TOKENS.filter(bool)))


def add(index: TokenIndex, prompt: list[int], answer: list[int], rank: int | None = None, caller: str = "") -> None:
    index.add(caller, index.extend(hash_of(index.prefix_hashes(prompt)), len(prompt), answer), rank)


def known_prefixes(index: TokenIndex, tokens: list[int], caller: str = "") -> list[tuple[int, Known]]:
    return list(index.known_prefixes(caller, index.prefix_hashes(tokens)))


def holds_prefix(index: TokenIndex, tokens: list[int]) -> bool:
    return bool(known_prefixes(index, tokens))


@given(KNOWN, TOKENS)
def test_a_prompt_is_found_exactly_if_a_known_sequence_begins_it(
    known: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    index = TokenIndex(100)
    for parts in known:
        add(index, *parts)
    sequences = [[*begin, *answer] for begin, answer in known]
    assert holds_prefix(index, prompt) == any(prompt[: len(sequence)] == sequence for sequence in sequences)


@given(KNOWN, TOKENS)
def test_known_prefixes_come_the_longest_first_and_say_which_engine_has_them(
    known: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    index = TokenIndex(100)
    for rank, parts in enumerate(known):
        add(index, *parts, rank)
    sequences = {(*begin, *answer): rank for rank, (begin, answer) in enumerate(known)}
    begun = sorted((each for each in sequences if tuple(prompt[: len(each)]) == each), key=len, reverse=True)
    found = known_prefixes(index, prompt)
    assert found == [(len(each), Known(is_answer=False, rank=sequences[each])) for each in begun]


def test_each_caller_has_its_own_sequences_also_if_they_are_the_same() -> None:
    index = TokenIndex(100)
    for rank, caller in enumerate("abc"):
        add(index, [3, 4], [5], rank, caller)
    for rank, caller in enumerate("abc"):
        assert known_prefixes(index, [3, 4, 5, 6], caller) == [(3, Known(is_answer=False, rank=rank))]
    assert not known_prefixes(index, [3, 4, 5, 6], "d")


def test_an_answer_stays_one_when_it_comes_again_as_a_prompt() -> None:
    index = TokenIndex(100)
    key = hash_of(index.prefix_hashes([3, 4]))
    index.add("", key, 1, is_answer=True)
    index.add("", key, 2)
    assert known_prefixes(index, [3, 4]) == [(2, Known(is_answer=True, rank=2))]


def test_several_sequences_with_the_same_highest_bits_are_told_apart() -> None:
    index, random = TokenIndex(kept=40_000), Random(0)
    answers = [random.choices(range(1000), k=4) for _ in range(40_000)]
    for answer in answers:
        add(index, [3], answer)
    assert index._counts.max() > 1
    assert all(holds_prefix(index, [3, *answer, 5]) for answer in answers[::7])
    assert not any(holds_prefix(index, [2, *answer, 5]) for answer in answers[::7])


def test_what_stands_for_an_image_may_be_negative() -> None:
    index = TokenIndex(10)
    add(index, [-1, 5], [6])
    assert holds_prefix(index, [-1, 5, 6, 7])
    assert not holds_prefix(index, [1, 5, 6, 7])


def test_the_oldest_sequences_are_dropped() -> None:
    index = TokenIndex(kept=3)
    later = [9] * 6000
    for token in (1, 2, 3, 1, 4):
        add(index, [token], [9] * 5000)
    assert len(index) == 3
    assert [holds_prefix(index, [token, *later]) for token in (1, 2, 3, 4)] == [True, False, True, True]
    for token in (5, 6, 7):
        add(index, [token], [9])
    assert not any(holds_prefix(index, [token, *later]) for token in (1, 2, 3, 4))
