"""The bound of staleness, with consumers that keep what they say and with others."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.rollout.queue.entries import Entry, JobOptions
from darts_server.rollout.queue.staleness import is_stale, may_hand_out, startable
from tests.rollout.queue.world import JOB, World


def open_groups(world: World) -> list[Entry]:
    [each] = world.ledger.jobs
    return [*each.running.values(), *each.ready.values()]


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 6),
    staleness=st.integers(0, 3),
    ahead=st.booleans(),
    one_by_one=st.booleans(),
)
def test_groups_are_never_too_old_and_none_starts_again_for_a_consumer_that_takes_what_it_says(
    seed: int, size: int, staleness: int, ahead: bool, one_by_one: bool
) -> None:
    rng = random.Random(seed)
    world = World()
    world.put(
        *map(str, range(100)),
        groups_per_version=size,
        max_staleness=staleness,
        groups_ahead=rng.randint(1, size) if ahead else 0,
    )
    running: list[Entry] = []
    most_open = 0
    while len(world.acknowledged) < 60:
        running = [entry for entry in running if world.ledger.is_running(entry.number)]
        started = world.start(rng.randint(0, 10))
        assert all(entry.version == world.version for entry in started)
        running += started
        most_open = max(most_open, len(open_groups(world)))
        for entry in rng.sample(running, rng.randint(0, len(running))):
            running.remove(entry)
            world.end(entry)
        left = size - world.ledger.jobs[JOB].job.taken_under(world.version)
        wanted = 1 if one_by_one else left
        for entry in world.take(wanted, at_least=wanted) if rng.random() < 0.7 else []:
            assert world.version - entry.version <= staleness
            world.acknowledge(entry.lease or "")
            left -= 1
        if not left:
            world.update()
    assert most_open <= (staleness + 1) * size + (size if ahead else 0)
    if not ahead:
        assert world.ledger.counts.stale == 0, "nothing was thrown away"
    assert set(world.staleness) <= set(range(staleness + 1))


@given(seed=st.integers(0, 2**32), size=st.none() | st.integers(1, 4), staleness=st.integers(0, 2))
def test_groups_are_never_too_old_whatever_the_consumer_does(seed: int, size: int | None, staleness: int) -> None:
    rng = random.Random(seed)
    world = World()
    world.put(*map(str, range(40)), groups_per_version=size, max_staleness=staleness)
    first_token: dict[int, int] = {}
    for _ in range(300):
        match rng.randrange(6):
            case 0:
                for entry in world.start(rng.randint(1, 5)):
                    first_token[entry.number] = world.version
            case 1 | 2:
                for entry in [*next(iter(world.ledger.jobs)).running.values()]:
                    if rng.random() < 0.5:
                        world.end(entry)
            case 3:
                for entry in world.take(rng.randint(1, 5)):
                    assert world.version - first_token[entry.number] <= staleness
                    if rng.random() < 0.5:
                        world.acknowledge(entry.lease or "")
            case 4:
                world.now += rng.choice([10, 60])
            case 5:
                world.update(world.version + rng.choice([1, 1, 3]))
    while len(world.acknowledged) < 40:  # and nothing is lost
        world.now += 200
        world.update()
        for entry in world.start():
            world.end(entry)
        for entry in world.take(40):
            world.acknowledge(entry.lease or "")
    assert sorted(world.acknowledged, key=int) == [str(number) for number in range(40)]


def test_with_no_staleness_what_starts_under_a_version_is_handed_out_under_it() -> None:
    world = World()
    world.put(*map(str, range(20)), groups_per_version=4, max_staleness=0)
    for _ in range(5):
        started = world.start()
        assert len(started) == 4
        for entry in started:
            world.end(entry)
        taken = world.take(4, at_least=4)
        assert world.start() == []
        assert world.ledger.waits_for(world.ledger.jobs[JOB]) == "weights"
        world.acknowledge(*[entry.lease or "" for entry in taken])
        world.update()
    assert world.staleness == [0] * 20
    assert world.ledger.counts.stale == 0


def test_groups_ahead_start_again_before_others() -> None:
    world = World()
    world.put(*map(str, range(20)), groups_per_version=4, max_staleness=0, groups_ahead=2)
    started = world.start()
    assert len(started) == 6
    for entry in started[2:]:
        world.end(entry)
    world.take(4)
    world.ledger.restart_stale(world.version + 1)  # an update is announced: it has not to wait for them
    assert world.ledger.stopped == [started[0].number, started[1].number]
    world.update()
    assert [entry.name for entry in world.start(3)] == ["0", "1", "6"]


def test_a_group_that_runs_on_is_waited_for_before_a_younger_one_takes_its_place() -> None:
    world = World()
    world.put(*map(str, range(20)), groups_per_version=2, max_staleness=1)
    [first, second, *others] = world.start()
    assert len(others) == 2
    world.end(second)
    world.end(others[0])
    world.take(2)
    world.update()
    young = world.start()
    for entry in young:
        world.end(entry)
    assert len(young) == 2
    assert world.take(2) == [], "both places of this version are for the two older ones"
    world.end(others[1])
    assert [entry.name for entry in world.take(2)] == [others[1].name]
    assert world.take(1) == []
    world.end(first)
    assert [entry.name for entry in world.take(1)] == [first.name]


def test_a_group_that_was_restarted_with_new_weights_counts_with_these() -> None:
    world = World()
    world.put("a", groups_per_version=1, max_staleness=0)
    [entry] = world.start()
    world.ledger.begun_under(entry.number, 1)
    world.update(1)
    assert world.ledger.is_running(entry.number)
    world.end(entry)
    assert len(world.take()) == 1


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_rules_by_hand(staleness: int) -> None:
    options = JobOptions(4, staleness)
    assert startable(options, 0, 0) == 4 * (staleness + 1)
    assert startable(options, 4 * staleness, 4) == 0
    assert startable(JobOptions(), 10**9, 10**9) > 0
    assert is_stale(options, 0, staleness + 1)
    assert not is_stale(options, 1, staleness + 1)
    assert may_hand_out(options, {5: 3}, 4, 5, 5), "the oldest ones always go out"
