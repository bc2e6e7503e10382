"""The soak's short form, and that it finds what it looks for."""

import logging

from darts_server.types import CohortRecord, GroupRecord
from faults.soak.__main__ import kept
from faults.soak.house import House
from faults.soak.run import Soaked, soak

GROUPS, ROUNDS = 2000, 12
kept_records: list[GroupRecord] = []


class Hoarder:
    """An observer that keeps all it hears of."""

    def candidates_started(self, count: int) -> None: ...

    def cohort_ended(self, record: CohortRecord) -> None: ...

    def group_ended(self, record: GroupRecord) -> None:
        kept_records.append(record)


def short(groups: int = GROUPS, **more: object) -> Soaked:
    return soak(groups, ROUNDS, kept(groups), **more)  # type: ignore[arg-type]


def test_nothing_grows_and_nothing_is_lost_over_thousands_of_groups() -> None:
    soaked = short()
    assert soaked.wrong == []
    assert [growth for growth in soaked.growths if not growth.flat] == []
    assert soaked.ends["answered"] > 0.8 * sum(soaked.ends.values())
    assert {"left", "told: GroupAborted", "told: CandidateFailed"} <= soaked.ends.keys()
    never = {reason for reason, count in soaked.reasons.items() if not count}
    assert never == set(), "each reason to discard a candidate occurs"
    assert all(soaked.rewards[what] for what in ("matched", "repeated", "unknown"))
    assert soaked.updates > 10


def test_what_is_never_forgotten_is_found() -> None:
    def hoard(house: House) -> None:
        house.rollouts._observers += (Hoarder(),)

    soaked = short(1000, spoil=hoard)
    kept_records.clear()
    assert {growth.what for growth in soaked.growths if not growth.flat} >= {"own"}
    assert not soaked.survived


def test_what_is_logged_as_an_error_is_found() -> None:
    def complain(house: House) -> None:
        logging.getLogger("darts_server.rollout.run").error("group g failed")

    soaked = short(200, spoil=complain)
    assert soaked.wrong == ["logged: group g failed"]
    assert not soaked.survived


def test_a_candidate_that_nobody_accounts_for_is_found() -> None:
    def lose(house: House) -> None:
        house.metrics._started.labels("scripted").inc()

    soaked = short(200, spoil=lose)
    assert "candidates were started" in soaked.wrong[0]
    assert not soaked.survived
