"""Batches whose candidates are verified while their groups run, on the scripted engine."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from math import fsum
from random import Random
from typing import Any

import pytest

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import Script, settle
from darts_server.estimates.reward_stats import RewardStats
from darts_server.exceptions import CandidateFailed, DartsError, GroupAborted, InvalidRequest, QuotaReached
from darts_server.group.informative import FLOOR, compute_advantages
from darts_server.http.resources.rollouts_models import GroupOut
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.carried import Carry, CarryLimits
from darts_server.rollout.batches.events import BatchDone, CandidateDiscarded, GroupResult, TrajectorySelected
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.learned.statistics import Rewards
from darts_server.rollout.observers.reward_matching import Reward, RewardMatcher
from darts_server.rollout.plan import Limits, Planner
from darts_server.serving.admission import Admission, AdmissionLimits
from darts_server.types import GONE, DiscardReason, Outcome, PromptSpec
from darts_server.verify.types import NO_VERDICT, Answer, Verdict
from tests.rollout.batches.streams import (
    GROUPS,
    SIZE,
    WHOLE,
    Server,
    by_candidate,
    by_text,
    finish,
    key,
    new_registry,
    play,
    random_script,
    read_events,
    request,
    token_stream,
)
from tests.rollout.helpers import Harness, Texts

pytestmark = pytest.mark.anyio

Judgement = Callable[[Answer], float | None]


class Judge:
    """A verifier whose verdicts tests may hold back."""

    names = ("length", "other")

    def __init__(self, judge: Judgement) -> None:
        self.judge = judge
        self.answers: list[Answer] = []
        self.chosen: list[Sequence[str]] = []
        self.pending = 0
        self.open = asyncio.Event()
        self.open.set()

    async def verify(self, answer: Answer, names: Sequence[str] = ()) -> Verdict:
        self.answers.append(answer)
        self.chosen.append(names)
        self.pending += 1
        try:
            await self.open.wait()
        finally:
            self.pending -= 1
        reward = self.judge(answer)
        return NO_VERDICT if reward is None else Verdict(reward, reward > 0)


def is_third(answer: Answer) -> float:
    """Reward answers whose length is a multiple of three."""
    return float(len(answer.token_ids) % 3 == 0)


def verifying(
    judge: Judgement, policy: str = "informative", script: Callable[[str, int], Script] = by_text, **more: Any
) -> tuple[Server, Judge]:
    verifier = Judge(judge)
    harness = Harness(script, verifier=verifier)
    return Server(harness, new_registry(harness, policy, **more)), verifier


def rewards_of(result: GroupResult) -> dict[int, float | None]:
    return {index: verdict.reward for index, verdict in result.verdicts.items()}


def assert_idle(server: Server, judge: Judge) -> None:
    rollouts = server.harness.rollouts
    assert (len(rollouts.runs), rollouts.gate.work_inside) == (0, 0)
    assert (rollouts.admission.unanswered_requests, rollouts.admission.not_in_engine) == (0, 0)
    assert len(server.engine.running) == 0
    assert judge.pending == 0, "no verification outlives its batch"


# --- informative --------------------------------------------------------------


async def test_a_group_returns_a_weighted_sample_of_candidates_that_all_ran_to_their_end() -> None:
    server, judge = verifying(is_third)
    [result] = (await server.run(request("20"))).results
    record = result.record
    assert record is not None
    # Lengths 20 to 27: three candidates are right.
    expected = {index: float((20 + index) % 3 == 0) for index in range(8)}
    assert rewards_of(result) == expected
    assert [c.tokens for c in record.candidates] == list(range(20, 28))
    assert (record.num_rewarded, result.zero_variance, record.decided_early) == (8, False, False)
    assert sum(expected[index] for index in result.samples) == 2, "half of them are right"
    advantages = dict(zip(expected, compute_advantages(list(expected.values())), strict=True))
    for c in record.selected:
        assert c.advantage == advantages[c.index]
        assert (c.reward, c.correct) == (expected[c.index], expected[c.index] > 0)
        assert c.weight == (3 / 2 if c.correct else 5 / 2)
    assert fsum(c.weight or 0 for c in record.selected) == 8
    assert Counter(c.reason for c in record.candidates) == {None: 4, DiscardReason.NOT_SAMPLED: 4}
    assert {answer.prompt.metadata for answer in judge.answers} == {b'{"of":"20"}'}
    assert_idle(server, judge)

    answer = GroupOut.of(result)
    assert [t.advantage for t in answer.trajectories] == [advantages[i] for i in sorted(result.samples)]
    assert {d.reward for d in answer.discarded} == {0.0, 1.0}
    assert (answer.zero_variance, answer.num_rewarded, answer.decided_early) == (False, 8, False)


async def test_candidates_without_rewards_fill_up_a_group() -> None:
    server, judge = verifying(lambda answer: None if len(answer.token_ids) > 22 else 1.0)
    [result] = (await server.run(request("20"))).results
    assert result.record is not None
    assert {0, 1, 2} <= result.samples.keys()
    assert len(result.samples) == SIZE
    assert (result.record.num_rewarded, result.zero_variance) == (3, True)
    assert {c.advantage for c in result.record.selected} == {0.0}
    assert GroupOut.of(result).trajectories[-1].reward is None
    assert_idle(server, judge)


async def test_a_verifier_that_gives_no_reward_ends_no_group() -> None:
    def fail(_: Answer) -> float:
        raise ZeroDivisionError

    for judgement in (lambda _: None, fail):
        server, judge = verifying(judgement)
        [result] = (await server.run(request("20"))).results
        assert (result.error, len(result.samples), result.zero_variance) == (None, SIZE, None)
        assert set(rewards_of(result).values()) == {None}
        assert_idle(server, judge)


async def test_a_slow_verdict_delays_its_own_group_alone() -> None:
    server, judge = verifying(is_third)
    slow = asyncio.Event()
    verify = judge.verify

    async def verify_slowly(answer: Answer, names: Sequence[str] = ()) -> Verdict:
        if answer.prompt.text == "5":
            await slow.wait()
        return await verify(answer, names)

    judge.verify = verify_slowly  # type: ignore[method-assign]
    run = await server.registry.start_or_find(request("5", "20"), GROUPS)
    listening = asyncio.create_task(read_events(run))
    await settle()
    await server.engine.run()
    await settle()
    assert run.end is None
    assert not server.engine.running
    slow.set()
    events = [event for _, event in await listening]
    assert [key(event) for event in events if isinstance(event, GroupResult)] == ["20", "5"]
    assert_idle(server, judge)


@pytest.mark.parametrize(("policy", "fields"), [("informative", {}), ("off", {"only": "informative"})])
async def test_a_group_that_waits_for_verdicts_alone_has_no_share_of_the_engine(
    policy: str, fields: dict[str, Any]
) -> None:
    server, judge = verifying(is_third, policy)
    rollouts = server.harness.rollouts
    # Only one batch of the key fits on the engine at the same time.
    candidates = 2 * SIZE if policy == "informative" else SIZE
    rollouts.admission = Admission(
        lambda: server.engine.unfinished_requests, 64, AdmissionLimits(max_per_caller=candidates)
    )
    caller.set(Caller("trainer"))
    judge.open.clear()
    first = await server.begin(0, "20", **fields)
    assert rollouts.admission.candidates_by_key == {"trainer": candidates}
    with pytest.raises(QuotaReached):
        await server.begin(0, "5", **fields)
    await server.engine.run()
    await settle()
    assert first.end is None
    assert rollouts.admission.candidates_by_key == {}
    second = await server.begin(0, "5", **fields)
    judge.open.set()
    for run in (first, second):
        [result] = (await finish(server.harness, run)).results
        assert len(result.samples) == SIZE
    assert rollouts.admission.candidates_by_key == {}
    assert_idle(server, judge)


async def test_the_same_seed_samples_the_same_candidates() -> None:
    results = []
    for _ in range(2):
        server, _ = verifying(is_third)
        [result] = (await server.run(request("20"))).results
        results.append(sorted(result.samples))
    assert results[0] == results[1]


# --- other policies -----------------------------------------------------------


@pytest.mark.parametrize("policy", ["off", "sampled", "shortest", "cut"])
async def test_under_every_policy_finished_candidates_have_rewards(policy: str) -> None:
    server, judge = verifying(is_third, policy)
    judge.open.clear()
    run = await server.begin(0, "20")
    await settle()
    await server.engine.run()
    assert run.end is None, "the answer waits for the verdicts of its trajectories"
    judge.open.set()
    [result] = (await run.wait()).results
    assert result.record is not None
    assert result.record.num_rewarded is None
    answer = GroupOut.of(result)
    for t in answer.trajectories:
        assert t.reward == float(t.length % 3 == 0)
        assert t.correct == (t.reward > 0)
        assert t.advantage is None
    assert answer.zero_variance is (len({t.reward for t in answer.trajectories}) == 1)
    for candidate in result.record.candidates:
        has_finished = candidate.finish_reason is not None
        assert (candidate.index in result.verdicts) == has_finished
    assert_idle(server, judge)


async def test_the_verdict_on_a_cut_candidate_is_about_its_first_tokens() -> None:
    lengths = [3, 4, 5, 6, 40, 50]
    server, judge = verifying(is_third, "cut", lambda text, index: Script(lengths[(index + int(text)) % 6]))
    done = await server.run(request(*map(str, range(12))))
    cut = 0
    for result in done.results:
        assert result.record is not None
        for c in result.record.selected:
            assert rewards_of(result)[c.index] == float(c.tokens % 3 == 0)
            cut += c.cut
    assert cut
    assert not {40, 50} & {len(answer.token_ids) for answer in judge.answers}
    assert_idle(server, judge)


async def test_without_a_verifier_answers_have_no_rewards() -> None:
    harness = Harness(by_text)
    server = Server(harness, new_registry(harness, "shortest"))
    [result] = (await server.run(request("20"))).results
    answer = GroupOut.of(result)
    assert answer.zero_variance is answer.num_rewarded is None
    assert {(t.reward, t.correct, t.advantage) for t in answer.trajectories} == {(None, None, None)}
    assert {(d.reward, d.correct) for d in answer.discarded} == {(None, None)}


async def test_a_batch_and_a_prompt_choose_their_verifiers() -> None:
    server, judge = verifying(is_third, "off")
    specs = [PromptSpec(text="3"), PromptSpec(text="4", verifier=["length"]), PromptSpec(text="5", verifier=())]
    for chosen, expected in ((None, []), (["other"], ["other"])):
        batch = request()
        done = await server.run(type(batch)(specs, SIZE, verifier=chosen))
        assert [bool(result.verdicts) for result in sorted(done.results, key=lambda r: r.number)] == [
            True,
            True,
            False,
        ]
        names = {answer.prompt.text: list(names) for answer, names in zip(judge.answers, judge.chosen, strict=True)}
        assert names == {"3": expected, "4": ["length"]}
        judge.answers.clear()
        judge.chosen.clear()
    done = await server.run(request("3", verifier=()))
    assert done.results[0].verdicts == {}


@pytest.mark.parametrize(
    ("policy", "fields", "message"),
    [
        ("off", {"verifier": ["length", "what"]}, r"verifier: has 'what', .* choose from length, other"),
        ("informative", {"verifier": ()}, "verifier: must not be false, because 'policy' needs rewards"),
        ("off", {"verifier": (), "only": "informative"}, "verifier: must not be false, because 'only' needs rewards"),
        ("off", {"stop_when": "decided"}, "stop_when: needs a policy that selects by rewards, and 'off' does not"),
        (
            "off",
            {"only": "informative", "num_groups": 2, "max_prompts": 1},
            "max_prompts: must be at least .* 2, got 1",
        ),
    ],
)
async def test_fields_that_do_not_fit_are_refused(policy: str, fields: dict[str, Any], message: str) -> None:
    server, judge = verifying(is_third, policy)
    with pytest.raises(InvalidRequest, match=message):
        await server.run(request("3", "4", **fields))
    assert_idle(server, judge)


@pytest.mark.parametrize(
    ("policy", "fields", "message"),
    [
        ("informative", {}, "^policy: needs rewards .* start it with --verifier"),
        ("off", {"only": "informative"}, "^only: needs rewards"),
        ("off", {"verifier": ["length"]}, "^verifier: has 'length', .* start the server with --verifier"),
    ],
)
async def test_without_a_verifier_batches_that_need_rewards_are_refused(
    policy: str, fields: dict[str, Any], message: str
) -> None:
    harness = Harness(by_text)
    server = Server(harness, new_registry(harness, policy))
    with pytest.raises(InvalidRequest, match=message):
        await server.run(request("3", **fields))


async def test_a_prompt_that_names_an_unknown_verifier_is_named() -> None:
    server, _ = verifying(is_third, "off")
    batch = type(request())([PromptSpec(text="3"), PromptSpec(text="4", verifier=["what"])], SIZE)
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]\.verifier: has 'what'"):
        await server.run(batch)


# --- rewards are learned ------------------------------------------------------


async def test_rewards_are_learned_and_a_reported_reward_replaces_them() -> None:
    server, _ = verifying(is_third, "off")
    harness = server.harness
    rewards = Rewards(harness.store)
    matcher = RewardMatcher(rewards, lambda *_: None, lambda *_: None)
    events = harness.rollouts.observers
    events.trajectory_returned.add(matcher.trajectory_returned)
    events.trajectory_verified.add(matcher.trajectory_verified)
    events.group_ended.add(matcher.group_ended)
    [result] = (await server.run(request("20"))).results
    # Lengths 20 to 23: one is right.
    stats = rewards.prompts.load(result.prompt_key)
    assert stats is not None
    assert (stats.right.count, stats.wrong.count, stats.groups, stats.zero_variance) == (1, 3, 1, 0)
    assert stats.right.mean == 21

    report = await matcher.report([Reward(0.0, correct=False, trajectory_id=f"{result.group_id}:1")])
    assert (report.matched, report.repeated) == (1, 0)
    stats = rewards.prompts.load(result.prompt_key)
    assert stats is not None
    assert (stats.right.count, stats.wrong.count, stats.groups, stats.zero_variance) == (0, 4, 1, 1)
    assert stats.wrong.mean == pytest.approx(21.5)
    assert rewards.dataset == stats
    assert matcher.group_rewards(harness.record(result.group_id)).zero_variance is True

    report = await matcher.report([Reward(1.0, correct=True, trajectory_id=f"{result.group_id}:1")])
    assert (report.matched, report.repeated) == (0, 1), "the first reported reward stays"


async def test_all_candidates_of_a_group_that_was_selected_by_rewards_are_learned() -> None:
    server, _ = verifying(is_third)
    harness = server.harness
    rewards = Rewards(harness.store)
    matcher = RewardMatcher(rewards, lambda *_: None, lambda *_: None)
    events = harness.rollouts.observers
    events.trajectory_returned.add(matcher.trajectory_returned)
    events.trajectory_verified.add(matcher.trajectory_verified)
    events.group_ended.add(matcher.group_ended)
    [result] = (await server.run(request("20"))).results
    stats = rewards.prompts.load(result.prompt_key)
    assert stats is not None
    assert stats.pass_rate == 3 / 8
    assert stats.right.mean == 24
    assert stats.wrong.mean == pytest.approx((20 + 22 + 23 + 25 + 26) / 5)


# --- cancelling, restarting and carrying over -----------------------------------


async def test_cancelling_a_batch_cancels_its_verifications() -> None:
    server, judge = verifying(is_third)
    judge.open.clear()
    run = await server.begin(30, "20", "3")
    assert judge.pending == 16
    run.cancel("now")
    with pytest.raises(GroupAborted):
        await run.wait()
    await settle()
    assert_idle(server, judge)


@pytest.mark.parametrize("policy", ["informative", "off"])
async def test_a_server_that_stops_does_not_wait_for_verdicts(policy: str) -> None:
    server, judge = verifying(is_third, policy)
    judge.open.clear()
    run = await server.begin(30, "20")
    await asyncio.wait_for(server.stop(), 5)
    done = await run.wait()
    [result] = done.results
    assert (result.error is None) == (policy == "off"), "a complete group is returned without rewards"
    assert_idle(server, judge)


async def test_a_restart_forgets_verdicts_and_a_group_that_waits_for_verdicts_alone_is_not_restarted() -> None:
    server, judge = verifying(is_third)
    judge.open.clear()
    run = await server.begin(23, "3", "20")
    rollouts = server.harness.rollouts
    # The verdicts on prompt 3 may take longer than the update.
    await asyncio.wait_for(rollouts.suspend(), 5)
    assert not server.engine.running
    assert judge.pending == 8
    server.engine.weight_version = 1
    rollouts.resume()
    judge.open.set()
    done = await finish(server.harness, run)
    results = {key(result): result for result in done.results}
    assert [len(results[text].samples) for text in ("3", "20")] == [SIZE, SIZE]
    whole = results["3"].record
    assert whole is not None
    assert (whole.restarted_from, {c.weight_version_end for c in whole.candidates}) == (0, {0})
    record = results["20"].record
    assert record is not None
    assert record.restarted_from == 8
    assert results["20"].verdicts.keys() == set(range(8, 16))
    assert record.num_rewarded == 8
    assert_idle(server, judge)


async def test_a_group_that_is_carried_over_is_verified_again_and_samples_the_same_candidates() -> None:
    whole, _ = verifying(is_third)
    [undisturbed] = (await whole.run(request("20"))).results

    server, judge = verifying(is_third, carry_limits=CarryLimits())
    judge.open.clear()
    run = await server.begin(24, "20", "1", carry=Carry.RESUME, num_groups=1)
    assert judge.pending > 8
    pending = [answer for answer in judge.answers if answer.prompt.text == "20"]
    assert pending, "some candidates of the group have finished"
    judge.judge = is_third
    judge.open.set()
    done = await finish(server.harness, run)
    assert [key(result) for result in done.results] == ["1"]
    assert done.carried == 1
    judge.answers.clear()
    later = await finish(server.harness, await server.begin(0, carry=Carry.RESUME, carried=True))
    [result] = later.results
    assert len(judge.answers) == 8, "also those that had finished before"
    assert sorted(result.samples) == sorted(undisturbed.samples)
    assert rewards_of(result) == rewards_of(undisturbed)
    assert_idle(server, judge)


@pytest.mark.parametrize(
    ("policy", "fields"),
    [("off", {}), ("informative", {}), ("off", {"only": "informative", "return_zero_variance": True})],
)
async def test_a_prompt_that_was_carried_over_has_no_rewards_if_the_server_lost_all_its_verifiers(
    policy: str, fields: dict[str, Any]
) -> None:
    server, judge = verifying(is_third, policy, carry_limits=CarryLimits())
    specs = [PromptSpec(text="20", verifier=["other"]), PromptSpec(text="1")]
    done = await server.run(BatchRequest(specs, SIZE, carry=Carry.RESTART, num_groups=1))
    assert done.carried == 1
    judge.answers.clear()
    judge.names = ("length", "new")
    done = await server.run(request(carry=Carry.RESTART, carried=True, **fields))
    [result] = done.results
    assert (key(result), result.error) == ("20", None)
    assert set(rewards_of(result).values()) <= {None}
    assert judge.answers == []
    assert_idle(server, judge)


# --- streaming ------------------------------------------------------------------


async def test_streams_of_tokens_and_groups_have_rewards_in_the_group() -> None:
    for answer in (GROUPS, token_stream(1)):
        server, judge = verifying(is_third)
        run = await server.registry.start_or_find(request("20"), answer)
        events = await play(server.harness, read_events(run))
        [result] = [event for _, event in events if isinstance(event, GroupResult)]
        assert GroupOut.of(result).trajectories[0].advantage is not None
        ends = [candidate.end for candidate in by_candidate(events).values()]
        if answer is not GROUPS:
            assert Counter(map(type, ends)) == {TrajectorySelected: 4, CandidateDiscarded: 4}
            verdicts = [end.verdict for end in ends if isinstance(end, TrajectorySelected)]
            assert Counter(verdict.reward for verdict in verdicts) == {0.0: 2, 1.0: 2}
            assert all(verdict.correct == (verdict.reward == 1) for verdict in verdicts)
        assert_idle(server, judge)


async def test_a_streamed_trajectory_does_not_wait_for_its_verdict() -> None:
    server, judge = verifying(is_third, "off")
    judge.open.clear()
    run = await server.registry.start_or_find(request("20"), token_stream(1))
    reading = asyncio.create_task(read_events(run))
    await settle()
    await server.engine.run()
    await settle()
    assert not reading.done()
    judge.open.set()
    events = [event for _, event in await reading]
    selected = [event for event in events if isinstance(event, TrajectorySelected)]
    assert {event.verdict for event in selected} == {NO_VERDICT}
    [result] = [event for event in events if isinstance(event, GroupResult)]
    assert set(rewards_of(result).values()) == {0.0, 1.0}
    assert_idle(server, judge)


async def test_a_token_stream_discards_the_candidates_of_a_group_that_is_not_returned() -> None:
    server, judge = verifying(lambda answer: float(answer.prompt.text == "7" and is_third(answer)))
    batch = request("5", "7", only="informative", num_groups=1, max_prompts=2)
    run = await server.registry.start_or_find(batch, token_stream(1))
    events = await play(server.harness, read_events(run))
    candidates = by_candidate(events)
    reasons = [
        candidate.end.reason
        for name, candidate in candidates.items()
        if name.split(":")[0].endswith("-0") and isinstance(candidate.end, CandidateDiscarded)
    ]
    assert Counter(reasons) == {DiscardReason.ZERO_VARIANCE: 4, DiscardReason.NOT_SAMPLED: 4}
    assert [key(event) for _, event in events if isinstance(event, GroupResult)] == ["7"]
    done = events[-1][1]
    assert isinstance(done, BatchDone)
    assert (list(done.uninformative), done.shortfall) == ([0], 0)
    assert_idle(server, judge)


# --- dynamic sampling -----------------------------------------------------------


def only_odd_prompts(answer: Answer) -> float:
    """Reward some answers of odd prompts, and none of even prompts."""
    return float(int(answer.prompt.text or "0") % 2 and is_third(answer))


@pytest.mark.parametrize("policy", ["informative", "off", "sampled", "cut"])
async def test_groups_of_equal_rewards_do_not_count_and_others_take_their_places(policy: str) -> None:
    server, judge = verifying(only_odd_prompts, policy)
    done = await server.run(request("2", "4", "6", "3", "9", "8", "15", only="informative", num_groups=2))
    assert all(result.zero_variance is False for result in done.results)
    assert [int(key(result)) % 2 for result in done.results] == [1, 1]
    assert done.shortfall == 0
    assert done.uninformative
    assert {done.uninformative[0]} <= {0, 1, 2, 5}
    generated = sum(record.generated_tokens for record in server.harness.recorder.records)
    assert done.generated == generated, "tokens of groups that do not count are counted"
    decided = len(done.results) + len(done.uninformative)
    assert len(done.unfinished) == 7 - decided
    assert_idle(server, judge)


async def test_only_the_needed_prompts_run_at_once_until_a_share_of_groups_is_known_to_be_uninformative() -> None:
    server, _ = verifying(only_odd_prompts)
    await server.begin(1, "3", "5", "7", "9", only="informative", num_groups=2)
    assert len(server.harness.rollouts.runs) == 2
    server, _ = verifying(only_odd_prompts)
    server.harness.rollouts.statistics.rewards.learn({None: RewardStats(groups=3, zero_variance=1)})
    await server.begin(1, "3", "5", "7", "9", only="informative", num_groups=2)
    assert len(server.harness.rollouts.runs) == 3


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("carry", list(Carry))
async def test_a_batch_that_finds_too_few_informative_groups_ends_with_what_there_is(
    carry: Carry, returns: bool
) -> None:
    server, judge = verifying(only_odd_prompts)
    batch = request(
        "2",
        "4",
        "3",
        "6",
        only="informative",
        num_groups=3,
        return_zero_variance=returns,
        carry=carry,
    )
    done = await server.run(batch)
    assert done.shortfall == 2
    assert list(done.uninformative) == [0, 1, 3]
    assert sorted(key(result) for result in done.results) == (["2", "3", "4", "6"] if returns else ["3"])
    assert {result.zero_variance for result in done.results if key(result) != "3"} == ({True} if returns else set())
    assert (list(done.unfinished), done.carried) == ([], 0), "prompts of uninformative groups were decided"
    assert_idle(server, judge)


async def test_no_more_than_max_prompts_run() -> None:
    server, judge = verifying(lambda _: 1.0)
    batch = request("2", "4", "3", "6", "5", only="informative", num_groups=2, max_prompts=3, carry=Carry.RESTART)
    done = await server.run(batch)
    assert (done.results, done.shortfall, len(done.uninformative)) == ([], 2, 3)
    assert len(done.unfinished) == done.carried == 2
    assert len(server.harness.recorder.records) == 3
    assert_idle(server, judge)


async def test_a_batch_without_num_groups_returns_only_informative_groups() -> None:
    server, _ = verifying(only_odd_prompts)
    done = await server.run(request("2", "3", "5", only="informative"))
    assert sorted(key(result) for result in done.results) == ["3", "5"]
    assert (list(done.uninformative), done.shortfall) == ([0], 1)


async def test_an_uninformative_group_takes_no_place_of_the_quota() -> None:
    """With "resume" no more groups than needed complete, so a wrong count would carry over too many or too few."""
    server, judge = verifying(only_odd_prompts)
    texts = ["2", "4", "6", "3", "9", "30", "33"]
    done = await server.run(request(*texts, only="informative", num_groups=2, carry=Carry.RESUME))
    assert sorted(key(result) for result in done.results) == ["3", "9"]
    assert list(done.uninformative) == [0, 1, 2]
    assert done.carried == 2
    assert_idle(server, judge)
    later = await server.run(request(only="informative", num_groups=1, carry=Carry.RESUME, carried=True))
    assert [key(result) for result in later.results] == ["33"]


async def test_groups_that_fail_do_not_count_and_are_returned() -> None:
    def script(text: str, index: int) -> Script:
        return Script(3, error=CandidateFailed("broken")) if text == "9" else by_text(text, index)

    server, judge = verifying(only_odd_prompts, script=script)
    done = await server.run(request("9", "3", "5", only="informative", num_groups=2))
    assert [(key(r), r.error is None) for r in done.results] == [("9", False), ("3", True), ("5", True)]
    assert (done.shortfall, list(done.uninformative)) == (0, [])
    assert_idle(server, judge)


# --- stopping early -------------------------------------------------------------


async def test_a_group_is_decided_when_enough_candidates_have_unequal_rewards() -> None:
    server, judge = verifying(is_third)
    [result] = (await server.run(request("20", stop_when="decided"))).results
    assert result.record is not None
    assert result.record.decided_early
    # Lengths 20, 21, 22 and 23 are enough.
    assert rewards_of(result) == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}
    assert Counter(c.reason for c in result.record.candidates) == {None: 4, DiscardReason.DECIDED: 4}
    assert {c.weight for c in result.record.selected} == {None}
    assert result.record.outcome is Outcome.COMPLETED
    assert (result.record.num_rewarded, result.zero_variance) == (4, False)
    assert result.record.generated_tokens < 8 * 23
    assert_idle(server, judge)


async def test_a_group_that_is_never_decided_runs_to_its_end() -> None:
    server, _ = verifying(lambda _: 0.5)
    [result] = (await server.run(request("20", stop_when="decided"))).results
    assert result.record is not None
    assert (result.record.decided_early, result.zero_variance) == (False, True)
    assert {c.weight for c in result.record.selected} == {2.0}


# --- at random ------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 60, 20))
async def test_with_verifiers_and_candidates_that_fail_at_random_the_books_balance(first: int) -> None:
    for seed in range(first, first + 20):
        await run_at_random(seed)


@pytest.mark.nightly
async def test_over_ten_thousand_batches_with_a_verifier_that_fails_at_random_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # pytest keeps each record with its error, and so all that the error's frames refer to: 13 GB.
    caplog.set_level(logging.CRITICAL)
    for seed in range(1000, 11_000):
        await run_at_random(seed)


async def run_at_random(seed: int) -> None:
    random = Random(seed)

    def judge_at_random(answer: Answer) -> float | None:
        draw = random.random()
        if draw < 0.15:
            return None
        if draw < 0.25:
            raise RuntimeError("the verifier is broken")
        return random.choice([0.0, 0.0, 1.0])

    policy = random.choice(["informative", "informative", "off", "sampled", "cut", "shortest"])
    server, judge = verifying(judge_at_random, policy, random_script(seed, random.choice([0.0, 0.1])))
    verify = judge.verify

    async def verify_late(answer: Answer, names: Sequence[str] = ()) -> Verdict:
        for _ in range(random.choice([0, 0, 1, 5, 40])):
            await asyncio.sleep(0)
        return await verify(answer, names)

    judge.verify = verify_late  # type: ignore[method-assign]
    prompts = random.randint(2, 6)
    fields: dict[str, Any] = {"carry": random.choice(list(Carry))}
    if random.random() < 0.7:
        fields["num_groups"] = random.randint(1, prompts)
    if random.random() < 0.6:
        fields["only"] = "informative"
        fields["return_zero_variance"] = random.random() < 0.3
        if random.random() < 0.3:
            fields["max_prompts"] = random.randint(fields.get("num_groups", prompts), prompts)
    if policy == "informative" and random.random() < 0.4:
        fields["stop_when"] = "decided"

    answer = random.choice([WHOLE, GROUPS, token_stream(2)])
    run = await server.registry.start_or_find(request(*map(str, range(prompts)), **fields), answer)
    run.listeners += 1
    for _ in range(random.randint(0, 30)):
        await server.engine.step()
    chance = random.random()
    if chance < 0.1:
        run.cancel("at random")
    elif chance < 0.2:
        suspending = asyncio.create_task(server.harness.rollouts.suspend())
        await play(server.harness, suspending)
        server.engine.weight_version += 1
        server.harness.rollouts.resume()
    elif chance < 0.25:
        server.harness.rollouts.abort_all("at random")
    try:
        done = await play(server.harness, run.wait())
    except DartsError:
        assert chance < 0.1
        await settle()
        await server.engine.run()
        assert_idle(server, judge)
        return
    await settle()
    assert_idle(server, judge)

    records = server.harness.recorder.records
    generated = sum(record.generated_tokens for record in records)
    if fields["carry"] is Carry.RESUME:
        # Carried tokens that no later batch can resume count here.
        assert done.generated >= generated
    else:
        assert done.generated == generated
    complete = [result for result in done.results if result.error is None]
    counted = [result for result in complete if result.number not in done.uninformative]
    needed = fields.get("num_groups", prompts)
    assert len(counted) == needed - done.shortfall
    for result in complete:
        assert len(result.samples) == SIZE
        assert result.record is not None
        assert result.record.outcome is Outcome.COMPLETED
        for c in result.record.candidates:
            assert (c.selected_as is None) != (c.reason is None)
        if policy == "informative":
            # Candidates that failed, or ran before a restart, neither have rewards nor change the mean.
            record = result.record
            rewards = [c.reward for c in record.candidates]
            assert rewards[: record.restarted_from] == [None] * record.restarted_from
            assert all(c.reward is None for c in record.candidates if c.reason in GONE)
            assert record.num_rewarded == len(rewards) - rewards.count(None)
            expected = compute_advantages(rewards)
            assert [c.advantage for c in record.selected] == [expected[c.index] for c in record.selected]
            weights = [c.weight for c in record.selected]
            assert (None in weights) == record.decided_early
            if record.num_rewarded >= SIZE and not record.decided_early:
                limit = FLOOR * record.num_rewarded / SIZE
                assert all(1 <= weight <= limit * (1 + 1e-9) for weight in weights if weight is not None)
    if "only" in fields:
        assert all(result.zero_variance is False for result in counted)
    else:
        assert list(done.uninformative) == []
    # Every prompt is answered, undecided or uninformative, and only once.
    numbers = [result.number for result in done.results]
    numbers += [prompt.number for prompt in done.unfinished]
    if not fields.get("return_zero_variance"):
        numbers += done.uninformative
    assert sorted(numbers) == list(range(prompts))
    if done.shortfall and "max_prompts" not in fields and chance >= 0.25:
        assert done.unfinished == [], "a batch that is short has tried all prompts"


@pytest.mark.parametrize("limit", [{"num_groups": 16}, {"num_groups": 12, "max_prompts": 16}])
async def test_a_batch_that_starts_some_of_its_prompts_has_a_deadline(limit: dict[str, Any]) -> None:
    def script(text: str, index: int) -> Script:
        # One candidate of each prompt is far longer than the others.
        number = int(text)
        return Script(400 if index == number % 6 else 20 + (7 * number + 3 * index) % 20)

    harness = Harness(script, verifier=Judge(lambda answer: float(len(answer.token_ids) % 2)))
    shaping = Shaping(redundancy=1.5, deadline=Deadline(exploration=0.0))
    planner = harness.rollouts.planner = Planner({"cut": shaping}, "cut", Limits(64))
    clock = asyncio.get_running_loop().time
    server = Server(harness, BatchRegistry(harness.rollouts, Texts(), lambda _: planner, None, clock=clock))
    done = await server.run(request(*map(str, range(100, 148)), only="informative", **limit))
    assert max(len(candidate.token_ids) for result in done.results for candidate in result.samples.values()) < 100
