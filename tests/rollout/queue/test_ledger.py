import random
from collections import Counter
from pathlib import Path

import pytest

from darts_server.exceptions import Conflict, NotFound, QuotaReached, TooLarge
from darts_server.rollout.queue.entries import AckOutcome, Entry, EntryState, JobId
from darts_server.rollout.queue.leases import EXPIRED_AT_ONCE
from darts_server.rollout.queue.ledger import MOVED_AT_ONCE
from darts_server.rollout.queue.new_entries import NewPrompt
from darts_server.rollout.queue.owners import QueueLimits
from tests.rollout.queue.world import JOB, LEASE, TERMS, Disk, World, prompts

RUNNING, READY, QUEUED, LEASED = EntryState.RUNNING, EntryState.READY, EntryState.QUEUED, EntryState.LEASED


def length(entry: Entry) -> float:
    return float(entry.name)


def ready(*names: str, **options: object) -> World:
    world = World()
    world.put(*names, **options)
    for entry in world.start():
        world.end(entry)
    return world


def test_prompts_go_in_and_groups_come_out_in_their_order() -> None:
    world = ready("a", "b", "c")
    assert [entry.name for entry in world.take(2)] == ["a", "b"]
    assert [entry.name for entry in world.take(2)] == ["c"]
    assert world.take(2) == []


def test_nothing_is_leased_until_there_are_as_many_as_wanted() -> None:
    world = ready("a", "b")
    assert world.take(3, at_least=3) == []
    assert len(world.take(2, at_least=2)) == 2


def test_a_group_that_came_back_is_handed_out_once_at_a_time() -> None:
    world = ready("a", "b")
    assert world.take(3, at_least=3) == []
    [entry] = world.ledger.leases.take(JOB, 1, 1, world.now, LEASE)
    world.ledger.leases.release(entry.lease or "")
    assert not world.ledger.leases.staleness, "it reached no consumer"
    assert [each.name for each in world.take(2)] == ["a", "b"]
    world.now += LEASE
    world.ledger.leases.expire(world.now)
    assert [each.name for each in world.take(3)] == ["a", "b"]


def test_a_prompt_with_a_known_id_is_not_added_again_and_another_one_is_a_conflict() -> None:
    world = ready("a")
    result = world.put_to(JOB, prompts("a", "b"))
    assert (result.names, result.added) == (["a", "b"], 1)
    with pytest.raises(Conflict, match=r"prompts\[0\]\.id"):
        world.put_to(JOB, [NewPrompt(b"", "other", "a")])
    world.acknowledge(world.take()[0].lease or "")
    assert world.put_to(JOB, prompts("a")).added == 0, "also after it was acknowledged"


def test_the_same_idempotency_key_adds_nothing_also_after_a_restart() -> None:
    world = World()
    document = [NewPrompt(b"p", "p")]
    first = world.put_to(JOB, document, key="k", digest="1")
    world.commit()
    world.kill()
    again = world.put_to(JOB, document, key="k", digest="1")
    assert (again.names, again.added) == (list(first.names), 0)
    with pytest.raises(Conflict, match="Idempotency-Key"):
        world.put_to(JOB, document, key="k", digest="2")


@pytest.mark.parametrize("killed", [False, True])
def test_a_put_that_is_repeated_creates_a_job_again_that_was_dropped_as_unused(killed: bool) -> None:
    world = World()
    world.put_to(JOB, prompts("a"), key="k", digest="1")
    world.put_to(JOB, prompts("b"), key="l", digest="1")
    world.put_to(("owner", "other"), prompts("c"), key="m", digest="1")
    world.commit()
    if killed:
        world.kill()
    world.ledger.drop_unused(JOB)
    world.commit()
    if killed:
        world.kill()
    assert world.put_to(JOB, prompts("a"), key="k", digest="2").added == 1, "the key is forgotten"
    assert world.put_to(JOB, prompts("b"), key="l", digest="1").added == 1
    assert world.put_to(("owner", "other"), prompts("c"), key="m", digest="1").added == 0
    assert world.names(QUEUED) == {"a", "b", "c"}


@pytest.mark.parametrize("killed", [False, True])
def test_a_put_that_is_repeated_after_its_job_was_deleted_is_refused(killed: bool) -> None:
    world = World()
    world.put_to(JOB, prompts("a"), key="k", digest="1")
    world.ledger.drop(JOB)
    world.commit()
    if killed:
        world.kill()
    for _ in range(2):
        with pytest.raises(NotFound, match=r"deleted.*another Idempotency-Key"):
            world.put_to(JOB, prompts("a"), key="k", digest="1")
        world.put_to(JOB, prompts("b"), key="l", digest="1")  # another job of this name
        assert world.names(QUEUED) == {"b"}


