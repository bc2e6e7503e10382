"""Weighted sums over returned trajectories estimate sums over all candidates, exactly."""

from collections.abc import Mapping, Sequence
from itertools import combinations, permutations, product
from math import fsum, inf
from random import Random

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from darts_server.group.events import DeadlineSet, Failed, Finished, Scored, Started
from darts_server.group.group import Group, count_sampling_pool, sampled_tail_share, selection_weights
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors, SelectionRule
from darts_server.types import GONE, DiscardReason, FinishReason, Outcome
from tests.group.cases import CUT_TAILS, SAMPLED_TAILS, WITHOUT_FAILURES, cases
from tests.group.world import Case, Draws


def complete(
    rule: SelectionRule, lengths: Sequence[tuple[int, bool]], draws: Sequence[float], deadline: int | None = None
) -> Group:
    """Run a group to its end. Candidates finish in the order of their lengths, at a stop token or at the limit."""
    group = Group(rng=Draws(*draws), max_replacements=0)
    group.open(rule, len(lengths))
    group.handle(*(Started(i) for i in range(len(lengths))))
    if deadline is not None:
        group.handle(DeadlineSet(deadline))
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group.candidates[i].is_running:
            tokens, valid = lengths[i]
            group.handle(Finished(i, tokens, FinishReason.STOP if valid else FinishReason.LENGTH))
    assert group.outcome is Outcome.COMPLETED
    return group


@given(
    SAMPLED_TAILS | CUT_TAILS | st.builds(InOrder, st.integers(1, 4)),
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=4, max_size=4),
    st.lists(st.floats(-5, 5), min_size=4, max_size=4),
)
def test_over_all_orders_of_tail_draws_the_weighted_sum_is_the_sum_of_all_candidates(
    rule: SelectionRule, lengths: list[tuple[int, bool]], values: list[float]
) -> None:
    assume(rule.size <= len(lengths))
    if isinstance(rule, InOrder):
        lengths = lengths[: rule.size]
        values = values[: rule.size]
    orders = list(permutations([i / 10 for i in range(len(lengths))]))
    sums = []
    for draws in orders:
        weights = selection_weights(complete(rule, lengths, draws))
        if isinstance(rule, SampledTail | CutTail):
            assert rule.samples_rest
        if not weights:
            assert isinstance(rule, SampledTail | CutTail)
            assert rule.num_longest == 0
            return
        assert len(weights) == rule.size
        assert fsum(weights.values()) == pytest.approx(len(lengths), abs=1e-9)
        sums.append(fsum(weight * values[i] for i, weight in weights.items()))
    assert fsum(sums) / len(orders) == pytest.approx(fsum(values), abs=1e-9)


@given(cases(WITHOUT_FAILURES, of=SAMPLED_TAILS | CUT_TAILS))
def test_weights_do_not_depend_on_timing(case: Case) -> None:
    world = case.world().run()
    weights = selection_weights(world.group)
    assume(weights)
    short = sum(end == "short" for end in (world.selection or {}).values())
    others = case.rule.size - short
    assert {*weights} == {*(world.selection or {})}
    for index, end in (world.selection or {}).items():
        expected = 1.0 if end == "short" else (len(world.runs) - short) / others
        assert weights[index] == pytest.approx(expected, abs=1e-9)
    event("weights above 1" if any(w > 1 for w in weights.values()) else "all weights 1")


@pytest.mark.parametrize(
    "rule",
    [DualEnd(2), DualEnd(1, 1)],
    ids=lambda rule: type(rule).__name__,
)
def test_rules_that_never_select_some_candidates_have_no_weights(rule: SelectionRule) -> None:
    assert selection_weights(complete(rule, [(3, True), (5, True), (7, True)], (0.1, 0.2, 0.3))) == {}
    assert not rule.samples_rest
    assert selection_weights(complete(rule, [(3, True), (5, True)], (0.1, 0.2))) == {0: 1.0, 1: 1.0}, "all are selected"


def test_failed_candidates_and_candidates_before_a_restart_do_not_count() -> None:
    group = Group(rng=Draws(*(0.1 * i for i in range(12))))
    group.open(SampledTail(1, 1), 4)
    group.restart()
    group.resume()
    group.handle(*(Started(i) for i in range(4, 8)), Failed(4, RuntimeError(), retryable=True))
    group.handle(*(Finished(i, i, FinishReason.STOP) for i in range(5, 8)))
    assert selection_weights(group) == {5: 1.0, 6: 2.0}


def test_an_incomplete_group_has_no_weights() -> None:
    group = Group(rng=Draws(0.1, 0.2))
    group.open(SampledTail(1, 1), 2)
    assert selection_weights(group) == {}
    assert sampled_tail_share(group) == 1.0


