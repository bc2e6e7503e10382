"""Prompts that are carried over from batch to batch, on the scripted engine."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from darts_server.caller import Caller, caller
from darts_server.engine.port import TokenSlice
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineError, InvalidRequest
from darts_server.policy.auto import AutoLimits
from darts_server.policy.shaping import Shaping
from darts_server.policy.survival import Pruning
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, CarriedPrompts, Carry, CarryLimits
from darts_server.rollout.batches.events import BatchDone, GroupResult
from darts_server.rollout.batches.registry import BatchRetention
from darts_server.rollout.batches.run import AnswerFormat
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.types import DiscardReason, Outcome, PromptSpec, Sample
from tests.rollout.batches.streams import (
    GROUPS,
    POLICIES,
    SIZE,
    WHOLE,
    Server,
    finish,
    idempotency_key,
    key,
    new_registry,
    new_server,
    random_script,
    token_stream,
)
from tests.rollout.batches.streams import request as any_request
from tests.rollout.helpers import Harness, Texts

pytestmark = pytest.mark.anyio


def kept(name: str) -> CarriedPrompt:
    return CarriedPrompt(PromptSpec(text=name), (name, name))


def names(prompts: Sequence[CarriedPrompt]) -> list[str | None]:
    return [each.prompt.text for each in prompts]


def take_all(prompts: CarriedPrompts, owner: str | None = None) -> list[CarriedPrompt]:
    return [prompt for _, prompt in prompts.take(owner, (), others=True)]


def test_named_prompts_are_taken_as_often_as_they_are_named() -> None:
    prompts = CarriedPrompts()
    one, two, three = map(kept, "aaa")
    prompts.put(None, [one, kept("c"), two, three, kept("b")])
    assert prompts.take(None, [("x", "x"), ("a", "a"), ("a", "a")], others=False) == [(1, one), (2, two)]
    taken = prompts.take(None, [("b", "b")], others=True)
    assert [(place, prompt.prompt.text) for place, prompt in taken] == [(None, "c"), (None, "a"), (0, "b")]
    assert prompts.count(None) == 0


def test_carried_prompts_are_counted_over_all_callers() -> None:
    prompts = CarriedPrompts(CarryLimits(prompts=2, tokens=25), may_call=lambda owner: owner != "gone")

    def generated(name: str, tokens: int) -> CarriedPrompt:
        candidate: CarriedCandidate[Any] = CarriedCandidate(TokenSlice(range(tokens), None), ((0, tokens),))
        return replace(kept(name), group=CarriedGroup("", False, (), [candidate]))

    prompts.put("a", [generated("1", 10), generated("2", 10)])
    prompts.put("b", [generated("3", 20), kept("4")])
    assert (prompts.num_prompts, prompts.num_tokens) == (4, 40)
    prompts.put("a", [generated("5", 20)])  # the first is dropped, and the second starts again
    assert (prompts.num_prompts, prompts.num_tokens) == (4, 40)
    prompts.put("gone", [generated("6", 5)])
    assert (prompts.num_prompts, prompts.num_tokens) == (4, 40)
    prompts.take("b", [("3", "3")], others=False)
    assert (prompts.num_prompts, prompts.num_tokens) == (3, 20)
    take_all(prompts, "a")
    take_all(prompts, "b")
    assert (prompts.num_prompts, prompts.num_tokens) == (0, 0)


def test_each_caller_has_its_own_prompts_and_the_oldest_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    prompts = CarriedPrompts(CarryLimits(prompts=3))
    prompts.put("one", map(kept, "abc"))
    prompts.put("other", map(kept, "x"))
    prompts.put("one", map(kept, "de"))
    assert "2 prompts" in caplog.text
    assert names(take_all(prompts, "one")) == ["c", "d", "e"]
    assert names(take_all(prompts, "other")) == ["x"]


def test_prompts_are_bounded_in_bytes_with_their_terms_and_candidates() -> None:
    specs = [PromptSpec(text="long " * 4), PromptSpec(token_ids=[1, 2]), PromptSpec(messages=b"[{}]", metadata=b"{}")]
    prompts = CarriedPrompts(CarryLimits(prompt_bytes=sum(spec.size_bytes for spec in specs[1:])))
    prompts.put(None, [CarriedPrompt(spec, ("", "")) for spec in specs])
    assert [each.prompt for each in take_all(prompts)] == specs[1:]
    # It has the sampling parameters in its terms, and may have thousands of candidates.
    group: CarriedGroup[list[int]] = CarriedGroup("terms" * 1000, False, (1,), [CarriedCandidate()] * 1000)
    prompts.limits = CarryLimits(prompt_bytes=505_000)
    for carried, is_kept in ((group, False), (replace(group, terms="terms"), True)):
        prompts.put(None, [CarriedPrompt(PromptSpec(text="a"), ("a", "a"), carried)])
        assert prompts.count(None) == is_kept


def test_prompts_of_callers_that_cannot_take_them_any_more_are_dropped_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    valid: set[str | None] = {"one", "two", "three", None}
    prompts = CarriedPrompts(may_call=lambda name: name in valid)
    for owner, names in {"one": "ab", "two": "c", "three": "d", None: "e"}.items():
        prompts.put(owner, map(kept, names))
    valid -= {"one", "three"}
    prompts.drop_prompts_without_caller()
    assert [(owner, prompt.prompt.text) for owner, prompt in prompts] == [("two", "c"), (None, "e")]
    [message] = caplog.messages
    assert message.startswith("3 prompts that were carried over are dropped: their API key")


request = partial(any_request, carry=Carry.RESTART)
resumed = partial(any_request, carry=Carry.RESUME)


def by_text(text: str, index: int) -> Script:
    """The prompt ``"20"`` has lengths of 20."""
    return Script(int(text))


def decided(done: BatchDone) -> list[str]:
    return [key(result) for result in done.results]


def started(server: Server) -> list[str]:
    return list(dict.fromkeys(candidate.request for candidate in server.engine.started))


@pytest.fixture
async def server() -> Server:
    return new_server(by_text)


async def test_undecided_prompts_start_first_in_the_next_batch_that_has_them(server: Server) -> None:
    done = await server.run(request("30", "10", "20", "31", num_groups=2))
    assert decided(done) == ["10", "20"]
    assert [(u.number, u.carry) for u in done.unfinished] == [(0, Carry.RESTART), (3, Carry.RESTART)]
    assert done.carried == 2
    complete = sum(r.record.generated_tokens for r in done.results if r.record is not None)
    of_all = sum(r.generated_tokens for r in server.harness.recorder.records)
    assert done.generated == of_all >= complete + 2 * SIZE * 20
    server.engine.started.clear()
    done = await server.run(request("50", "31", "11"))
    assert started(server)[0] == "31"
    assert sorted(decided(done)) == ["11", "31", "50"]
    assert done.carried == 1, "30 was not in this batch"


async def test_carried_prompts_follow_those_of_the_request_and_keep_key_and_metadata(server: Server) -> None:
    await server.run(request("30", "10", "40", num_groups=1))
    server.engine.started.clear()
    done = await server.run(request("12", carried=True))
    assert started(server)[:2] == ["30", "40"]
    results = {result.number: result for result in done.results}
    assert [results[n].prompt_key for n in range(3)] == ["key of 12", "key of 30", "key of 40"]
    assert results[2].metadata == b'{"of":"40"}'
    assert done.carried == 0
    with pytest.raises(InvalidRequest) as refused:
        await server.registry.start_or_find(request(carried=True), WHOLE)
    assert refused.value.field == "prompts"


async def test_only_batches_that_carry_over_take_what_was_carried_over(server: Server) -> None:
    await server.run(request("30", "10", num_groups=1))
    done = await server.run(request("30", "10", num_groups=1, carry=Carry.DROP))
    assert (done.carried, [u.carry for u in done.unfinished]) == (1, [Carry.DROP])
    token = caller.set(Caller("another"))
    done = await server.run(request("11"))
    caller.reset(token)
    assert done.carried == 0, "of another caller"
    done = await server.run(request(carry=Carry.DROP, carried=True))
    assert (decided(done), done.carried) == (["30"], 0)


class Picky(Texts):
    """Renders no prompt ``"40"``, and ``"30"`` only for an answer of one token."""

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if prompt.text == "40" or (prompt.text == "30" and sampling.get("max_tokens") != 1):
            raise InvalidRequest("text", f"{prompt.text} is refused")
        return await super().make_request(prompt, {}, size, request_id)


async def test_a_refused_batch_takes_no_prompts_and_a_prompt_that_cannot_be_rendered_is_dropped(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await server.run(request("30", "10", "40", "50", num_groups=1))
    server.registry._renderer = Picky()
    with pytest.raises(InvalidRequest, match="30 is refused"):  # with these parameters
        await server.registry.start_or_find(request("11", carried=True, sampling={"seed": 1}), WHOLE)
    assert server.registry.carried.count(None) == 3
    assert "dropped" not in caplog.text
    short: dict[str, Any] = {"sampling": {"max_tokens": 1}}
    with pytest.raises(InvalidRequest, match="num_groups"):
        await server.registry.start_or_find(request("11", carried=True, num_groups=4, **short), WHOLE)
    assert names([prompt for _, prompt in server.registry.carried]) == ["30", "50"], "they are given back"
    done = await server.run(request("11", carried=True, carry=Carry.DROP, **short))
    assert [(result.number, key(result)) for result in done.results] == [(0, "11"), (1, "30"), (2, "50")]
    assert done.carried == 0
    assert "1 prompts that were carried over are dropped" in caplog.text
    assert "'key of 40': 40 is refused" in caplog.text


@pytest.mark.parametrize("answer", [WHOLE, GROUPS])
async def test_a_cancelled_batch_gives_back_prompts_that_were_not_answered(
    server: Server, answer: AnswerFormat
) -> None:
    await server.run(request("30", "10", "40", num_groups=1))
    batch = await server.registry.start_or_find(request("5", carried=True), answer)
    with batch.listen():
        await server.harness.steps(34)
        assert server.registry.cancel(batch.batch_id)
    await settle()
    done = await server.run(request(carried=True))
    assert sorted(decided(done)) == (["30", "40"] if answer is WHOLE else ["40"])


@pytest.mark.parametrize("seed", range(6))
async def test_every_prompt_is_answered_exactly_once_whatever_happens_to_its_batches(seed: int) -> None:
    """Random batches, of which some are cancelled: then their caller sends its own prompts again."""
    rng = Random(seed)
    harness = Harness(random_script(seed, faults=0.05))
    registry = new_registry(harness, rng.choice(POLICIES), BatchRetention(kept_batches=0))
    waiting, answered, carried = [str(i) for i in range(20)], Counter[str](), 0
    for step in range(500):
        if not waiting and not carried:
            break
        count = rng.randint(0 if carried else 1, 6)
        mine, waiting = waiting[:count], waiting[count:]
        takes = not mine or rng.random() < 0.4
        wanted = request(*mine, num_groups=rng.randint(1, max(1, len(mine))), carried=takes)
        durable = idempotency_key(f"key-{step}") if rng.random() < 0.3 else None
        batch = await registry.start_or_find(wanted, WHOLE, durable)
        with batch.listen():
            for _ in range(rng.choice([1000, 3, 12])):
                if batch.end is not None:
                    break
                await harness.engine.step()
            if batch.end is None:
                registry.cancel(batch.batch_id)
        await asyncio.wait([batch.task])
        if isinstance(batch.end, BatchDone):
            answered.update(decided(batch.end))
            carried = batch.end.carried
            assert carried == registry.carried.count(None)
        else:
            waiting += mine
    assert answered == Counter(str(i) for i in range(20))
    assert not harness.rollouts.runs


def spans(done: BatchDone) -> dict[str, list[tuple[tuple[int, int], ...]]]:
    return {
        key(result): [c.version_spans for c in result.record.selected]
        for result in done.results
        if result.record is not None
    }


async def test_candidates_go_on_from_what_they_had_generated_and_say_with_which_weights(server: Server) -> None:
    done = await server.run(resumed("30", "10", "50", num_groups=1))
    assert decided(done) == ["10"]
    assert done.generated == server.harness.recorder.records[0].generated_tokens, "others count in the next batch"
    assert spans(done)["10"] == [((0, 10),)] * 4
    reasons = {c.reason for r in server.harness.recorder.records[1:] for c in r.candidates}
    assert reasons == {DiscardReason.CARRIED}
    server.engine.weight_version = 1
    server.engine.started.clear()
    begun = server.engine.now
    done = await server.run(resumed("12", carried=True))
    generated = {text: [s[0][1] for s in found] for text, found in spans(done).items()}
    assert generated["12"] == [12] * 4
    [seen] = set(generated["30"])
    assert 10 <= seen < 30
    assert spans(done)["30"] == [((0, seen), (1, 30 - seen))] * 4
    assert server.engine.now - begun <= 50 - seen + 2
    [thirty] = [result for result in done.results if result.prompt_key == "key of 30"]
    assert [list(sample.token_ids) for sample in thirty.samples.values()] == [list(range(30))] * 4
    assert thirty.record is not None
    assert thirty.record.mixed_versions


@pytest.mark.parametrize("answer", [WHOLE, GROUPS, token_stream()])
async def test_no_more_groups_than_requested_are_returned_and_the_others_start_first_in_the_next_batch(
    server: Server, answer: AnswerFormat
) -> None:
    done = await server.run(resumed("10", "10", "10", "30", num_groups=1), answer)
    assert (decided(done), done.carried) == (["10"], 3)
    assert [prompt.error for prompt in done.unfinished] == [None] * 3, "they were not aborted"
    server.engine.weight_version = 1
    begun = server.engine.now
    done = await server.run(resumed("40", num_groups=1, carried=True), answer)
    assert (decided(done), done.carried) == (["10"], 3)
    done = await server.run(resumed(num_groups=1, carried=True), answer)
    assert spans(done) == {"10": [((0, 10),)] * 4}
    assert server.engine.now - begun < 10, "nothing is generated again"
    done = await server.run(resumed(carried=True), answer)
    assert sorted(decided(done)) == ["30", "40"]
    complete = [r.prompt_key for r in server.harness.recorder.records if r.outcome is Outcome.COMPLETED]
    assert Counter(complete) == {"key of 10": 3, "key of 30": 1, "key of 40": 1}, "each is counted once"


async def test_the_record_of_a_surplus_group_counts_the_candidate_that_had_just_finished(server: Server) -> None:
    await server.run(resumed("10", "10", "10", num_groups=1))
    [_, *others] = server.harness.recorder.records
    assert [[c.tokens for c in record.candidates] for record in others] == [[10] * 6] * 2
    [cohort] = server.harness.recorder.cohorts
    assert cohort.new_tokens == 3 * 6 * 10


async def test_a_complete_group_that_is_carried_twice_generates_nothing_new(server: Server) -> None:
    await server.run(resumed("10", "10", "10", num_groups=1))
    server.harness.recorder.records.clear()
    done = await server.run(resumed(num_groups=1, carried=True))
    assert (decided(done), done.carried) == (["10"], 1)
    counts = [(c.tokens, c.resumed) for record in server.harness.recorder.records for c in record.candidates]
    # What has not started by then goes on from nothing.
    assert set(counts) == {(10, 10), (0, 0)}
    assert server.harness.recorder.cohorts[-1].new_tokens == 0


class Unreadable(Texts):
    """Cannot read the first output that is asked for."""

    def __init__(self) -> None:
        self.is_first = True

    async def to_sample(self, output: list[int]) -> Sample:
        if self.is_first:
            self.is_first = False
            raise EngineError("its engine is gone")
        return await super().to_sample(output)


async def test_a_batch_waits_for_another_group_if_a_group_cannot_be_read() -> None:
    server = new_server(by_text, texts=Unreadable())
    done = await server.run(resumed("10", "20", "30", num_groups=1))
    assert [(key(result), result.error is None) for result in done.results] == [("10", False), ("20", True)]
    assert done.carried == 1


async def test_stopped_groups_do_not_continue_if_a_group_cannot_be_read() -> None:
    server = new_server(by_text, texts=Unreadable())
    done = await server.run(resumed("10", "10", "10", num_groups=1))
    assert [(key(result), result.error is None) for result in done.results] == [("10", False)]
    assert done.carried == 2
    done = await server.run(resumed(carried=True))
    assert decided(done) == ["10", "10"]


@pytest.mark.parametrize(
    "change",
    [
        {"carry": Carry.RESTART},
        {"group_size": 5},
        {"policy": {"name": "shortest", "redundancy": 2.0}},
        {"version": 2},
    ],
)
async def test_prompts_start_again_if_their_tokens_do_not_fit_the_batch(server: Server, change: dict[str, Any]) -> None:
    await server.run(resumed("30", "10", num_groups=1))
    server.engine.weight_version = int(str(change.pop("version", 0)))
    if "policy" in change:
        planner = Planner({"shortest": Shaping(redundancy=2.0, num_longest=0)}, "shortest", Limits(64))
        server.harness.rollouts.planner = planner
    server.engine.started.clear()
    done = await server.run(replace(resumed("30"), **change))
    assert set(spans(done)["30"]) == {((server.engine.weight_version, 30),)}


@pytest.mark.parametrize("suspended", [False, True])
async def test_prompts_start_again_if_their_tokens_become_too_old_while_they_wait(
    server: Server, suspended: bool
) -> None:
    server.registry.carried.limits = CarryLimits(staleness=0)
    await server.run(resumed("30", "10", num_groups=1))
    if suspended:
        await server.harness.rollouts.suspend()
    else:
        server.harness.rollouts.gate.close()
    batch = await server.registry.start_or_find(resumed(carried=True), WHOLE)
    with batch.listen():
        await settle()
        server.engine.weight_version = 1
        server.harness.rollouts.resume()
        server.harness.rollouts.gate.open()
        await settle()
        await server.engine.run()
        assert set(spans(await batch.wait())["30"]) == {((1, 30),)}


async def test_only_the_resumed_group_returns_trajectories_of_a_stopped_group() -> None:
    """Also to a caller that streams tokens, who gets trajectories early otherwise."""
    server = new_server(lambda text, index: Script(int(text) + (0 if index < 3 else 30)))
    done = await server.run(resumed("5", "4", num_groups=1), token_stream())
    assert decided(done) == ["4"]
    recorder = server.harness.recorder
    [stopped] = [record for record in recorder.records if record.outcome is Outcome.CANCELLED]
    assert {(c.reason, c.selected_as) for c in stopped.candidates} == {(DiscardReason.CARRIED, None)}
    assert len(recorder.returned) == SIZE
    await server.run(resumed(carried=True), token_stream())
    assert len(recorder.returned) == 2 * SIZE


@pytest.mark.parametrize("seed", [(1,), None])
async def test_a_seeded_group_with_a_failed_candidate_starts_again(
    seed: tuple[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are counted anew without it, and would share random numbers with those that replace it.

    What they had generated counts in the batch that stopped them then.
    """
    monkeypatch.setattr(Texts, "tail_seed", lambda *_: seed)
    failure = CandidateFailed("broken")
    server = new_server(lambda text, i: Script(3, error=failure) if (text, i) == ("30", 0) else Script(int(text)))
    done = await server.run(resumed("30", "10", num_groups=1))
    assert (decided(done), done.carried) == (["10"], 1)
    counted = sum(c.tokens for record in server.harness.recorder.records for c in record.candidates)
    assert (done.generated == counted) is (seed is not None)
    assert counted > 100
    server.engine.weight_version = 1
    [found] = set(spans(await server.run(resumed(carried=True)))["30"])
    assert [version for version, _ in found] == ([0, 1] if seed is None else [1])


