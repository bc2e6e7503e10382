from hypothesis import given
from hypothesis import strategies as st

from darts_server.rollout.turns.token_index import TokenIndex, hash_of

TOKENS = st.lists(st.integers(0, 3), max_size=6)
KNOWN = st.lists(st.tuples(TOKENS, TOKENS.filter(bool)))


def add(index: TokenIndex, prompt: list[int], answer: list[int]) -> None:
    index.add(hash_of(index.prefix_hashes(prompt)), len(prompt), answer)


def holds_prefix(index: TokenIndex, tokens: list[int]) -> bool:
    return index.holds_prefix(index.prefix_hashes(tokens))


@given(KNOWN, TOKENS)
def test_a_prompt_is_found_exactly_if_a_known_sequence_begins_it(
    known: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    index = TokenIndex(100)
    for parts in known:
        add(index, *parts)
    sequences = [[*begin, *answer] for begin, answer in known]
    assert holds_prefix(index, prompt) == any(prompt[: len(sequence)] == sequence for sequence in sequences)


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
