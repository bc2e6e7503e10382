import time
from typing import Any

import numpy as np
import pytest

from darts_server.policy.shaping import Shaping
from darts_server.rollout.plan import Limits
from darts_server.rollout.turns.chat_history import ChatHistory
from darts_server.rollout.turns.turns import Turn, Turns
from darts_server.types import RequestOptions, TurnKind
from tests.rollout.helpers import Harness, Recorder

PROMPT, ANSWER = [5, 6, 7], [8, 9]


class Counter(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[TurnKind] = []

    def single_request_classified(self, kind: TurnKind) -> None:
        self.kinds.append(kind)


def turn(tokens: list[int], session: str | None = None, **more: Any) -> Turn:
    return Turn(tokens, session=session, **more)


def test_requests_that_extend_a_prompt_and_its_answer_continue_a_trajectory() -> None:
    turns = Turns()
    assert turns.classify(turn(PROMPT)) is TurnKind.OPENING
    turns.add_answer(turn(PROMPT), ANSWER)
    assert turns.classify(turn(PROMPT)) is TurnKind.OPENING
    assert turns.classify(turn([*PROMPT, 8])) is TurnKind.OPENING
    assert turns.classify(turn([*PROMPT, *ANSWER])) is TurnKind.TOKENS, "a partial rollout that goes on"
    assert turns.classify(turn([*PROMPT, *ANSWER, 1])) is TurnKind.TOKENS
    turns.add_answer(turn([1, 2]), [])
    assert turns.classify(turn([1, 2])) is TurnKind.OPENING, "an empty answer says nothing"


def test_a_session_with_an_answer_is_continued_by_other_prompts() -> None:
    turns = Turns()
    opening = turn(PROMPT, "a")
    assert turns.classify(opening) is TurnKind.OPENING
    assert turns.classify(turn([1], "a")) is TurnKind.OPENING, "nothing was answered yet: two trajectories at once"
    turns.add_answer(opening, ANSWER)
    assert turns.classify(turn([1], "a")) is TurnKind.SESSION
    assert turns.classify(turn([1], "b")) is TurnKind.OPENING
    assert turns.classify(opening) is TurnKind.OPENING, "another trajectory of a group that has one name"
    turns.add_answer(turn([1], "a"), ANSWER)
    assert turns.classify(turn([1], "a")) is TurnKind.SESSION, "a turn that is sent again"
    assert turns.classify(opening) is TurnKind.OPENING


def test_a_new_session_of_our_own_option_opens_a_trajectory_whatever_its_tokens() -> None:
    turns = Turns()
    turns.add_answer(turn(PROMPT), ANSWER)
    branch = [*PROMPT, *ANSWER]
    assert turns.classify(turn(branch, "s")) is TurnKind.TOKENS
    assert turns.classify(turn(branch, "s", opens_session=True)) is TurnKind.OPENING
    turns.add_answer(turn(branch, "s", opens_session=True), [3])
    assert turns.classify(turn([*branch, 3, 4], "s", opens_session=True)) is TurnKind.SESSION


def test_a_chat_with_an_answer_of_ours_continues_a_trajectory() -> None:
    turns = Turns()
    opening = [{"role": "user", "content": "Hello"}]
    turns.add_answer(Turn(history=ChatHistory(opening)), [1], "Hi")
    turns.add_messages(ChatHistory(opening), [{"role": "assistant", "content": "parsed"}])
    for text, kind in (("Hi", TurnKind.HISTORY), ("parsed", TurnKind.HISTORY), ("Ho", TurnKind.OPENING)):
        messages = [*opening, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
        assert turns.classify(Turn([7], ChatHistory(messages))) is kind


def test_scoring_is_no_turn_and_greedy_answers_are() -> None:
    turns = Turns()
    assert turns.classify(turn(PROMPT, scoring=True, greedy=True)) is TurnKind.SCORING
    assert turns.classify(turn(PROMPT, greedy=True)) is TurnKind.GREEDY
    turns.add_answer(turn(PROMPT, "a", scoring=True), [8])
    assert turns.classify(turn([*PROMPT, 8, 1], "a")) is TurnKind.OPENING
    turns.add_answer(turn(PROMPT, greedy=True), [8])
    assert turns.classify(turn([*PROMPT, 8, 1])) is TurnKind.TOKENS


def test_answers_to_other_callers_do_not_count() -> None:
    turns = Turns()
    turns.add_answer(turn(PROMPT, "s", caller="a"), ANSWER)
    later = [*PROMPT, *ANSWER, 1]
    assert turns.classify(turn(later, caller="b")) is TurnKind.OPENING
    assert turns.classify(turn(later, "s", caller="b")) is TurnKind.OPENING
    assert turns.classify(turn(later, caller="a")) is TurnKind.TOKENS
    assert turns.classify(turn([1], "s", caller="a")) is TurnKind.SESSION


def test_an_idle_session_is_forgotten_so_that_a_later_run_may_use_its_name() -> None:
    now = 0.0
    turns = Turns(clock=lambda: now)
    turns.add_answer(turn(PROMPT, "0_0"), ANSWER)
    now = 500.0
    turns.add_answer(turn([1], "0_0"), ANSWER)
    now = 1000.0
    assert turns.classify(turn([2], "0_0")) is TurnKind.SESSION
    now = 1101.0
    assert turns.classify(turn([2], "0_0")) is TurnKind.OPENING


def test_a_session_with_thousands_of_answers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns()
    for i in range(5000):
        turns.add_answer(turn([i], "worker"), ANSWER)
    [record] = caplog.records
    assert "'worker' had 2000 answers" in record.message


def test_answers_to_embeddings_say_nothing_of_tokens() -> None:
    turns = Turns()
    turns.add_answer(turn([]), ANSWER)
    assert turns.classify(turn([*ANSWER, 1])) is TurnKind.OPENING


def test_memory_is_bounded() -> None:
    turns = Turns(kept=10)
    for i in range(100):
        messages = [{"role": "user", "content": str(i)}]
        turns.add_answer(Turn([i], ChatHistory(messages), session=str(i)), [1], "yes")
    sizes = (len(turns._sequences), len(turns._sessions), len(turns._messages))
    assert sizes == (10, 10, 10)
    assert turns.classify(turn([99, 1])) is TurnKind.TOKENS
    assert turns.classify(turn([89, 1])) is TurnKind.OPENING


@pytest.mark.parametrize("later_turns", [False, True])
def test_only_requests_that_open_a_trajectory_are_planned_as_members_of_groups(later_turns: bool) -> None:
    harness = Harness(lambda *_: None, {"uniform": Shaping(redundancy=1.5)})  # type: ignore[arg-type]  # nothing runs
    harness.rollouts.planner.limits = Limits(64, joins_later_turns=later_turns)
    counter = Counter()
    harness.rollouts.observe(counter)
    options = RequestOptions(group_size=8)

    def is_joined(turn: Turn) -> bool:
        return harness.rollouts.plan(1, options, turn) is not None

    harness.rollouts.turns.add_answer(turn(PROMPT), ANSWER)
    assert is_joined(turn(PROMPT))
    assert is_joined(turn([*PROMPT, *ANSWER])) == later_turns
    assert not is_joined(turn(PROMPT, greedy=True))
    assert not is_joined(turn(PROMPT, scoring=True))
    assert harness.rollouts.plan(8, RequestOptions(), turn([*PROMPT, *ANSWER])) is not None
    assert counter.kinds == [TurnKind.OPENING, TurnKind.TOKENS, TurnKind.GREEDY, TurnKind.SCORING]


def test_a_request_of_two_thousand_tokens_costs_a_tenth_of_a_millisecond() -> None:
    """Prints what was measured; asserts ten times as much, for slow machines."""
    turns, rng = Turns(), np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, 2000).tolist() for _ in range(200)]
    answer = rng.integers(0, 150_000, 1000).tolist()
    for i in range(66_000):
        turns.add_answer(turn([i, i + 1]), [1])
    costs = []
    for prompt in prompts:
        chat = [{"role": "user", "content": "x" * 8000}]
        begun = time.perf_counter()
        opening = Turn(prompt, ChatHistory(chat), "session")
        turns.classify(opening)
        classified = time.perf_counter()
        turns.add_answer(opening, answer, "y" * 4000)
        costs.append((classified - begun, time.perf_counter() - classified))
    classifying, adding = np.median(costs, axis=0) * 1e6
    print(f"{classifying:.0f} us to classify 2,000 tokens, {adding:.0f} us to add an answer of 1,000 tokens")
    assert classifying < 1000
    assert adding < 1000