async def test_prompts_of_earlier_batches_are_older_than_those_of_later_ones(server: Server) -> None:
    server.registry.carried.limits = CarryLimits(prompts=2)
    await server.run(resumed("40", "30", "10", num_groups=1))
    await server.run(resumed("70", "12", num_groups=1, carried=True))
    assert names(server.registry.carried._prompts_by_owner[None]) == ["30", "70"]
    batch = await server.registry.start_or_find(resumed("30"), WHOLE)
    server.registry.cancel(batch.batch_id)
    await asyncio.wait([batch.task])
    assert names(server.registry.carried._prompts_by_owner[None]) == ["30", "70"], "as it was"


def test_beyond_the_limit_of_tokens_the_oldest_prompts_start_again() -> None:
    def generated(name: str, tokens: int) -> CarriedPrompt:
        candidate: CarriedCandidate[list[int]] = CarriedCandidate(TokenSlice(range(tokens), None), ((0, tokens),))
        return replace(kept(name), group=CarriedGroup("", False, (1,), [candidate]))

    prompts = CarriedPrompts(CarryLimits(tokens=10))
    prompts.put(None, [generated("a", 4), kept("b"), generated("c", 4), generated("d", 5)])
    assert [each.group is None for each in take_all(prompts)] == [True, True, False, False]