def test_a_lease_of_a_deleted_job_stays_unknown_after_a_restart() -> None:
    world = ready("a")
    lease = world.take()[0].lease or ""
    world.ledger.drop(JOB)
    world.commit()
    assert world.acknowledge(lease) == [AckOutcome.UNKNOWN]
    world.kill()
    world.put("b")
    assert world.acknowledge(lease) == [AckOutcome.UNKNOWN], "no other prompt has its number"


def test_a_lease_that_expires_is_handed_out_again_and_its_acknowledgement_comes_too_late() -> None:
    world = ready("a")
    [first] = [entry.lease for entry in world.take()]
    world.now += LEASE
    [second] = [entry.lease for entry in world.take()]
    assert first is not None
    assert second is not None
    assert world.acknowledge(first) == [AckOutcome.EXPIRED]
    assert world.acknowledge(second) == [AckOutcome.ACKNOWLEDGED]
    assert world.acknowledge(second, first) == [AckOutcome.ALREADY, AckOutcome.EXPIRED]


def test_a_late_acknowledgement_counts_while_nobody_else_has_the_group() -> None:
    world = ready("a", "b")
    [lease, other] = [entry.lease or "" for entry in world.take(2)]
    world.now += LEASE
    world.ledger.leases.expire(world.now)
    assert world.names(READY) == {"a", "b"}
    assert world.acknowledge(lease) == [AckOutcome.ACKNOWLEDGED]
    for _ in range(2):
        world.update()
    assert world.names(QUEUED) == {"b"}, "it was too old"
    world.start()
    assert world.acknowledge(other) == [AckOutcome.ACKNOWLEDGED], "also while its prompt runs again"
    assert len(world.ledger.stopped) == 1


def test_a_take_that_is_repeated_with_its_key_gets_the_groups_that_it_still_has() -> None:
    world = ready("a", "b", "c", "d")
    first = world.take(2, key="k")
    leases = [entry.lease or "" for entry in first]
    assert world.take(3, at_least=3, key="k") == first
    assert [entry.lease for entry in first] == leases
    world.acknowledge(leases[0])
    world.kill()
    assert [entry.lease for entry in world.take(2, key="k")] == leases[1:], "also after a restart"
    assert world.take(1, key="other")[0].name == "c"
    world.acknowledge(leases[1])
    assert [entry.name for entry in world.take(2, key="k")] == ["d"], "it has none any more"
    assert world.ledger.counts.handed_out == 2, "since the restart"


def test_a_repeated_take_gets_no_group_that_has_expired_or_is_too_old_by_then() -> None:
    world = ready("a", "b", max_staleness=0)
    [first] = world.take(1, key="k")
    lease = first.lease
    world.now += LEASE
    [again] = world.take(1, key="k")
    assert (again.name, again.lease == lease) == ("a", False)
    world.update()
    assert world.take(1, key="k") == []
    assert world.names(QUEUED) == {"a", "b"}
    world.ledger.drop(JOB)
    assert world.take(1, key="k") == []


def test_leases_that_are_gone_are_not_kept_until_they_would_have_expired() -> None:
    world = World()
    for _ in range(30):
        world.put(*map(str, range(100)))
        for entry in world.start():
            world.end(entry)
        world.acknowledge(*(entry.lease or "" for entry in world.take(100)))
        world.ledger.drop(JOB)
    assert len(world.ledger.leases._index._expiries) <= 1100
    assert world.ledger.leases.next_expiry is not None


def test_what_counts_as_taken_can_be_reset_by_a_trainer_that_lost_its_update() -> None:
    world = ready("a", "b", max_staleness=0, groups_per_version=1)
    [taken] = world.take()
    assert world.start() == []
    world.put_to(JOB, [], taken=0)
    world.commit()
    assert [entry.name for entry in world.start()] == ["b"]
    world.now += LEASE
    world.ledger.leases.expire(world.now)
    assert world.ledger.jobs[JOB].job.taken == 0, "what comes back was not counted"
    assert world.acknowledge(taken.lease or "") == [AckOutcome.ACKNOWLEDGED]
    assert world.ledger.jobs[JOB].job.taken == 0


