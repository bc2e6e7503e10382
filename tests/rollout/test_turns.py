from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.shaping import Shaping
from darts_server.rollout.plan import Limits
from darts_server.rollout.turns import StoredSequence, TokenIndex, Turn, Turns
from darts_server.types import RequestOptions, TurnKind
from tests.rollout.helpers import Harness

OPENING, TOKENS, PROMPT_KIND = TurnKind.OPENING, TurnKind.TOKENS, TurnKind.PROMPT
PROMPT, ANSWER = [5, 6, 7], [8, 9]


def turn(tokens: list[int], session: str | None = None, **more: Any) -> Turn:
    return Turn(tokens, session=session, **more)


def test_requests_that_extend_a_prompt_and_its_answer_continue_a_trajectory() -> None:
    turns = Turns()
    assert turns.classify(turn(PROMPT)) is OPENING
    turns.add_answer(turn(PROMPT), ANSWER)
    assert turns.classify(turn(PROMPT)) is OPENING
    assert turns.classify(turn([5, 6, 8, 9, 10])) is OPENING
    assert turns.classify(turn([*PROMPT, *ANSWER])) is TOKENS, "a partial rollout that goes on"
    assert turns.classify(turn([*PROMPT, *ANSWER, 1])) is TOKENS
    turns.add_answer(turn([1, 2]), [])
    assert turns.classify(turn([1, 2, 3])) is OPENING, "an empty answer says nothing"


@pytest.mark.parametrize("named", [False, True])
def test_a_prompt_that_begins_with_an_answer_except_its_last_tokens_continues_it(named: bool) -> None:
    turns, answer = Turns(), list(range(100, 120))
    turns.add_answer(turn(PROMPT), answer)
    for kept, kind in ((20, TOKENS), (19, TOKENS), (16, TOKENS), (15, PROMPT_KIND)):
        rendered = [*answer[:kept], 7, 8]
        expected = OPENING if named and kind is PROMPT_KIND else kind
        assert turns.classify(turn([*PROMPT, *rendered], names_group=named)) is expected


def test_a_prompt_that_begins_with_an_answered_prompt_continues_it_unless_it_names_a_group() -> None:
    turns = Turns()
    later = [*PROMPT, 100, 101]
    assert turns.classify(turn(later)) is OPENING
    turns.add_answer(turn(PROMPT), ANSWER)
    assert turns.classify(turn(later)) is PROMPT_KIND
    assert turns.classify(turn(later, names_group=True)) is OPENING
    assert turns.classify(turn(PROMPT)) is OPENING, "another group of the same prompt"


def test_the_end_of_a_prompt_that_templates_change_does_not_count() -> None:
    turns = Turns()
    turns.add_answer(turn([*PROMPT, 30, 31], stable_tokens=3), ANSWER)
    assert turns.classify(turn([*PROMPT, 8, 9, 30, 31], stable_tokens=5)) is PROMPT_KIND
    for again in ([*PROMPT, 30, 31], [*PROMPT, 30, 32]):
        assert turns.classify(turn(again, stable_tokens=3)) is OPENING


def test_a_prompt_of_one_token_continues_no_trajectory() -> None:
    turns = Turns()
    turns.add_answer(turn([5]), ANSWER)
    assert turns.classify(turn(PROMPT)) is OPENING


def abort_without_tokens(turns: Turns, count: int, group_size: int | None = 8, **more: Any) -> None:
    for _ in range(count):
        turns.add_answer(turn(PROMPT, group_size=group_size, **more), [], aborted=True)


def kinds(turns: Turns, count: int, **more: Any) -> list[TurnKind]:
    return [turns.classify(turn(PROMPT, **more)) for _ in range(count)]