def auto_server(script: Callable[[str, int], Script], most_stale: float) -> Server:
    server = new_server(script)
    server.harness.rollouts.planner = Planner({}, "auto", Limits(64), AutoLimits(most_stale=most_stale))
    return server


async def test_groups_that_are_wholly_of_older_weights_count_as_stale() -> None:
    # All answers end in the same step, so half of the groups are complete when their batch has enough.
    server = auto_server(lambda *_: Script(20), most_stale=0.5)
    await server.run(resumed("a", "b", "c", "d", num_groups=2))
    server.engine.weight_version += 1
    done = await server.run(resumed(num_groups=2, carried=True))
    tokens = [span for each in spans(done).values() for found in each for span in found]
    stale = sum(n for version, n in tokens if version == 0)
    assert stale == sum(n for _, n in tokens) > 0
    assert server.harness.recorder.cohorts[-1].stale_tokens == stale


async def test_auto_runs_fewer_prompts_ahead_where_too_many_tokens_are_of_older_weights() -> None:
    server, ran, stale = auto_server(by_text, most_stale=0.2), list[int](), list[float]()
    batch = resumed(*map(str, range(20, 44)), num_groups=12)
    for step in range(12):
        server.engine.started.clear()
        done = await server.run(batch)
        ran.append(len(started(server)))
        tokens = [span for each in spans(done).values() for found in each for span in found]
        stale.append(sum(n for version, n in tokens if version != step) / sum(n for _, n in tokens))
        assert len(done.results) == 12
        server.engine.weight_version += 1
        new = [str(20 + (7 * step + place) % 24) for place in range(24 - done.carried)]
        batch = resumed(*new, num_groups=12, carried=True)
    assert ran[0] == 24, "nothing is known"
    assert min(ran) < 18
    assert sum(stale[4:]) / len(stale[4:]) == pytest.approx(0.2, abs=0.08)
    chosen = server.harness.recorder.records[-1].auto_choice
    assert chosen is not None
    assert "prompts run, and the first 12 groups are returned" in chosen


