"""Pass rates are learned from groups, age with the weights, and survive a restart within a limit of memory."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from darts_server.estimates.pass_rates import HALF_LIFE, Beta, RecentPassRates
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import PASS_COUNTS, PassRates, rewarded_answers
from darts_server.store import Store
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents


def candidate(
    index: int, reason: DiscardReason | None = None, weight: float | None = None, version: int = 0
) -> CandidateRecord:
    selected_as = SelectedAs.SHORT if reason is None else None
    return CandidateRecord(
        *(index, 5, FinishReason.STOP, selected_as, reason, False, 0.0, 1.0, version, version), weight=weight
    )


def group(candidates: Sequence[CandidateRecord], key: str | None = "p", restarted_from: int = 0) -> GroupRecord:
    return GroupRecord(
        *("g", key, "informative", 8, Outcome.COMPLETED, candidates, 0.0, 1.0, None), restarted_from=restarted_from
    )


def plain_group(key: str | None, version: int = 0, size: int = 8) -> GroupRecord:
    return group([candidate(index, version=version) for index in range(size)], key)


def passes(right: int, size: int = 8) -> dict[int, bool]:
    return {index: index < right for index in range(size)}


def evidence(rates: PassRates, key: str = "p") -> tuple[float, float]:
    """Return the numbers of right and wrong answers beyond the prior."""
    known, prior = rates.posteriors([key, "unknown"])
    return known.right - prior.right, known.wrong - prior.wrong


# --- which candidates count -------------------------------------------------


def test_all_candidates_count_one_if_all_have_rewards() -> None:
    record = group(
        [candidate(0, weight=1.0), candidate(1, weight=3.0), *(candidate(i, DiscardReason.MIDDLE) for i in (2, 3))]
    )
    assert rewarded_answers(record, {0: True, 1: False, 2: False, 3: True}) == [
        (True, 1),
        (False, 1),
        (False, 1),
        (True, 1),
    ]


@pytest.mark.parametrize("more", [{}, {2: True}])
def test_returned_trajectories_count_with_their_weights_if_other_candidates_have_no_rewards(
    more: Mapping[int, bool],
) -> None:
    record = group([candidate(0, weight=1.0), candidate(1), *(candidate(i, DiscardReason.MIDDLE) for i in (2, 3))])
    assert rewarded_answers(record, {0: True, 1: False, **more}) == [(True, 1.0), (False, 1.0)]
    weighted = group([candidate(0, weight=1.0), candidate(1, weight=3.0), candidate(2, DiscardReason.MIDDLE)])
    assert rewarded_answers(weighted, {0: True, 1: False}) == [(True, 1.0), (False, 3.0)]
    assert rewarded_answers(weighted, {1: False}) == [(False, 3.0)]


@pytest.mark.parametrize("reason", [DiscardReason.DECIDED, DiscardReason.NOT_SAMPLED])
def test_of_a_group_that_was_selected_by_rewards_all_candidates_with_rewards_count(reason: DiscardReason) -> None:
    # The group was decided early, or one of its verdicts is missing under `max_variance`: there are no weights.
    candidates = [candidate(0), candidate(1), candidate(2, DiscardReason.NOT_SAMPLED), candidate(3, reason)]
    record = replace(group(candidates), num_rewarded=3)
    assert rewarded_answers(record, {0: True, 1: False, 2: False}) == [(True, 1.0), (False, 1.0), (False, 1.0)]


def test_candidates_that_failed_or_ran_before_a_restart_need_no_rewards() -> None:
    candidates = [
        candidate(0, DiscardReason.RESTARTED),
        candidate(1, DiscardReason.FAILED),
        candidate(2, DiscardReason.MIDDLE),
        candidate(3, weight=2.0),
    ]
    assert rewarded_answers(group(candidates, restarted_from=1), {2: True, 3: False}) == [(True, 1.0), (False, 1.0)]


def test_a_group_without_rewards_teaches_nothing() -> None:
    documents = Documents()
    PassRates(documents).learn(plain_group("p"), {})
    assert documents.kept == {}


# --- learning ---------------------------------------------------------------


def test_an_unknown_prompt_has_the_distribution_of_all_prompts() -> None:
    rates = PassRates(Documents())
    assert rates.posteriors(["p"]) == [RecentPassRates().prior]
    for number in range(50):
        rates.learn(plain_group(None), passes(number % 3))
    [prior] = rates.posteriors(["p"])
    assert prior.right / sum(prior) == pytest.approx(1 / 8, abs=0.02)


def test_rewards_age_by_the_versions_that_had_rewards() -> None:
    rates = PassRates(Documents())
    rates.learn(plain_group("p", 10), passes(2))
    assert evidence(rates) == pytest.approx((2, 6))
    # A trainer may count its versions in tens, and late rewards are of older versions.
    for update in range(1, HALF_LIFE + 1):
        rates.learn(plain_group("q", 10 + 10 * update), passes(4))
        rates.learn(plain_group("q", 10 + 10 * update), passes(4))
        rates.learn(plain_group("q", 10), passes(4))
    assert evidence(rates) == pytest.approx((1, 3))


def test_a_restarted_server_goes_on_where_the_previous_server_ended(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        rates = PassRates(store)
        for version in range(500, 520):
            rates.learn(plain_group("q", version), passes(4))
        rates.learn(plain_group("p", 519), passes(2))
        before = rates.posteriors(["p", "q", "r"])
    with Store(tmp_path) as store:
        rates = PassRates(store)
        assert rates.posteriors(["p", "q", "r"]) == before
        # Its engine counts versions from 0 again. The first version continues the last one.
        rates.learn(plain_group("q", 0), passes(4))
        assert evidence(rates) == pytest.approx((2, 6))
        for version in range(1, HALF_LIFE + 1):
            rates.learn(plain_group("q", version), passes(4))
        assert evidence(rates) == pytest.approx((1, 3))


def test_a_restored_state_replaces_what_was_learned() -> None:
    documents = Documents()
    rates = PassRates(documents)
    rates.learn(plain_group("p"), passes(2))
    saved = dict(documents.kept)
    rates.learn(plain_group("p"), passes(8))
    documents.restore(saved)
    assert evidence(rates) == pytest.approx((2, 6))


def test_an_unusable_document_counts_as_missing() -> None:
    documents = Documents()
    rates = PassRates(documents)
    rates.learn(plain_group("p"), passes(2))
    documents.put("pass_counts", "p", {"value": "[1, 2]garbage"})
    assert evidence(rates) == (0, 0)
    rates.learn(plain_group("p"), passes(4))
    assert evidence(rates) == pytest.approx((4, 4))


@pytest.mark.parametrize("prompts", [5_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_the_memory_of_many_prompts_is_limited(prompts: int) -> None:
    limit = 1000
    with Store(limit=limit) as store:
        rates = PassRates(store)
        record = plain_group("p")
        for number in range(prompts):
            # Making a record takes longer than learning it.
            object.__setattr__(record, "prompt_key", f"{number:024x}")
            rates.learn(record, passes(number % 9))
        assert store.count(PASS_COUNTS.name) == limit
        document = store.get(PASS_COUNTS.name, f"{prompts - 1:024x}")
        assert sys.getsizeof(str(document)) < 150
        known = rates.posteriors([f"{prompts - 1:024x}", f"{0:024x}"])
        assert known[0] != known[1] == rates.posteriors(["unknown"])[0]


def test_posteriors_are_distributions() -> None:
    rates = PassRates(Documents())
    for right in (0, 8):
        rates.learn(plain_group("p"), passes(right))
    assert all(isinstance(posterior, Beta) and min(posterior) > 0 for posterior in rates.posteriors(["p", "q"]))