def test_requests_that_were_aborted_without_a_token_are_not_joined_when_they_are_sent_again() -> None:
    """As a partial rollout does: the others of the group go on from their tokens, or were finished."""
    turns = Turns()
    turns.add_answer(turn(PROMPT, group_size=8), ANSWER, aborted=True)
    abort_without_tokens(turns, 3)
    assert turns.classify(turn([*PROMPT, *ANSWER])) is TOKENS
    assert kinds(turns, 5) == [TOKENS] * 3 + [OPENING] * 2, "each was sent again once"


def test_a_group_that_was_aborted_as_a_whole_without_a_token_is_formed_again() -> None:
    turns = Turns()
    abort_without_tokens(turns, 8)
    assert kinds(turns, 8) == [OPENING] * 8
    abort_without_tokens(turns, 8 + 3)
    assert kinds(turns, 11) == [TOKENS] * 3 + [OPENING] * 8


def test_a_request_may_be_aborted_without_a_token_twice() -> None:
    turns = Turns()
    abort_without_tokens(turns, 1)
    again = turn(PROMPT)
    assert turns.classify(again) is TOKENS
    turns.add_answer(again, [], aborted=True)
    assert kinds(turns, 2) == [TOKENS, OPENING]


def test_only_members_of_groups_are_expected_again_and_only_for_a_while() -> None:
    now = 0.0
    turns = Turns(clock=lambda: now)
    abort_without_tokens(turns, 3, group_size=None)
    turns.add_answer(turn(PROMPT, group_size=8), [])
    assert kinds(turns, 1) == [OPENING]
    abort_without_tokens(turns, 3)
    now = 3500.0
    assert kinds(turns, 1) == [TOKENS]
    now = 3700.0
    assert kinds(turns, 1) == [OPENING]


def test_a_session_that_was_aborted_without_a_token_is_not_joined_unless_it_opens_by_our_option() -> None:
    turns = Turns()
    abort_without_tokens(turns, 2, session="a", opens_session=True)
    assert kinds(turns, 1, session="b", opens_session=True) == [OPENING]
    assert kinds(turns, 3, session="a", opens_session=True) == [TOKENS, TOKENS, OPENING]


def test_a_later_turn_says_which_engine_has_its_prefix() -> None:
    turns = Turns()
    turns.add_answer(turn(PROMPT, "s", rank=1), ANSWER)
    turns.add_answer(turn([*PROMPT, *ANSWER, 1], rank=2), ANSWER)

    def rank_of(later: Turn, kind: TurnKind) -> int | None:
        assert turns.classify(later) is kind
        return later.rank

    assert rank_of(turn([9], "s"), TurnKind.SESSION) == 1
    assert rank_of(turn([*PROMPT, *ANSWER, 3]), TOKENS) == 1
    assert rank_of(turn([*PROMPT, *ANSWER, 1, *ANSWER, 3]), TOKENS) == 2, "the longest of them"
    assert rank_of(turn([*PROMPT, *ANSWER, 1, 3]), PROMPT_KIND) == 2
    assert rank_of(turn(PROMPT), OPENING) is None


def test_a_session_with_an_answer_is_continued_by_other_prompts() -> None:
    turns = Turns()
    opening = turn(PROMPT, "a")
    assert turns.classify(opening) is OPENING
    assert turns.classify(turn([1], "a")) is OPENING, "nothing was answered yet: two trajectories at once"
    turns.add_answer(opening, ANSWER)
    assert turns.classify(turn([1], "a")) is TurnKind.SESSION
    assert turns.classify(turn([1], "b")) is OPENING
    assert turns.classify(opening) is OPENING, "another trajectory of a group that has one name"
    turns.add_answer(turn([1], "a"), ANSWER)
    assert turns.classify(turn([1], "a")) is TurnKind.SESSION, "a turn that is sent again"
    assert turns.classify(opening) is OPENING


