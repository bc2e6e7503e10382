"""A replay selects what the rule means, by brute force over all lengths."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.candidate import Candidate
from darts_server.policy.replay import replay
from darts_server.policy.selection.rules import Shortest
from darts_server.types import FinishReason
from tests.policy.cases import TIMELESS
from tests.policy.oracle import Fate, Rule, bounded, chosen, cut_lengths, is_bounded

Finished = tuple[int, bool, float]
"""Length, whether it finished before the length limit, and its draw for the tail."""

FINISHED = st.tuples(st.integers(1, 8), st.sampled_from([True, True, True, False]), st.floats(0, 0.99))


def candidates(finished: Sequence[Finished]) -> list[Candidate]:
    return [
        Candidate(i, draw, tokens=length, finish_reason=FinishReason.STOP if valid else FinishReason.LENGTH)
        for i, (length, valid, draw) in enumerate(finished)
    ]


@given(
    rule=TIMELESS,
    finished=st.lists(FINISHED, min_size=5, max_size=9, unique_by=lambda one: one[2]),
    deadline=st.none() | st.integers(1, 8),
    slack=st.none() | st.integers(0, 8),
)
def test_a_replay_selects_what_the_rule_chooses_from_all_lengths(
    rule: Rule, finished: list[Finished], deadline: int | None, slack: int | None
) -> None:
    bound = None if deadline is None or slack is None else deadline + slack
    replayed = replay(rule, candidates(finished), deadline, bound)
    fates = bounded(rule, {i: Fate(length, valid, draw) for i, (length, valid, draw) in enumerate(finished)}, bound)
    cuts = cut_lengths(rule, fates, deadline, bound)
    assert set(replayed.selection) == chosen(rule, fates, deadline).keys()
    assert all(replayed.lengths[i] == cuts.get(i, fates[i].length) for i in replayed.selection)
    assert all(length <= fates[i].length for i, length in enumerate(replayed.lengths))
    assert not is_bounded(rule) or bound is None or max(replayed.lengths) <= bound
    assert replayed.steps >= max(replayed.lengths[i] for i in replayed.selection)


def test_stopped_candidates_have_the_tokens_of_the_step_at_which_they_were_stopped() -> None:
    replayed = replay(Shortest(2), candidates([(3, True, 0.1), (9, True, 0.2), (5, True, 0.3)]))
    assert (replayed.selection, replayed.lengths, replayed.steps) == ((0, 2), (3, 5, 5), 5)
    assert (replayed.generated, replayed.returned) == (13, 8)