def test_a_job_that_is_not_used_is_dropped_but_not_while_a_group_is_leased() -> None:
    world = World()
    world.put("a", "b", expires_after=1000)
    world.put_to(("owner", "other"), prompts("c"))
    [first, *_] = world.start()
    world.end(first)

    def unused_after(seconds: float) -> bool:
        world.ledger.jobs.clock += seconds
        return world.ledger.jobs.unused() == [JOB]

    assert not unused_after(900)
    [taken] = world.take()
    assert not unused_after(2000)
    assert world.acknowledge(taken.lease or "") == [AckOutcome.ACKNOWLEDGED]
    assert not unused_after(900)
    world.put()
    assert not unused_after(900)
    assert unused_after(100)
    world.kill()
    assert world.ledger.jobs[JOB].job.options.expires_after == 1000
    assert not unused_after(900), "it counts from the start of the server"
    assert unused_after(100)


def test_an_empty_job_that_was_not_used_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.jobs.MAX_JOBS", 3)
    world = World()
    for name, new in (("full", "a"), ("old", None), ("young", None)):
        world.put_to(("owner", name), prompts(*filter(None, [new])))
        world.ledger.jobs.clock += 10
    with pytest.raises(QuotaReached, match="3 jobs"):
        world.put_to(("owner", "more"), [])
    world.put_to(("other", "more"), [])
    world.ledger.jobs.clock += 3600
    world.put_to(("owner", "more"), prompts("b"))
    assert [each.job.id[1] for each in world.ledger.jobs if each.job.id[0] == "owner"] == ["full", "young", "more"]


def test_idempotency_keys_are_forgotten_in_their_order_also_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.history.KEPT_NAMES", 5)
    world = World()
    for key in "ba":
        world.put_to(JOB, prompts(f"{key}1"), key=key, digest=key)
    world.commit()
    world.kill()
    world.put_to(JOB, prompts("c1"), key="c", digest="c")
    with pytest.raises(Conflict):
        world.put_to(JOB, [], key="a", digest="x")
    assert world.put_to(JOB, prompts("d1"), key="b", digest="x").added == 1, "the oldest"


def test_prompts_of_an_owner_that_may_start_none_do_not_stop_those_of_others() -> None:
    world = World()
    world.put_to(("a", "x"), prompts("1", "2"))
    world.put_to(("b", "x"), prompts("3", "4"))
    started = world.ledger.start(10, lambda _: 1.0, may_start=lambda entry: entry.owner == "b")
    assert [entry.name for entry in started] == ["3", "4"]
    assert [entry.name for entry in world.start()] == ["1", "2"]


def test_ids_that_come_twice_in_a_put_are_one_prompt_or_a_conflict() -> None:
    world = World()
    result = world.put_to(JOB, prompts("a", "b", "a"))
    assert (result.names, result.added) == (["a", "b", "a"], 2)
    with pytest.raises(Conflict, match=r"prompts\[1\]\.id"):
        world.put_to(JOB, [*prompts("c"), NewPrompt(b"", "other", "c")])


@pytest.mark.parametrize(
    "lease", ["", "-", "x-y", "-1-x", "0-x", "\uff11-x", "1.5-x", "9" * 19 + "-x", "1-" + "x" * 10_000]
)
def test_any_text_may_be_acknowledged(lease: str) -> None:
    world = ready("a")
    world.take()
    expected = AckOutcome.EXPIRED if lease.startswith("1-") else AckOutcome.UNKNOWN
    assert world.ledger.leases.acknowledge([lease], lambda _: True) == [expected]


def test_leases_of_others_and_of_nobody_are_unknown() -> None:
    world = ready("a")
    [entry] = world.take()
    for lease in (entry.lease or "", "99-x", "", "x", "1" * 30, f"{entry.number}-x"):
        assert world.ledger.leases.acknowledge([lease], lambda owner: owner == "other") == [AckOutcome.UNKNOWN]
    assert world.names(LEASED) == {"a"}


def test_a_failed_group_is_handed_out_once_and_first() -> None:
    world = World()
    world.put("good", "bad", max_staleness=0, groups_per_version=1)
    [good] = world.start()
    world.ledger.give_back(good.number)
    for entry in world.start():
        world.end(entry, failed=True)
    [more] = world.start()
    world.end(more)
    assert [entry.is_failed for entry in world.take(2)] == [True, False]
    assert world.ledger.jobs[JOB].job.taken == 1, "a failed one is not one of those of the version"


