"""Batches whose groups are aborted from outside, on the scripted engine."""

import asyncio
from collections import Counter
from random import Random

import pytest

from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine, settle
from darts_server.exceptions import GroupAborted
from darts_server.rollout.batches.carried import Carry, CarryLimits
from darts_server.rollout.batches.events import BatchDone, CandidateDiscarded, GroupResult, TrajectorySelected
from darts_server.types import DiscardReason, FinishReason, Outcome
from tests.rollout.batches.streams import (
    POLICIES,
    SIZE,
    WHOLE,
    Server,
    batch_request,
    begin,
    by_candidate,
    by_text,
    finish,
    key,
    lengths_of,
    new_registry,
    new_server,
    play,
    random_script,
    read_events,
    request,
    token_stream,
)
from tests.rollout.helpers import Harness, Texts

pytestmark = pytest.mark.anyio

ABORTED = "the request was aborted while its group was running"
NIGHTLY = pytest.mark.nightly


@pytest.fixture
async def server() -> Server:
    return new_server(by_text)


async def test_groups_that_are_aborted_return_what_their_candidates_had_generated(server: Server) -> None:
    batch = await server.begin(11, "5", "30", "10")
    server.harness.rollouts.prepare_weight_change()
    server.engine.weight_version = 1
    await server.engine.step()
    server.harness.rollouts.abort_all("an update")
    done = await finish(server.harness, batch)
    results = {key(result): result for result in done.results}
    assert (results["5"].error, results["5"].aborted, len(results["5"].samples)) == (None, None, SIZE)
    assert lengths_of(results["30"]) == dict.fromkeys(range(6), 12)
    assert lengths_of(results["10"]) == {0: 10, 1: 11, 2: 12, 3: 12, 4: 12, 5: 12}, "three have finished"
    for result in (results["30"], results["10"]):
        assert isinstance(result.error, GroupAborted)
        assert str(result.error) == "an update"
        assert result.samples == {}
        assert result.record is not None
        assert (result.record.outcome, result.record.error) == (Outcome.CANCELLED, "an update")
        assert {c.reason for c in result.record.candidates} == {DiscardReason.ABORTED}
        assert result.record.selected == []
    assert results["30"].aborted is not None
    one = results["30"].aborted[2]
    assert (list(one.sample.token_ids), one.sample.logprobs) == (list(range(12)), [-t / 8 for t in range(12)])
    assert one.version_spans == ((0, 11), (1, 1))
    assert done.generated == sum(record.generated_tokens for record in server.harness.recorder.records)
    assert done.unfinished == []
    assert len(server.harness.rollouts.runs) == len(server.engine.running) == 0


