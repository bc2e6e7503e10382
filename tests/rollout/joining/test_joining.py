"""Groups put together from single requests: each sentence of the contract by itself."""

import asyncio

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, ServerStopping
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.observers.provenance import Provenance
from darts_server.serving.admission import Caller as From
from darts_server.serving.admission import caller as caller_of
from darts_server.types import CohortRecord, DiscardReason, Outcome
from tests.rollout.helpers import lengths
from tests.rollout.joining.joining import (
    POLICIES,
    SAMPLED,
    SHORTEST,
    WAIT,
    Caller,
    Hall,
    SteppedLoop,
    by_caller,
    finish,
    same_group,
)

pytestmark = pytest.mark.anyio
CUT = Shaping(redundancy=1.5, num_longest=1, deadline=Deadline())
TRIALS = 80
"""Draws of one of four seats: enough that each way of falling is seen but once in ten thousand million runs."""
LONG_TAIL = 5
"""A seed of tail_seed with which one of the last two of six candidates is the first to be drawn."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


def indices(callers: list[Caller]) -> list[tuple[str, int]]:
    return sorted((c.got.request, c.got.index) for c in callers)


# --- seats and the seal ----------------------------------------------------------


async def test_every_request_starts_a_candidate_of_its_own_at_once() -> None:
    hall = Hall(lengths(9), SHORTEST)
    for number in range(1, 4):
        caller = hall.come(f"c{number}")
        await settle()
        assert [c.request for c in hall.engine.running] == [f"p:c{i}" for i in range(1, number + 1)]
        assert {c.index for c in hall.engine.running} == {0}
        assert caller.group_id == "group-c1"
        await hall.engine.step()
    for caller in hall.callers:
        caller.hang_up()
    await hall.assert_empty()


async def test_the_last_seat_seals_the_group_and_the_extra_candidates_start() -> None:
    hall = Hall(lengths(9), SHORTEST)
    callers = await hall.all_come()
    assert hall.recorder.started == 6
    extras = [(c.request, c.index) for c in hall.engine.started[4:]]
    assert extras == [("p:c0", 4), ("p:c0", 5)], "of the first request, beyond its own and those of the others"
    await finish(hall, callers)
    assert all(c.served for c in callers)
    assert same_group(callers)
    assert hall.record("group-c0").outcome is Outcome.COMPLETED


async def test_quiet_seals_the_group_short_and_each_request_starts_it_anew() -> None:
    hall = Hall(lengths(9), SHORTEST)
    for name in ("c0", "c1", "c2"):
        hall.come(name)
        await settle()
        await hall.quiet(WAIT - 0.5)
    assert hall.recorder.started == 3
    await hall.quiet(0.5)
    assert hall.recorder.started == 5, "1.5 times those who came"
    await finish(hall, hall.callers)
    assert len({c.got for c in hall.callers}) == 3
    assert hall.record("group-c0").size == 3


async def test_what_finished_while_the_group_gathered_counts_by_its_length() -> None:
    hall = by_caller(20, 3, 2, 30, 25)
    first = await hall.all_come(3)
    await hall.steps(10)
    late = hall.come("c3")
    await finish(hall, [*first, late])
    assert sorted(c.got.tokens for c in hall.callers) == [2, 3, 20, 25]


async def test_candidates_are_not_stopped_while_the_group_gathers() -> None:
    hall = by_caller(2, 3, 50, 50, 60)
    await hall.all_come(3)
    await hall.steps(40)
    assert len(hall.engine.running) == 1
    await hall.all_come(1)
    await finish(hall, hall.callers)
    assert {c.got.tokens for c in hall.callers} == {2, 3, 50}


# --- missing callers -------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_caller_alone_gets_its_own_candidate(policy: str) -> None:
    def script(request: str, index: int) -> Script:
        return Script(30 if index == 0 else 2)

    hall = Hall(script, POLICIES[policy])
    [caller] = await hall.all_come(1)
    await hall.quiet()
    await finish(hall, [caller])
    assert (caller.got.request, caller.got.index, caller.got.tokens) == ("p:c0", 0, 30)
    assert hall.recorder.started == 1
    assert hall.record("group-c0").size == 1


async def test_a_size_that_the_policy_cannot_do_is_not_shaped() -> None:
    hall = Hall(lengths(9), POLICIES["four alone"])
    callers = await hall.all_come(3)
    await hall.quiet()
    await finish(hall, callers)
    assert indices(callers) == [("p:c0", 0), ("p:c1", 0), ("p:c2", 0)]
    assert hall.recorder.started == 3


async def test_a_sealed_short_group_replaces_what_failed_while_it_gathered() -> None:
    hall = Hall(lambda request, index: Script(2, error=CandidateFailed("boom")) if index == 0 else Script(6), SAMPLED)
    callers = await hall.all_come(2)
    await hall.steps(3)
    assert hall.engine.running == []
    await hall.quiet()
    await finish(hall, callers)
    assert {c.got.tokens for c in callers} == {6}
    assert len({c.got for c in callers}) == 2


# --- callers that hang up ----------------------------------------------------------


async def test_a_hang_up_before_the_seal_leaves_its_seat_and_its_candidate() -> None:
    hall = by_caller(9, 1, 2, 8, 50)
    gone, *rest = await hall.all_come(3)
    gone.hang_up()
    await settle()
    assert len(hall.engine.running) == 3
    rest += await hall.all_come(1)
    assert hall.recorder.started == 6, "four seats, whoever sits in them"
    await hall.steps(60)
    assert all(c.served for c in rest)
    assert len({c.got for c in rest}) == 3
    assert {c.got.tokens for c in rest} < {1, 2, 8, 9}
    await hall.assert_empty()


async def test_when_the_last_who_waits_has_its_own_what_still_runs_is_stopped() -> None:
    stopped = 0
    for _ in range(TRIALS):
        hall = by_caller(5, 6, 7, 40, 50)
        callers = await hall.all_come()
        callers[0].hang_up()
        await hall.steps(7)
        if all(c.served for c in callers[1:]):
            stopped += 1
            record = hall.record("group-c0")
            assert record.outcome is Outcome.CANCELLED
            assert sorted(c.tokens for c in record.selected) == [5, 6, 7]
            assert {c.reason for c in record.candidates if c.selected_as is None} == {DiscardReason.CANCELLED}
            await hall.assert_empty()
        else:
            await hall.engine.run()
            assert hall.record("group-c0").outcome in (Outcome.COMPLETED, Outcome.CANCELLED)
            await hall.assert_empty()
    assert 0 < stopped < TRIALS


@pytest.mark.parametrize(("come", "window"), [(2, 0.0), (4, 1.0), (4, 0.0)], ids=["gathers", "allocates", "runs"])
async def test_when_all_hang_up_everything_stops_at_once(come: int, window: float) -> None:
    hall = Hall(lengths(50), POLICIES["adaptive"], window=window)
    callers = await hall.all_come(come)
    await hall.engine.step()
    for caller in callers:
        caller.hang_up()
    await hall.assert_empty()
    await hall.quiet(window)
    assert len(hall.recorder.batches) == (1 if come == 4 and not window else 0)
    [record] = hall.recorder.records
    assert record.outcome is Outcome.CANCELLED
    assert all(c.tokens <= 1 for c in record.candidates)


async def test_a_caller_that_hangs_up_in_its_first_turn_leaves_nothing() -> None:
    hall = Hall(lengths(50), SAMPLED)
    for turns in range(5):
        caller = hall.come(f"c{turns}")
        for _ in range(turns):
            await asyncio.sleep(0)
        caller.hang_up()
        await hall.assert_empty()


async def test_a_caller_that_cannot_be_told_its_group_leaves_nothing() -> None:
    hall = Hall(lengths(50), SAMPLED)

    def broken(_: str) -> None:
        raise RuntimeError("no such header")

    with pytest.raises(RuntimeError, match="no such header"):
        await hall.rollouts.joiner.join(hall.joining("c0"), broken)
    await hall.assert_empty()


# --- late callers, and those beyond the size ------------------------------------------


async def test_a_late_caller_takes_the_vacant_seat_and_gets_what_fell_to_it() -> None:
    fell = 0
    for _ in range(TRIALS):
        hall = by_caller(3, 10, 11, 12, 50)
        gone, *rest = await hall.all_come()
        gone.hang_up()
        await hall.steps(4)
        fell_to_it = not any(c.task.done() for c in rest)
        late = hall.come("c4")
        await settle()
        assert late.task.done() == fell_to_it
        fell += fell_to_it
        await finish(hall, [*rest, late])
        assert late.group_id == "group-c0"
        assert sorted(c.got.tokens for c in [*rest, late]) == [3, 10, 11, 12]
        record = hall.record("group-c0")
        assert record.outcome is Outcome.COMPLETED
        assert record.request_ids == ("c0", "c1", "c2", "c3", "c4")
        assert hall.recorder.started == 6, "it starts no candidate"
    assert 0 < fell < TRIALS


async def test_a_late_caller_that_hangs_up_leaves_the_seat_to_the_next() -> None:
    hall = by_caller(3, 10, 11, 12, 50)
    gone, *rest = await hall.all_come()
    gone.hang_up()
    await settle()
    for name in ("c4", "c5"):
        caller = hall.come(name)
        await settle()
        assert caller.group_id == "group-c0"
        caller.hang_up()
        await settle()
    rest += [hall.come("c6")]
    await finish(hall, rest)
    assert sorted(c.got.tokens for c in rest) == [3, 10, 11, 12]


async def test_what_was_given_to_one_that_leaves_in_that_turn_is_kept_for_a_late_caller() -> None:
    for leaver in range(4):
        hall = by_caller(3, 10, 11, 12, 50)
        callers = await hall.all_come()
        await hall.steps(2)
        # In the turn in which a trajectory falls to somebody, before that one has taken it.
        hall.engine.now += 1
        for candidate in hall.engine.running:
            candidate.step(hall.engine.now)
        while not any(s.output for s in hall.seats("group-c0")):
            await asyncio.sleep(0)
        [seat] = [s for s, seat in enumerate(hall.seats("group-c0")) if seat.output]
        callers[seat].hang_up()
        await settle()
        assert callers[seat].task.cancelled()
        late = hall.come(f"late{leaver}")
        await settle()
        assert late.got.tokens == 3
        await finish(hall, [c for c in callers if c is not callers[seat]])


async def test_a_caller_beyond_the_size_begins_a_group_of_its_own() -> None:
    hall = Hall(lengths(9), SHORTEST)
    callers = await hall.all_come(5)
    assert [c.group_id for c in callers] == ["group-c0"] * 4 + ["group-c4"]
    callers += await hall.all_come(3)
    await finish(hall, callers)
    assert same_group(callers[:4])
    assert same_group(callers[4:])
    assert len({c.got for c in callers}) == 8


async def test_a_seat_that_was_served_is_not_vacant() -> None:
    hall = by_caller(3, 10, 11, 12, 50)
    callers = await hall.all_come()
    await hall.steps(4)
    assert sum(c.task.done() for c in callers) == 1
    late = hall.come("c4")
    await settle()
    assert late.group_id == "group-c4"
    await hall.quiet()
    await finish(hall, [*callers, late])


async def test_a_seat_of_a_group_that_has_its_record_is_not_given_to_a_late_caller() -> None:
    # Nobody could find the group by the request of one that comes only now, while what was cut is on its way.
    for _ in range(8):
        hall = Hall(lambda request, index: Script(60 if index else 2 + int(request[-1])), CUT, tail_seed=LONG_TAIL)
        gone, *rest = await hall.all_come()
        gone.hang_up()
        hall.rollouts.begun["group-c0"].set_deadline(9)
        hall.signing.aborted.clear()
        await hall.steps(9)
        [record] = hall.recorder.records
        late = hall.come("late")
        await settle()
        assert late.group_id == "group-late"
        hall.signing.aborted.set()
        await hall.quiet()
        await finish(hall, [*rest, late])
        assert late.name not in record.request_ids
        assert {c.got.tokens for c in rest} < {2, 3, 4, 9}


# --- which group ------------------------------------------------------------------


async def test_requests_of_other_prompts_and_of_other_names_are_groups_of_their_own() -> None:
    hall = Hall(lengths(9), SHORTEST)
    wanted: dict[tuple[str, str | None], list[Caller]] = {}
    for number in range(4):
        for prompt in ("p", "q"):
            for name in (None, "mine", "yours"):
                wanted.setdefault((prompt, name), []).append(hall.come(f"{prompt}{name}{number}", prompt, name))
    await finish(hall, hall.callers)
    for (prompt, _), callers in wanted.items():
        assert same_group(callers)
        assert {c.got.prompt for c in callers} == {prompt}
        assert len({c.got for c in callers}) == 4
    assert len(hall.recorder.records) == 6


async def test_two_groups_of_one_prompt_fill_one_after_the_other() -> None:
    hall = Hall(lengths(5, 6, 7), SHORTEST)
    callers = await hall.all_come(8)
    await finish(hall, callers)
    assert [c.group_id for c in callers] == ["group-c0"] * 4 + ["group-c4"] * 4


async def test_a_group_is_found_by_each_of_its_requests_and_by_its_name() -> None:
    hall = Hall(lengths(9), SHORTEST)
    callers = [hall.come(f"cmpl-{i}-0", name="step 3") for i in range(4)]
    await finish(hall, callers)
    [record] = hall.recorder.records
    assert record.request_ids == ("step 3", "cmpl-0-0", "cmpl-1-0", "cmpl-2-0", "cmpl-3-0")
    provenance = Provenance()
    provenance.group_ended(record)
    for name in ("step 3", "group-cmpl-0-0", "cmpl-2-0", "cmpl-2", "group-cmpl-0"):
        assert provenance.find(name) == [record], name


async def test_lengths_are_remembered_under_the_prompts_key() -> None:
    hall = Hall(lengths(9, 10, 11, 12), SHORTEST)
    await finish(hall, await hall.all_come())
    assert ("prompt", "p") in hall.store.kept


async def test_groups_that_are_sealed_together_are_allocated_together() -> None:
    hall = Hall(lengths(9), POLICIES["adaptive"])
    for number in range(4):
        for prompt in range(9):
            hall.come(f"{prompt}/{number}", f"p{prompt}")
    await finish(hall, hall.callers)
    [batch] = hall.recorder.batches
    assert isinstance(batch, CohortRecord)
    assert (batch.groups, batch.mean_candidates) == (9, 6)


# --- the server stops --------------------------------------------------------


async def test_when_no_other_request_will_come_groups_are_made_of_those_who_are_there() -> None:
    hall = Hall(lengths(9), SHORTEST)
    there = [hall.come("c0"), hall.come("c1")]
    await settle()
    hall.rollouts.joiner.drain()
    late = hall.come("c2")
    await settle()
    await finish(hall, [*there, late])
    assert hall.recorder.started == 3, "more would only make them wait"
    assert all(caller.served for caller in (*there, late))
    assert same_group(there)
    assert late.group_id != there[0].group_id


async def test_an_end_from_outside_reaches_every_caller_with_its_own_error() -> None:
    hall = Hall(lengths(9), SHORTEST)
    callers = [*await hall.all_come(), hall.come("alone")]
    await settle()
    error = ServerStopping("the server is stopping", 30)
    hall.rollouts.fail_all(error)
    assert await finish(hall, callers) == [error] * 5


# --- its caller's trace --------------------------------------------------------


async def test_a_group_belongs_to_the_trace_of_the_caller_that_began_it() -> None:
    """Wherever its end comes from."""
    hall = Hall(lengths(9), SHORTEST)
    callers = []
    for number in range(4):
        token = caller_of.set(From(trace={"traceparent": str(number)}))
        callers.append(hall.come(f"c{number}"))
        caller_of.reset(token)
        await settle()
    await finish(hall, callers)
    assert hall.record("group-c0").trace == {"traceparent": "0"}