def test_prompts_of_a_higher_priority_go_first_and_then_the_longest_of_a_round() -> None:
    world = World()
    world.put_to(JOB, prompts("10", "30", "20"))
    order = world.start(1, length)
    world.put_to(JOB, prompts("5"), priority=1)
    order += world.start(3, length)
    assert [entry.name for entry in order] == ["30", "5", "20", "10"]


def test_all_of_a_round_start_before_those_that_come_later() -> None:
    world = World()
    world.put_to(JOB, prompts("1", "9"))
    names = []
    for number in range(10, 20):
        world.put(str(number))
        names += [entry.name for entry in world.start(1, length)]
    assert names.index("1") < 4


def test_jobs_get_tokens_in_proportion_to_their_weights_and_owners_the_same() -> None:
    world = World()
    tokens = {("a", "light"): 0, ("a", "heavy"): 0, ("b", "only"): 0}
    for job_id in tokens:
        weight = 3.0 if job_id[1] == "heavy" else 1.0
        world.put_to(job_id, prompts(*map(str, range(2000))), options={"weight": weight})
    rng = random.Random(0)
    while sum(tokens.values()) < 100_000:
        [entry] = world.start(1, lambda _: 50.0)
        generated = rng.randint(10, 300 if entry.owner == "b" else 100)
        tokens[entry.job] += generated
        world.ledger.end(entry.number, b"", None, generated, failed=False)
    assert tokens["b", "only"] == pytest.approx(50_000, rel=0.05)
    assert tokens["a", "heavy"] == pytest.approx(37_500, rel=0.05)


def test_a_job_that_was_idle_does_not_get_everything_afterwards() -> None:
    world = World()
    world.put_to(("a", "x"), prompts(*map(str, range(100))))
    world.put_to(("b", "x"), prompts("0"))
    world.start(50)
    world.put_to(("b", "x"), prompts(*map(str, range(1, 100))))
    owners = [entry.owner for entry in world.start(10)]
    assert owners.count("a") == 5


def test_what_is_too_much_is_refused_and_nothing_is_changed() -> None:
    world = World(limits=QueueLimits(prompts=3, bytes=10))
    with pytest.raises(TooLarge, match="--queue-prompts"):
        world.put("a", "b", "c", "d")
    with pytest.raises(TooLarge, match="--queue-bytes"):
        world.put("a" * 11)
    world.put("a", "b")
    with pytest.raises(QuotaReached, match="--queue-prompts"):
        world.put("c", "d")
    with pytest.raises(QuotaReached, match="--queue-bytes"):
        world.put("c" * 9)
    assert not world.ledger.changes
    world.put("c")
    world.put_to(("other", "job"), prompts("d" * 9))


def test_no_prompt_starts_while_groups_that_nobody_takes_have_too_many_bytes() -> None:
    world = World(limits=QueueLimits(bytes=10))
    world.put("a", "b")
    [first] = world.start(1)
    world.ledger.end(first.number, b"x" * 20, None, 1, failed=False)
    assert world.start() == []
    assert world.ledger.waits_for(world.ledger.jobs[JOB]) == "consumer"
    world.acknowledge(world.take()[0].lease or "")
    assert [entry.name for entry in world.start()] == ["b"]


def finish(world: World, *entries: Entry, size: int = 100) -> None:
    for entry in entries:
        world.ledger.end(entry.number, b"x" * size, None, 1, failed=False)


def take_all(world: World, job: JobId) -> list[str]:
    """Take and acknowledge what is ready of a job."""
    entries = world.ledger.leases.take(job, 1000, 1, world.now, LEASE)
    names = [entry.name for entry in entries]
    world.acknowledge(*(entry.lease or "" for entry in entries))
    return names


@pytest.mark.parametrize("overshoot", [1, 30])
def test_a_job_whose_consumer_has_stalled_stops_no_other_job_of_its_owner(overshoot: int) -> None:
    """Also if the groups that were running when the limit was reached exceed it by far."""
    world = World(limits=QueueLimits(bytes=3200))
    stalled = [("", "stalled"), ("", "stalled too")]
    working = ("", "working")
    names = [str(number) for number in range(100)]
    for job in stalled:
        world.put_to(job, prompts(*names))
        while world.ledger.waits_for(world.ledger.jobs[job]) is None:
            finish(world, *world.ledger.start(overshoot, lambda _: 1.0))
    done: list[str] = []
    for start in range(0, 100, 5):
        world.put_to(working, prompts(*names[start : start + 5]))
        while len(done) < start + 5:
            started = world.ledger.start(2, lambda _: 1.0)
            assert {entry.job for entry in started} == {working}
            finish(world, *started)
            done += take_all(world, working)
    assert sorted(done) == sorted(names)
    assert [world.ledger.waits_for(world.ledger.jobs[job]) for job in stalled] == ["consumer"] * 2