@pytest.mark.parametrize(
    ("rule", "share"),
    [(SampledTail(1, 1), 0.5), (SampledTail(1, 2), 1.0), (DualEnd(1, 1), 1.0), (SampledTail(2, 0), 1.0)],
    ids=str,
)
def test_the_share_of_the_tail_is_the_sampled_part_of_all_but_the_shortest(rule: SelectionRule, share: float) -> None:
    assert sampled_tail_share(complete(rule, [(3, True), (5, True), (7, True)], (0.1, 0.2, 0.3))) == share


@pytest.mark.parametrize(("failures", "survival", "has_weights"), [(600, 0.9, True), (1000, 0.001, False)])
def test_weights_of_a_large_group_with_many_failures_after_a_score_are_in_range_or_empty(
    failures: int, survival: float, has_weights: bool
) -> None:
    count = 1200
    group = Group(rng=Draws(*[0.0] * count), survival_rng=Draws(*[0.0] * count), max_replacements=0)
    group.open(AllSurvivors(1), count)
    group.handle(*(Started(i) for i in range(count)))
    group.handle(*(Scored(i, 0.5, survival) for i in range(count - 1)))
    group.handle(*(Failed(i, RuntimeError(), retryable=True) for i in range(failures)))
    group.handle(*(Finished(i, 5, FinishReason.STOP) for i in range(failures, count)))
    assert group.outcome is Outcome.COMPLETED
    weights = selection_weights(group)
    assert len(weights) == (count - failures if has_weights else 0)
    assert all(weight < inf for weight in weights.values())


class TestPruning:
    """Survivors of pruning, which needs `Scored` events with a survival probability."""

    def survivors(self, survivals: Sequence[float], draws: Sequence[float], rule: SelectionRule) -> Group:
        group = Group(rng=Draws(*[0.0] * len(draws)), survival_rng=Draws(*draws), max_replacements=0)
        group.open(rule, len(draws))
        group.handle(*(Started(i) for i in range(len(draws))))
        for i, survival in enumerate(survivals):
            group.handle(Scored(i, 0.5, survival))
        for i in range(len(draws)):
            if group.candidates[i].is_running:
                group.handle(Finished(i, 5, FinishReason.STOP))
        assert group.outcome is Outcome.COMPLETED
        return group

    def test_survivors_that_lose_the_draw_count(self) -> None:
        group = self.survivors([0.5] * 4, [0.0, 0.9, 0.0, 0.0], SampledSurvivors(2))
        assert selection_weights(group) == {0: 3.0, 2: 3.0}
        assert count_sampling_pool(group) == 3
        assert [c.reason for c in group.candidates] == [None, DiscardReason.PRUNED, None, DiscardReason.MIDDLE]
        assert count_sampling_pool(self.survivors([0.5] * 4, [0.0, 0.9, 0.0, 0.0], AllSurvivors(2))) is None

    def test_a_choice_among_survivors_has_no_weights(self) -> None:
        pruned, certain = (self.survivors([chance] * 3, [0.0] * 3, SampledTail(1, 1)) for chance in (0.5, 1.0))
        assert selection_weights(pruned) == {}
        assert selection_weights(certain) == {0: 1.0, 1: 2.0}
        assert (sampled_tail_share(pruned), sampled_tail_share(certain)) == (0.5, 0.5)

    def test_a_pruned_candidate_is_not_one_of_those_that_the_tail_was_sampled_from(self) -> None:
        group = self.survivors([0.5] * 4, [0.0, 0.0, 0.0, 0.9], SampledTail(1, 1))
        assert sampled_tail_share(group) == 0.5


CELLS = 4
"""Random numbers for pruning, in the middle of equal parts of [0, 1). Probabilities are multiples of 1 / 4."""


class Survival:
    """Probabilities of a half or one, by candidate, score, and the candidates that were pruned or finished before."""

    def __init__(self, seed: int) -> None:
        self._table: dict[tuple[int, ...], float] = {}
        self._rng = Random(seed)

    def at(self, index: int, score: int, group: Group) -> float:
        states = (state for c in group.candidates for state in (c.is_running, c.is_alive))
        return self._table.setdefault((index, score, *states), self._rng.choice([0.5, 0.5, 1.0]))


