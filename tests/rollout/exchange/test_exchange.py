"""What a server learns from the observations of others is what it would have learned from groups of its own."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from darts_server.rollout.exchange import positions
from darts_server.rollout.exchange.log import ObservationLog
from darts_server.rollout.exchange.observations import FirstExploration
from darts_server.rollout.exchange.positions import Positions
from darts_server.types import Outcome
from tests.rollout.exchange.learners import Learner, play, random_group, read
from tests.rollout.helpers import Documents

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("seed", range(5))
async def test_two_servers_have_the_same_statistics_wherever_the_groups_ran(seed: int) -> None:
    one, two = Learner(), Learner()
    rng = np.random.default_rng(seed)
    for number in range(10):
        here, there = (one, two) if number % 3 else (two, one)
        seen = here.exchange.log.last
        play(here, rng, 20)
        sent = here.sent(here.exchange.log.life, seen)
        assert await there.learn_from(sent) == (len(sent), 0, 0)
    assert {kind for kind, _ in one.learned} >= {"prompt", "step", "profile", "prompt_rewards", "losses", "deadline"}
    assert one.learned == two.learned


async def test_each_observation_counts_once_also_if_it_comes_several_times_at_once() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 60)
    one.statistics.flush()  # how many groups are written at a time makes no difference
    sent = one.sent()
    counts = await asyncio.gather(*(two.learn_from(sent[start:]) for start in (0, 0, 5)))
    assert (sum(learned for learned, _, _ in counts), counts[0][2]) == (len(sent), 0)
    assert one.learned == two.learned
    assert await two.learn_from(sent) == (0, len(sent), 0)
    assert await one.learn_from(sent) == (0, len(sent), 0), "its own"
    assert one.learned == two.learned


async def test_whatever_was_learned_from_others_is_written_with_how_far_that_is() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 60)
    await two.learn_from(one.sent())
    written = dict(two.documents.kept)
    two.statistics.flush()
    assert two.documents.kept == written


async def test_a_state_has_all_of_the_groups_that_it_says_are_in_it() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    one.exchange.flush()
    two.documents.restore(one.documents.kept)
    assert await two.learn_from(one.sent()) == (0, one.exchange.log.last, 0)
    assert two.learned == one.learned


async def test_a_state_that_was_restored_is_not_overwritten_by_what_was_learned_before() -> None:
    one, two = Learner(), Learner()
    for number, each in enumerate((one, two)):
        play(each, np.random.default_rng(number), 20)
    two.exchange.flush()
    one.documents.restore(two.documents.kept)
    restored = dict(one.documents.kept)
    one.exchange.flush()
    assert one.documents.kept == restored


async def test_what_others_have_observed_is_not_passed_on() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    await two.learn_from(one.sent())
    assert two.sent() == []


async def test_missing_observations_are_counted() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    sent = one.sent()
    assert await two.learn_from(sent[3:5]) == (2, 0, 3)
    assert await two.learn_from([*sent[4:6], *sent[8:]]) == (len(sent) - 7, 1, 2)


async def test_a_restarted_server_learns_nothing_again_from_what_is_in_its_store() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    sent = one.sent()
    await two.learn_from(sent)
    before = two.learned
    restarted = Learner(two.documents)
    assert restarted.exchange.log.life != two.exchange.log.life
    assert await restarted.learn_from(sent) == (0, len(sent), 0)
    assert restarted.learned == before


async def test_after_a_restore_nothing_from_before_is_told_or_learned() -> None:
    one, two = Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    play(two, np.random.default_rng(1), 20)
    saved, sent = dict(one.documents.kept), two.sent()
    await one.learn_from(sent)
    before = one.exchange.log.life
    one.documents.restore(saved)
    assert one.sent() == []
    assert one.exchange.log.life != before
    assert await one.learn_from(sent) == (0, len(sent), 0)
    play(one, np.random.default_rng(2), 5)
    assert one.sent()[0]["number"] == 1


async def test_the_state_of_another_server_says_what_is_in_it() -> None:
    one, two, new = Learner(), Learner(), Learner()
    play(one, np.random.default_rng(0), 20)
    play(two, np.random.default_rng(1), 20)
    await one.learn_from(two.sent())
    one.statistics.flush()
    assert (one.exchange.is_new, new.exchange.is_new) == (False, True)
    new.documents.restore(one.documents.kept)
    counts = [await new.learn_from(each.sent()) for each in (one, two)]
    assert [learned for learned, _, _ in counts] == [0, 0]
    play(two, np.random.default_rng(2), 5)
    sent = two.sent()
    await one.learn_from(sent)
    await new.learn_from(sent)
    assert new.learned == one.learned
    assert not new.exchange.is_new


def test_groups_that_were_not_completed_teach_nothing() -> None:
    one = Learner()
    one.end(replace(random_group(np.random.default_rng(0)), outcome=Outcome.FAILED))
    one.exchange.learn({})
    assert one.sent() == []
    assert one.exchange.is_new


async def test_what_is_sent_says_nothing_of_callers_and_groups() -> None:
    one = Learner()
    record = replace(random_group(np.random.default_rng(0)), outcome=Outcome.COMPLETED, group_id="secret-id")
    one.end(record)
    text = json.dumps(one.sent())
    assert "someone" not in text
    assert "secret-id" not in text
    assert len(read(one.sent())) == 1


def test_the_log_keeps_the_newest_within_its_limits() -> None:
    log = ObservationLog(max_kept=3, max_size=100)
    for _ in range(5):
        log.add(FirstExploration("a", 1))
    assert [number for number, _ in log.after(0, 10)] == [3, 4, 5]
    assert [number for number, _ in log.after(3, 1)] == [4]
    assert log.after(5, 10) == log.after(99, 10) == []
    small = ObservationLog(max_kept=100, max_size=2)
    for _ in range(5):
        small.add(FirstExploration("a", 1))
    assert [number for number, _ in small.after(0, 10)] == [4, 5]


def test_positions_are_kept_for_a_bounded_number_of_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "MAX_LIVES", 2)
    kept = Positions(Documents())
    for life in ("a", "b", "a", "c"):
        kept.set(life, kept.of(life) + 1)
    assert kept.all == {"a": 2, "c": 1}


@pytest.mark.parametrize("value", [[], {"a": -1}, {"a": True}, {"a" * 65: 1}, dict.fromkeys(map(str, range(129)), 1)])
def test_positions_that_cannot_be_used_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must"):
        positions.parse_positions(value)