def test_a_job_with_all_prompts_of_its_key_leaves_a_share_to_each_other_job() -> None:
    world = World(limits=QueueLimits(prompts=160))
    world.put_to(("", "all"), prompts(*map(str, range(160))))
    with pytest.raises(QuotaReached, match=r"share of 10 beside"):
        world.put_to(("", "all"), prompts("160"))
    with pytest.raises(QuotaReached, match="share of 10 beside"):
        world.put_to(("", "second"), prompts(*map(str, range(11))))
    world.put_to(("", "second"), prompts(*map(str, range(8))))
    with pytest.raises(QuotaReached):
        world.put_to(("", "second"), prompts("8"))
    world.put_to(("", "third"), prompts("0", "1"))
    world.ledger.drop(("", "second"))
    world.put_to(("", "third"), prompts(*map(str, range(2, 8))))
    with pytest.raises(QuotaReached):
        world.put_to(("", "all"), prompts("160"))
    world.ledger.drop(("", "all"))
    world.put_to(("", "third"), prompts(*map(str, range(152))))


def test_many_jobs_of_an_owner_have_at_most_a_quarter_more_than_its_limit() -> None:
    limits = QueueLimits(prompts=1000)
    world = World(limits=limits)
    put = [0] * 100
    for job in range(100):
        for number in range(1000):
            try:
                world.put_to(("", str(job)), prompts(str(number)))
            except QuotaReached:
                break
            put[job] += 1
    assert put[:3] == [1000, 50, 40]
    assert 1200 <= sum(put) <= 1250


def test_a_prompt_that_has_no_room_yet_delays_no_other_job_of_its_owner_and_starts_in_the_end() -> None:
    """A key may have eight candidates: groups of eight need all of them, groups of one leave always some to others."""
    world = World()
    sizes = {("a", "large"): 8, ("a", "small"): 1}
    for job in sizes:
        world.put_to(job, prompts(*map(str, range(2000))))
    running: list[Entry] = []
    tokens = Counter[str]()
    first: list[str] = []

    def may_start(entry: Entry) -> bool:
        if sum(sizes[each.job] for each in running) + sizes[entry.job] > 8:
            return False
        running.append(entry)
        return True

    def size(entry: Entry) -> float:
        return 10.0 * sizes[entry.job]

    [entry] = world.ledger.start(1, size, may_start=lambda entry: entry.job[1] == "small")
    running.append(entry)
    rng = random.Random(0)
    for _ in range(1000):
        world.ledger.start(100, size, may_start=may_start)
        first = first or [entry.job[1] for entry in running]
        ended = running.pop(rng.randrange(len(running)))
        world.ledger.end(ended.number, b"", None, int(size(ended)), failed=False)
        tokens[ended.job[1]] += int(size(ended))
    assert first == ["small"] * 8, "the large one waits alone"
    assert tokens["large"] == pytest.approx(tokens["small"], rel=0.1)


def test_a_deleted_job_is_gone_from_the_disk_too() -> None:
    world = ready("a", "b", "c")
    world.acknowledge(world.take()[0].lease or "")
    world.put("d")
    [running] = world.start()
    assert world.ledger.drop(JOB) == 3
    assert world.ledger.stopped == [running.number]
    world.end(running)
    world.commit()
    assert isinstance(world.disk, Disk)
    assert list(world.disk.rows) == [("number", "")]
    with pytest.raises(NotFound):
        world.ledger.drop(JOB)
    assert world.ledger.entries.oldest() is None


def test_after_a_restart_running_groups_start_again_and_others_are_what_they_were() -> None:
    world = World()
    world.put("a", "b", "c", "d")
    started = world.start(3)
    for entry in started[:2]:
        world.end(entry)
    [leased] = world.take()
    world.kill()
    assert (world.names(QUEUED), world.names(READY), world.names(LEASED)) == ({"c", "d"}, {"b"}, {"a"})
    assert world.acknowledge(leased.lease or "") == [AckOutcome.ACKNOWLEDGED]
    assert world.ledger.entries.terms_of(world.take()[0]) == TERMS