@pytest.mark.parametrize("fails_in_start", [True, False])
async def test_a_group_that_cannot_start_fails_alone_and_its_cohort_ends(
    fails_in_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tail_seed(_: Texts, text: str) -> tuple[int, ...]:
        if text != "30":
            return (1,)
        if fails_in_start:
            # Not a seed of numpy.
            return (-1,)
        raise ZeroDivisionError

    monkeypatch.setattr(Texts, "tail_seed", tail_seed)
    server = new_server(by_text)
    done = await server.run(request("5", "30"))
    errors = {key(result): type(result.error) for result in done.results}
    assert errors == {"5": type(None), "30": ValueError if fails_in_start else ZeroDivisionError}
    rollouts = server.harness.rollouts
    assert len(server.harness.recorder.cohorts) == 1
    assert (len(rollouts.runs), rollouts.gate.work_inside) == (0, 0)
    assert (rollouts.admission.not_in_engine, rollouts.admission.unanswered_requests) == (0, 0)


class BreakingCandidate(ScriptedCandidate):
    """Number 2 of its group breaks when it is stopped."""

    def stop(self) -> int:
        if self.index == 2:
            self.fail(ZeroDivisionError("a bug in an adapter"))
        return super().stop()


class Breaking(ScriptedEngine):
    candidate_type = BreakingCandidate


async def test_a_candidate_that_fails_while_its_group_is_aborted_is_missing_alone() -> None:
    harness = Harness(by_text, engine=Breaking)
    batch = await begin(harness, new_registry(harness, "shortest"), request("20"), 9)
    harness.rollouts.abort_all("now")
    [result] = (await finish(harness, batch)).results
    assert str(result.error) == "now"
    assert lengths_of(result) == dict.fromkeys([0, 1, 3, 4, 5], 9)


@pytest.mark.parametrize("carry", [Carry.DROP, Carry.RESUME])
async def test_a_group_that_was_aborted_says_why_also_if_enough_others_are_complete_before_it_has_ended(
    server: Server, carry: Carry
) -> None:
    server.engine.stop_lag = 200
    batch = await server.begin(6, "5", "30", num_groups=1, carry=carry)
    server.harness.rollouts.abort(f"{batch.batch_id}-1")
    done = await finish(server.harness, batch)
    assert [(key(result), result.error) for result in done.results] == [("5", None)]
    assert [(u.number, u.carry, str(u.error)) for u in done.unfinished] == [(1, carry, ABORTED)]


async def test_a_token_stream_discards_candidates_of_an_aborted_group_and_returns_them_in_the_group() -> None:
    """Also those that were known to belong to it."""
    harness = Harness(lambda text, index: Script([4, 6, 40, 50, 60, 70][index]))
    batch = await new_registry(harness, "shortest").start_or_find(request("9"), token_stream(1))
    listening = asyncio.create_task(read_events(batch))
    await settle()
    await harness.steps(20)
    harness.rollouts.abort_all("now")
    candidates = by_candidate(await play(harness, listening))
    assert isinstance(batch.end, BatchDone)
    [result] = batch.end.results
    assert lengths_of(result) == {0: 4, 1: 6, 2: 20, 3: 20, 4: 20, 5: 20}
    ends = [candidates[f"{result.group_id}:{index}"].end for index in range(6)]
    assert [isinstance(end, TrajectorySelected) for end in ends] == [True, True, False, False, False, False]
    reasons = [end.reason for end in ends if isinstance(end, CandidateDiscarded)]
    assert reasons == [DiscardReason.ABORTED] * 4
    assert len(harness.recorder.returned) == 2


@pytest.mark.parametrize("carry", [Carry.RESTART, Carry.RESUME])
@pytest.mark.parametrize("everything", [False, True])
async def test_prompts_that_are_carried_over_are_kept_and_say_why(
    server: Server, carry: Carry, everything: bool
) -> None:
    batch = await server.begin(15, "30", "10", "31", carry=carry)
    if everything:
        server.harness.rollouts.abort_all("an update")
    else:
        server.harness.rollouts.abort(f"{batch.batch_id}-0")
    done = await finish(server.harness, batch)
    aborted = [0, 2] if everything else [0]
    assert [key(r) for r in done.results] == (["10"] if everything else ["10", "31"])
    assert [r.error for r in done.results if r.error is not None] == []
    assert [(u.number, u.carry) for u in done.unfinished] == [(number, carry) for number in aborted]
    assert all(isinstance(u.error, GroupAborted) for u in done.unfinished)
    assert done.carried == len(aborted)
    reasons = {c.reason for r in server.harness.recorder.records if r.error is not None for c in r.candidates}
    resumes = carry is Carry.RESUME
    assert reasons == {DiscardReason.CARRIED if resumes else DiscardReason.CANCELLED}
    counted = sum(record.generated_tokens for record in server.harness.recorder.records)
    assert done.generated == counted
    server.engine.weight_version = 1
    later = await finish(server.harness, await server.begin(0, carry=carry, carried=True))
    spans = {key(r): r.record.selected[0].version_spans for r in later.results if r.record is not None}
    assert spans["30"] == (((0, 15), (1, 15)) if resumes else ((1, 30),))
    assert len(later.results) == len(aborted)
    assert all(len(result.samples) == SIZE for result in later.results)
    total = sum(record.generated_tokens for record in server.harness.recorder.records)
    assert done.generated + later.generated == total, "each token is counted once"


async def test_a_prompt_that_waits_for_its_restart_is_kept_and_starts_again(server: Server) -> None:
    batch = await server.begin(15, "30", carry=Carry.RESUME)
    await server.harness.rollouts.suspend()
    server.harness.rollouts.abort_all("now")
    server.harness.rollouts.resume()
    done = await finish(server.harness, batch)
    assert (done.results, done.carried) == ([], 1)
    later = await finish(server.harness, await server.begin(0, carry=Carry.RESUME, carried=True))
    [result] = later.results
    assert result.record is not None
    assert {c.version_spans for c in result.record.selected} == {((0, c.tokens),) for c in result.record.selected}


async def test_an_aborted_group_does_not_count_for_num_groups(server: Server) -> None:
    batch = await server.begin(3, "5", "30", "20", num_groups=1)
    server.harness.rollouts.abort(f"{batch.batch_id}-0")
    done = await finish(server.harness, batch)
    assert [(key(r), len(r.samples)) for r in done.results] == [("5", 0), ("20", SIZE)]
    assert [u.number for u in done.unfinished] == [1]
    assert done.unfinished[0].error is None


def check(result: GroupResult) -> None:
    """Check that a group is whole, or says that it is not."""
    record = result.record
    if result.error is None:
        assert result.aborted is None
        assert len(result.samples) == SIZE
        assert record is not None
        assert record.outcome is Outcome.COMPLETED
        assert [c.index for c in record.selected] == list(result.samples)
        assert all(c.finish_reason is not None for c in record.selected)
    else:
        assert result.samples == {}
    for index, aborted in (result.aborted or {}).items():
        tokens = list(aborted.sample.token_ids)
        assert tokens == list(range(len(tokens)))
        assert sum(count for _, count in aborted.version_spans) == len(tokens)
        assert record is not None
        candidate = record.candidates[index]
        assert candidate.reason is DiscardReason.ABORTED or candidate.selected_as is not None
        if candidate.finish_reason is not None:
            assert len(tokens) == candidate.tokens


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=NIGHTLY) for seed in range(8, 200))])
async def test_random_aborts_lose_no_prompt_and_complete_no_incomplete_group(seed: int) -> None:
    rng = Random(seed)
    harness = Harness(random_script(seed, faults=0.05))
    harness.engine.stop_lag = rng.choice([0, 0, 3])
    harness.engine.drafts_from_siblings = seed % 2 == 1
    registry = new_registry(harness, rng.choice(POLICIES))
    registry.carried.limits = rng.choice([CarryLimits(), CarryLimits(staleness=0)])
    waiting, answered, generated, carried = [str(i) for i in range(10)], Counter[str](), 0, 0
    for _ in range(200):
        if not waiting and not carried:
            break
        carry = rng.choice(list(Carry))
        count = rng.randint(0 if carried else 1, 6)
        mine, waiting = waiting[:count], waiting[count:]
        takes = not mine or rng.random() < 0.4
        answer = rng.choice([WHOLE, token_stream(2)])
        batch = await registry.start_or_find(request(*mine, carry=carry, carried=takes), answer)
        batch.listeners += 1
        reading = None if batch.feed is None else asyncio.create_task(read_events(batch))
        while batch.end is None:
            match rng.randrange(30):
                case 0:
                    harness.rollouts.abort_all("a sweep")
                case 1:
                    harness.rollouts.abort(f"{batch.batch_id}-{rng.randrange(6)}")
                case 2:
                    suspending = asyncio.create_task(harness.rollouts.suspend())
                    await settle()
                    if rng.random() < 0.5:
                        harness.rollouts.abort_all("a sweep in a pause")
                    while not suspending.done():  # groups of which some was delivered go on
                        await harness.engine.step()
                    harness.engine.weight_version += 1
                    harness.rollouts.resume()
                case 3:
                    harness.rollouts.prepare_weight_change()
                    harness.engine.weight_version += 1
                case _:
                    await harness.engine.step()
        if reading is not None:
            by_candidate(await reading)
        assert isinstance(batch.end, BatchDone)
        done, size = batch.end, batch.size
        numbers = sorted([*(r.number for r in done.results), *(u.number for u in done.unfinished)])
        assert numbers == list(range(size))
        assert all(u.carry is carry and u.error is not None for u in done.unfinished)
        for result in done.results:
            check(result)
            if isinstance(result.error, GroupAborted) and result.aborted is not None:
                waiting.append(key(result))
            else:
                answered[key(result)] += 1
        generated, carried = generated + done.generated, done.carried
    assert answered == Counter(str(i) for i in range(10))
    await settle()
    await harness.engine.run()
    assert not harness.rollouts.runs
    records = harness.recorder.records
    assert len({record.group_id for record in records}) == len(records), "each group ends once"
    assert harness.recorder.started == sum(len(record.candidates) for record in records)
    for candidate in [c for record in records for c in record.candidates]:
        assert (candidate.reason is None) == (candidate.selected_as is not None)
    kept = [c.tokens for r in records for c in r.candidates if c.reason is DiscardReason.CARRIED]
    again = sum(record.generated_tokens for record in records)
    # What is kept of a candidate has the tokens until it answered, and its record those until it was stopped.
    late = harness.engine.stop_lag * len(kept)
    assert again <= generated <= again + sum(kept) + late


@pytest.mark.parametrize(("policy", "expected"), [("off", "short"), ("shortest", "fill")])
async def test_a_truncated_trajectory_takes_no_place_of_another_in_a_group_that_is_not_shaped(
    policy: str, expected: str
) -> None:
    server = new_server(lambda _, index: Script(5 + index, finish_reason=FinishReason.LENGTH), policy)
    batch = await server.registry.start_or_find(batch_request(1), WHOLE)
    with batch.listen():
        [result] = (await finish(server.harness, batch)).results
    assert result.record is not None
    assert {candidate.selected_as for candidate in result.record.selected} == {expected}
    assert [candidate.weight for candidate in result.record.selected] == ([1.0] * 4 if policy == "off" else [None] * 4)