def test_a_new_session_by_our_option_opens_a_trajectory_whatever_its_tokens() -> None:
    turns = Turns()
    turns.add_answer(turn(PROMPT), ANSWER)
    branch = [*PROMPT, *ANSWER]
    assert turns.classify(turn(branch, "s")) is TOKENS
    assert turns.classify(turn(branch, "s", opens_session=True)) is OPENING
    turns.add_answer(turn(branch, "s", opens_session=True), [3])
    assert turns.classify(turn([*branch, 3, 4], "s", opens_session=True)) is TurnKind.SESSION


def test_a_scored_request_is_no_turn_and_a_greedy_answer_is() -> None:
    turns = Turns()
    assert turns.classify(turn(PROMPT, scoring=True, greedy=True)) is TurnKind.SCORING
    assert turns.classify(turn(PROMPT, greedy=True)) is TurnKind.GREEDY
    turns.add_answer(turn(PROMPT, "a", scoring=True), [8])
    assert turns.classify(turn([*PROMPT, 8, 1], "a")) is OPENING
    turns.add_answer(turn(PROMPT, greedy=True), [8])
    assert turns.classify(turn([*PROMPT, 8, 1])) is TOKENS


def test_answers_to_other_callers_do_not_count() -> None:
    turns = Turns()
    turns.add_answer(turn(PROMPT, "s", caller="a"), ANSWER)
    abort_without_tokens(turns, 3, caller="a")
    later = [*PROMPT, *ANSWER, 1]
    for kind, tokens, session in ((TOKENS, later, None), (TurnKind.SESSION, [1], "s"), (TOKENS, PROMPT, None)):
        assert turns.classify(turn(tokens, session, caller="b")) is OPENING
        assert turns.classify(turn(tokens, session, caller="a")) is kind


def test_an_idle_session_is_forgotten_so_that_a_later_run_may_use_its_name() -> None:
    now = 0.0
    turns = Turns(clock=lambda: now)
    turns.add_answer(turn(PROMPT, "0_0"), ANSWER)
    now = 500.0
    turns.add_answer(turn([1], "0_0"), ANSWER)
    now = 1000.0
    assert turns.classify(turn([2], "0_0")) is TurnKind.SESSION
    now = 1101.0
    assert turns.classify(turn([2], "0_0")) is OPENING


def test_memory_is_bounded_and_a_caller_with_many_answers_does_not_displace_other_callers() -> None:
    turns = Turns(kept=10)
    for caller, answers in (("few", 3), ("many", 100)):
        for i in range(answers):
            turns.add_answer(turn([5, i], session=str(i), caller=caller), [1])
            turns.add_answer(turn([6, i], group_size=8, caller=caller), [], aborted=True)
    assert (turns._sequences._stored.size, turns._sessions.size, turns._aborted.size) == (20, 10, 10)
    for i in range(3):
        assert turns.classify(turn([5, i, 1], caller="few")) is TOKENS
        assert turns.classify(turn([9], session=str(i), caller="few")) is TurnKind.SESSION
        assert turns.classify(turn([6, i], caller="few")) is TOKENS
    assert turns.classify(turn([5, 99, 1], caller="many")) is TOKENS
    assert turns.classify(turn([5, 89, 1], caller="many")) is OPENING


@pytest.mark.parametrize("later_turns", [False, True])
def test_only_requests_that_open_a_trajectory_are_planned_as_members_of_groups(later_turns: bool) -> None:
    harness = Harness(lambda *_: None, {"uniform": Shaping(redundancy=1.5)})  # type: ignore[arg-type]  # nothing runs
    harness.rollouts.planner.limits = Limits(64, joins_later_turns=later_turns)
    options = RequestOptions(group_size=8)

    def is_joined(turn: Turn) -> bool:
        return harness.rollouts.plan(1, options, turn) is not None

    harness.rollouts.turns.add_answer(turn(PROMPT), ANSWER)
    assert is_joined(turn(PROMPT))
    assert is_joined(turn([*PROMPT, *ANSWER])) == later_turns
    assert not is_joined(turn(PROMPT, greedy=True))
    assert not is_joined(turn(PROMPT, scoring=True))
    assert harness.rollouts.plan(8, RequestOptions(), turn([*PROMPT, *ANSWER])) is not None
    assert harness.recorder.turns == [OPENING, TOKENS, TurnKind.GREEDY, TurnKind.SCORING]