def test_acknowledgements_are_forgotten_in_their_order_also_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.history.KEPT_ACKNOWLEDGED", 2)
    world = ready("late", "1", "2", "3")
    [late, *others] = [entry.lease or "" for entry in world.take(4)]
    world.acknowledge(*others[:2])
    world.acknowledge(late)
    world.kill()
    world.acknowledge(others[2])
    assert world.acknowledge(late) == [AckOutcome.ALREADY], "it is the newest but one"
    assert world.put_to(JOB, prompts("late")).added == 0
    assert world.acknowledge(others[1]) == [AckOutcome.UNKNOWN]


def test_a_failed_group_is_what_it_was_after_a_restart_under_other_weights() -> None:
    world = World()
    world.put("bad")
    world.update()
    [entry] = world.start()
    world.end(entry, failed=True)
    world.commit()
    world.version = 0
    world.kill()
    world.update()
    [entry] = world.take()
    assert (entry.is_failed, world.version - entry.version) == (True, 0)


def test_resetting_what_was_taken_touches_no_group() -> None:
    world = ready(*map(str, range(100)), groups_per_version=100)
    world.take(50)
    world.put_to(JOB, [], taken=0)
    assert len(world.ledger.changes) == 2, "its job and the last number"


def test_groups_are_not_looked_at_one_by_one_while_none_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ready("a", max_staleness=2)
    with monkeypatch.context() as patched:
        patched.setattr(world.ledger, "_restart_if_stale", lambda *_: pytest.fail("it was looked at"))
        world.put("b")
        world.update()
        world.put()
    world.put(max_staleness=0)
    assert world.names(QUEUED) == {"a", "b"}


def test_a_few_new_prompts_go_where_they_would_go_among_many() -> None:
    world = World()
    world.put_to(JOB, prompts(*map(str, range(100))))
    world.put_to(JOB, prompts("100", "101"))
    world.put_to(JOB, prompts("first"), priority=1)
    assert [entry.name for entry in world.start()] == ["first", *map(str, range(102))]


def test_groups_of_weights_that_the_server_no_longer_has_start_again_after_a_restart() -> None:
    world = ready("a", "b")
    [leased] = world.take()
    world.update()
    world.put("c")
    [entry] = world.start()
    world.end(entry)
    world.commit()
    world.version, world.model = 0, "model"
    world.kill()
    assert (world.names(READY), world.names(QUEUED)) == ({"b"}, {"c"}), "the weights of the start are the same"
    world.update()  # it has the number of the weights of c, and is another update
    world.now += LEASE
    assert [(entry.name, entry.version) for entry in world.take(3)] == [("a", 0), ("b", 0)]
    world.commit()
    world.version, world.model = 0, "other"
    world.kill()
    world.now += LEASE
    assert world.take(3) == []
    assert world.names(QUEUED) == {"a", "b", "c"}
    assert world.acknowledge(leased.lease or "") == [AckOutcome.EXPIRED]


def test_nothing_counts_as_taken_after_a_restart() -> None:
    world = ready("a", "b", max_staleness=0, groups_per_version=1)
    [taken] = world.take()
    world.kill()
    assert [entry.name for entry in world.start()] == ["b"]
    world.now += LEASE
    world.ledger.leases.expire(world.now)
    assert world.ledger.jobs[JOB].job.taken == 0
    assert taken.name == "a"


def test_many_groups_that_are_too_old_start_again_some_at_a_time_and_none_goes_out_meanwhile() -> None:
    names = [str(number) for number in range(2 * MOVED_AT_ONCE + 1)]
    world = ready(*names, max_staleness=0)
    world.put_to(("owner", "other"), prompts("fresh"))
    world.update()
    assert len(world.names(QUEUED)) == MOVED_AT_ONCE + 1
    [fresh] = [entry for entry in world.start() if entry.name == "fresh"]
    for entry in [each for each in world.ledger.jobs[JOB] if each.state is EntryState.RUNNING]:
        world.end(entry)
    assert world.take(len(names)) == [], "old ones are left"
    assert world.ledger.restart_ready()
    assert not world.ledger.restart_ready()
    world.end(fresh)
    for entry in world.start():
        world.end(entry)
    taken = world.take(len(names))
    assert sorted(entry.name for entry in taken) == sorted(names)
    assert {entry.version for entry in taken} == {1}
    assert world.ledger.counts.stale == len(names)
    assert not world.ledger.restart_ready()