async def test_a_waiting_prompt_starts_in_place_of_a_failed_prompt() -> None:
    broken = CandidateFailed("broken")
    server = auto_server(lambda prompt, _: Script(5, error=broken if prompt == "7" else None), most_stale=0.0)
    done = await server.run(resumed("7", "10", "11", "12", num_groups=2))
    assert [result.error is None for result in done.results].count(True) == 2
    assert (len(done.results), done.carried) == (3, 1)


@pytest.mark.parametrize("turns", range(6))
async def test_a_cohort_ends_once_if_its_batch_is_cancelled_while_groups_are_stopped(turns: int) -> None:
    server = auto_server(by_text, most_stale=0.0)
    batch = await server.begin(3, "20", "21", "22", "23", carry=Carry.RESUME, num_groups=2)
    assert len(started(server)) == 2
    batch.cancel("left")
    for _ in range(turns):
        await asyncio.sleep(0)
    batch.task.cancel()
    await settle()
    assert len(server.harness.recorder.cohorts) == 1
    assert len(server.harness.rollouts.runs) == server.harness.rollouts.admission.unanswered_requests == 0


async def test_a_policy_that_prunes_does_not_resume(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner({"arrol": Shaping(pruning=Pruning())}, "arrol", Limits(64))
    server.harness.rollouts.planner = planner
    monkeypatch.setattr(Rollouts, "can_score", True)
    with pytest.raises(InvalidRequest, match="depend on more than lengths") as refused:
        await server.registry.start_or_find(resumed("10"), WHOLE)
    assert refused.value.field == "carry"


@pytest.mark.parametrize("seed", range(5))
async def test_carried_groups_equal_groups_that_were_not_stopped(seed: int) -> None:
    """Whatever the policy: the same trajectories, each with all of its tokens, generated once."""
    policy = ["shortest", "sampled", "longest", "darts", "off"][seed % 5]
    texts = [str(i) for i in range(8)]
    script = random_script(seed, faults=0.0)
    whole = await new_server(script, policy).run(resumed(*texts))
    server = new_server(script, policy)
    answered: dict[str, GroupResult] = {}
    done = await server.run(resumed(*texts, num_groups=1))
    while True:
        for result in done.results:
            assert result.prompt_key not in answered
            answered[result.prompt_key] = result
        if not done.carried:
            break
        done = await server.run(resumed(num_groups=1, carried=True))
    for result in whole.results:
        other = answered[result.prompt_key]
        assert {i: list(s.token_ids) for i, s in other.samples.items()} == {
            i: list(s.token_ids) for i, s in result.samples.items()
        }
        assert result.record is not None
        assert other.record is not None
        assert [c.weight for c in other.record.selected] == [c.weight for c in result.record.selected]
        assert [c.version_spans for c in other.record.selected] == [((0, c.tokens),) for c in other.record.selected]


async def test_a_batch_that_runs_when_its_key_is_removed_ends_and_keeps_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    valid = {"one"}
    server = new_server(by_text, may_call=lambda name: name in valid)
    token = caller.set(Caller("one"))
    batch = await server.begin(5, "30", "10", num_groups=1, carry=Carry.RESUME)
    caller.reset(token)
    valid.clear()
    server.registry.carried.drop_prompts_without_caller()
    done = await finish(server.harness, batch)
    assert (len(done.results), done.carried, list(server.registry.carried)) == (1, 0, [])
    assert "1 prompts that were carried over are dropped" in caplog.text
