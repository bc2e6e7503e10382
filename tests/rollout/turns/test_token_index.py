from random import Random

from hypothesis import given
from hypothesis import strategies as st

from darts_server.rollout.turns.token_index import TokenIndex, hash_of

TOKENS = st.lists(st.integers(0, 3), max_size=6)
KNOWN = st.lists(st.tuples(TOKENS, TOKENS.filter(bool)))


def add(index: TokenIndex, prompt: list[int], answer: list[int], rank: int | None = None) -> None:
    index.add(hash_of(index.prefix_hashes(prompt)), len(prompt), answer, rank)


def holds_prefix(index: TokenIndex, tokens: list[int]) -> bool:
    return index.longest_prefix(index.prefix_hashes(tokens)) is not None


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
def test_the_longest_known_prefix_says_which_engine_has_it(
    known: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    index = TokenIndex(100)
    for rank, parts in enumerate(known):
        add(index, *parts, rank)
    sequences = {(*begin, *answer): rank for rank, (begin, answer) in enumerate(known)}
    begun = [sequence for sequence in sequences if tuple(prompt[: len(sequence)]) == sequence]
    prefix = index.longest_prefix(index.prefix_hashes(prompt))
    found = None if prefix is None else index.rank_of(prefix)
    assert found == (sequences[max(begun, key=len)] if begun else None)


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