# --- the index of what is known ------------------------------------------------

SEQUENCES = st.lists(st.integers(0, 3), max_size=6)


@given(SEQUENCES, SEQUENCES.filter(bool))
def test_hashes_after_a_sequence_are_the_hashes_of_the_whole_sequence(begin: list[int], end: list[int]) -> None:
    index = TokenIndex(1)
    whole = index.prefix_hashes([*begin, *end])
    known = int(index.prefix_hashes(begin)[-1]) if begin else 0
    assert index.prefix_hashes(end, known, len(begin)).tolist() == whole[len(begin) :].tolist()


def add(index: TokenIndex, prompt: list[int], answer: list[int], rank: int | None = None, caller: str = "") -> None:
    index.add(caller, hash_of(index, [*prompt, *answer]), rank)


def hash_of(index: TokenIndex, tokens: list[int]) -> int:
    return int(index.prefix_hashes(tokens)[-1])


def find_prefixes(index: TokenIndex, tokens: list[int], caller: str = "") -> list[tuple[int, StoredSequence]]:
    return list(index.find_prefixes(caller, index.prefix_hashes(tokens)))


def holds_prefix(index: TokenIndex, tokens: list[int]) -> bool:
    return bool(find_prefixes(index, tokens))


@given(st.lists(st.tuples(SEQUENCES, SEQUENCES.filter(bool))), SEQUENCES)
def test_exactly_the_stored_prefixes_are_found_the_longest_first_with_their_engine(
    known: list[tuple[list[int], list[int]]], prompt: list[int]
) -> None:
    index = TokenIndex(100)
    for rank, parts in enumerate(known):
        add(index, *parts, rank)
    sequences = {(*begin, *answer): rank for rank, (begin, answer) in enumerate(known)}
    begun = sorted((each for each in sequences if tuple(prompt[: len(each)]) == each), key=len, reverse=True)
    found = find_prefixes(index, prompt)
    assert found == [(len(each), StoredSequence(is_answer=False, rank=sequences[each])) for each in begun]


def test_an_answer_stays_an_answer_when_it_is_stored_again_as_a_prompt() -> None:
    index = TokenIndex(100)
    key = hash_of(index, [3, 4])
    index.add("", key, 1, is_answer=True)
    index.add("", key, 2)
    assert find_prefixes(index, [3, 4]) == [(2, StoredSequence(is_answer=True, rank=2))]


def test_sequences_in_the_same_bucket_are_distinguished() -> None:
    index, random = TokenIndex(kept=8_000), Random(0)
    answers = [random.choices(range(1000), k=4) for _ in range(8_000)]
    for answer in answers:
        add(index, [3], answer)
    assert index._bucket_counts.max() > 1
    assert all(holds_prefix(index, [3, *answer, 5]) for answer in answers[::7])
    assert not any(holds_prefix(index, [2, *answer, 5]) for answer in answers[::7])


def test_placeholders_for_images_may_be_negative() -> None:
    index = TokenIndex(10)
    add(index, [-1, 5], [6])
    assert holds_prefix(index, [-1, 5, 6, 7])
    assert not holds_prefix(index, [1, 5, 6, 7])


def test_the_oldest_sequences_are_dropped() -> None:
    index = TokenIndex(kept=3)
    later = [9] * 6000
    for token in (1, 2, 3, 1, 4):
        add(index, [token], [9] * 5000)
    assert index._stored.size == 3
    assert [holds_prefix(index, [token, *later]) for token in (1, 2, 3, 4)] == [True, False, True, True]
    for token in (5, 6, 7):
        add(index, [token], [9])
    assert not any(holds_prefix(index, [token, *later]) for token in (1, 2, 3, 4))