def test_groups_that_were_ready_under_a_version_that_is_back_are_not_lost() -> None:
    names = [str(number) for number in range(MOVED_AT_ONCE + 5)]
    world = ready(*names, max_staleness=0)
    world.update()
    world.update(0)
    assert len(world.take(len(names))) == 5
    assert len(world.names(QUEUED)) == MOVED_AT_ONCE


def test_many_leases_expire_some_at_a_time() -> None:
    names = [str(number) for number in range(2 * EXPIRED_AT_ONCE)]
    world = ready(*names)
    assert len(world.take(len(names))) == len(names)
    world.now += LEASE
    assert [world.ledger.leases.expire(world.now) for _ in range(3)] == [True, True, False]
    assert world.ledger.counts.expired == len(names)
    assert len(world.take(len(names))) == len(names)


def test_a_smaller_bound_holds_for_groups_that_are_ready_too() -> None:
    world = ready("a", max_staleness=1)
    world.update()
    world.put(max_staleness=0)
    assert world.take() == []
    assert world.names(QUEUED) == {"a"}


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_ten_thousand_groups_are_acknowledged_exactly_once_each(tmp_path: Path, real: bool) -> None:
    """Consumers die with their leases, or acknowledge twice and late, and the server is killed again and again."""
    size = 10_000
    rng = random.Random(20)
    world = World(tmp_path if real else None, QueueLimits(prompts=3000))
    running = []
    held: list[str] = []
    put = kills = 0
    while len(world.acknowledged) < size:
        while put < size and rng.random() < 0.9:
            names = [str(number) for number in range(put, min(size, put + rng.randint(1, 200)))]
            try:
                repeated = [*names, *names[:1]]
                added = [
                    world.put_to(JOB, prompts(*repeated), key=f"put {put}", digest="").added
                    for _ in range(rng.randint(1, 2))
                ]
                world.commit()
            except QuotaReached:
                break
            assert sum(added) == len(names)
            put += len(names)
        running += world.start(rng.randint(1, 200))
        rng.shuffle(running)
        for entry in [running.pop() for _ in range(len(running) // 2 + 1) if running]:
            world.end(entry, failed=rng.random() < 0.01)
        key = rng.choice([None, str(rng.randrange(50))])
        taken = [entry.lease or "" for entry in world.take(rng.randint(1, 150), key=key)]
        assert len(set(taken)) == len(taken)
        if taken and key is not None and rng.random() < 0.5:
            assert [entry.lease for entry in world.take(400, key=key)] == taken
        held = list(dict.fromkeys([*held, *taken]))
        rng.shuffle(held)
        mine = [held.pop() for _ in range(rng.randint(0, len(held)))]
        done = world.acknowledge(*mine)
        assert AckOutcome.UNKNOWN not in done
        if mine and rng.random() < 0.5:
            again = world.acknowledge(*mine)
            assert AckOutcome.ACKNOWLEDGED not in again
        if rng.random() < 0.2:
            del held[: len(held) // 2]  # a consumer dies
        if rng.random() < 0.1:
            world.now += LEASE / 2
        if rng.random() < 0.1:
            world.update()
        world.commit()
        assert len(world.ledger.entries.by_number) == world.counts.put - world.counts.acknowledged
        if rng.random() < 0.1:
            world.take(50) if rng.random() < 0.5 else world.ledger.leases.take(JOB, 50, 1, world.now, LEASE)
            world.version = 0
            world.kill()
            running = []
            kills += 1
        if not world.names(QUEUED) and not running:
            world.now += LEASE / 10
    assert sorted(world.acknowledged, key=int) == [str(number) for number in range(size)]
    assert max(world.staleness) == 1
    assert kills > 10
    assert not world.ledger.entries.by_number
    counts = world.counts
    assert (counts.put, counts.acknowledged, counts.handed_out) == (size, size, len(world.leases))
    ended_early = counts.handed_out - (counts.acknowledged - world.late) - counts.expired
    assert 0 <= ended_early <= counts.stale, "a lease is acknowledged, expires, or is of a group that is too old"
    assert min(counts.expired, counts.stale, counts.failed, world.late) > 0, "all of it has happened"
    assert (counts.aborted, counts.dropped) == (0, 0)
    world.close()