def run_with_scores(
    rule: SelectionRule,
    lengths: Sequence[tuple[int, bool]],
    tail_draws: Sequence[float],
    survival_draws: Sequence[float],
    survival: Survival,
    failing: Mapping[int, int] = {},
) -> Group:
    """Run a group whose candidates may be pruned after their first and after their second token.

    ``failing``: candidates that fail, and the number of tokens after which they fail.
    """
    group = Group(rng=Draws(*tail_draws), survival_rng=Draws(*survival_draws), max_replacements=0)
    group.open(rule, len(lengths))
    group.handle(*(Started(i) for i in range(len(lengths))))
    for tokens in range(1, max(length for length, _ in lengths) + 1):
        for i, (length, valid) in enumerate(lengths):
            if group.candidates[i].is_running and failing.get(i) == tokens:
                group.handle(Failed(i, RuntimeError(), retryable=True))
            elif group.candidates[i].is_running and length == tokens:
                group.handle(Finished(i, tokens, FinishReason.STOP if valid else FinishReason.LENGTH))
            elif group.candidates[i].is_running and tokens <= 2:
                group.handle(Scored(i, 0.5, survival.at(i, tokens, group)))
    assert group.outcome is Outcome.COMPLETED or failing
    return group


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=3, max_size=3),
    st.integers(0, 100),
    st.sampled_from([AllSurvivors(1), AllSurvivors(3), SampledSurvivors(1), SampledSurvivors(2)]),
)
@settings(max_examples=max(10, settings().max_examples // 10))
def test_survivors_estimate_sums_over_candidates_and_over_pairs(
    lengths: list[tuple[int, bool]], seed: int, rule: AllSurvivors | SampledSurvivors
) -> None:
    """Survival may depend on anything, and candidates may be kept because the group needs them.

    Given another returned candidate, a candidate weighs (S - 1) / (M - 1) in place of S / M.
    """
    survival = Survival(seed)
    count = len(lengths)
    orders = list(permutations(range(count))) if isinstance(rule, SampledSurvivors) else [tuple(range(count))]
    singles = [0.0] * count
    pairs = dict.fromkeys(combinations(range(count), 2), 0.0)
    runs = 0
    for cells in product(range(CELLS), repeat=count):
        for order in orders:
            draws = [(cell + 0.5) / CELLS for cell in cells]
            group = run_with_scores(rule, lengths, order, draws, survival)
            weights = selection_weights(group)
            runs += 1
            returned = len(weights)
            for i, weight in weights.items():
                singles[i] += weight
            for i, j in pairs:
                if i in weights and j in weights:
                    s = count_sampling_pool(group) or returned
                    given_the_other = (s - 1) / (returned - 1) * returned / s
                    pairs[i, j] += weights[i] * weights[j] * given_the_other
    for total in [*singles, *([] if rule.size == 1 and isinstance(rule, SampledSurvivors) else pairs.values())]:
        assert total / runs == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("rule", [AllSurvivors(1), SampledSurvivors(1)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("doomed", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "fails_at"), [((1, 2, 3), (1, 2, 3)), ((3, 3, 3), (2, 2, 3)), ((4, 2, 4), (3, 1, 1))], ids=str
)
def test_survivors_estimate_means_over_candidates_whichever_candidates_fail(
    rule: AllSurvivors | SampledSurvivors, doomed: int, lengths: Sequence[int], fails_at: Sequence[int]
) -> None:
    """The mean is over all sets of ``doomed`` candidates, with all draws. An empty group counts as 0.

    ``fails_at``: number of tokens after which each candidate fails if it is doomed.
    """
    survival = Survival(7)
    count = len(lengths)
    orders = list(permutations(range(count))) if isinstance(rule, SampledSurvivors) else [tuple(range(count))]
    sums = [0.0] * count
    runs = 0
    corrected = 0
    for failed in combinations(range(count), doomed):
        failing = {i: fails_at[i] for i in failed}
        for cells in product(range(CELLS), repeat=count):
            draws = [(cell + 0.5) / CELLS for cell in cells]
            for order in orders:
                ends = [(length, True) for length in lengths]
                group = run_with_scores(rule, ends, order, draws, survival, failing=failing)
                counted = sum(c.reason not in GONE for c in group.candidates)
                weights = selection_weights(group)
                runs += 1
                corrected += bool(weights) and any(c.survival < 1 for c in group.candidates if c.reason in GONE)
                for i, weight in weights.items():
                    sums[i] += weight / counted
    assert corrected
    assert [total / runs for total in sums] == pytest.approx([1 / count] * count, abs=1e-9)


def test_a_sampled_tail_without_places_has_no_weights() -> None:
    assert selection_weights(complete(SampledTail(1, 0), [(3, True), (5, True)], (0.1, 0.2))) == {}


def test_the_first_candidates_in_order_are_a_plain_sample() -> None:
    assert selection_weights(complete(InOrder(2), [(7, True), (5, False)], (0.1, 0.2))) == {0: 1.0, 1: 1.0}
