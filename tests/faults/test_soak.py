import logging

import pytest

from darts_server.records import GroupRecord
from faults.soak import Stack, soak

GROUPS, ROUNDS = 2000, 12
kept_records: list[GroupRecord] = []


@pytest.mark.nightly
def test_nothing_grows_and_nothing_is_lost_over_thousands_of_groups() -> None:
    soaked = soak(GROUPS, ROUNDS)
    assert soaked.violations == []
    # One soak of a hundred grows by chance. What leaks grows in the next one too.
    if soaked.growing:
        assert soaked.growing & soak(GROUPS, ROUNDS).growing == set()
    assert not soaked.requests["wrong"]
    assert soaked.requests["answered"] > 0.8 * sum(soaked.requests.values())
    assert soaked.requests["cancelled"]
    assert soaked.requests.keys() & {"failed: GroupAborted", "failed: CandidateFailed"}  # each is rare
    never = {reason for reason, count in soaked.reasons.items() if not count}
    # The first two are rare: most such candidates are stopped before that. The others need rewards, and the soak has no
    # verifier.
    rare = {"longer_than_needed", "truncated", "not_sampled", "zero_variance"}
    assert never <= rare, "every other discard reason must occur"
    assert all(soaked.rewards[kind] for kind in ("matched", "repeated", "unknown"))
    assert soaked.updates > 10


@pytest.mark.nightly
def test_an_observer_that_never_forgets_is_found() -> None:
    def hoard(stack: Stack) -> None:
        stack.rollouts.observers.group_ended.add(kept_records.append)

    soaked = soak(500, ROUNDS, spoil=hoard)
    kept_records.clear()
    assert "own objects" in soaked.growing
    assert not soaked.survived


def test_a_logged_error_and_a_started_candidate_that_never_ends_are_found() -> None:
    def spoil(stack: Stack) -> None:
        logging.getLogger("darts_server.rollout.run").error("group g failed")
        stack.metrics._started_candidates.inc()

    soaked = soak(200, ROUNDS, spoil=spoil)
    first, *others = soaked.violations
    assert first == "logged: group g failed"
    assert others
    assert all("candidates were started" in each for each in others)
    assert not soaked.survived
