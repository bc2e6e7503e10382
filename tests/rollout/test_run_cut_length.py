"""Cohorts with runaways: every group ends at the cut length, and the deadline becomes known while some groups wait."""

import asyncio
from random import Random
from typing import Any

import pytest

from darts_server.engine.scripted import Script
from darts_server.group.sampled_tail import CutTail
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.rollout.allocation.cohort import Allocation, Cohort
from darts_server.rollout.run import GroupRun
from darts_server.types import FinishReason, Outcome, SelectedAs
from tests.group.oracle import Fate, chosen, cut_lengths, truncated
from tests.rollout.helpers import Harness
from tests.rollout.test_run_cut import poll_each_step, started

pytestmark = pytest.mark.anyio
CAP = 1000
SIZE = 8
GROUPS = [f"p{i}" for i in range(16)]
RULE = Deadline(exploration=0.0)
POLICIES = build_policies(Shaping(), RULE)
CUTTING = ["darts_cut", "cap"]
MOST_REPORTED = 13
"""Of 16 groups so many get enough valid ones; the deadline of 16 would need 15."""


def with_runaways(seed: int) -> Harness:
    """Three of 16 prompts have seven candidates that never end."""

    def script(prompt: str, index: int) -> Script:
        random = Random(f"{seed} {prompt} {index}")
        if GROUPS.index(prompt) >= MOST_REPORTED and index % 12 < 7:
            return Script(CAP, finish_reason=FinishReason.LENGTH)
        return Script(random.randint(10, 40))

    return Harness(script, POLICIES)


@pytest.mark.parametrize("policy", CUTTING)
@pytest.mark.parametrize("seed", range(4))
async def test_every_group_ends_at_the_cut_length(policy: str, seed: int) -> None:
    harness = with_runaways(seed)
    runs = await harness.start_cohort(SIZE, policy, GROUPS)
    harness.engine.now = 0
    outputs = [{t.index: t.output for t in group} for group in await harness.groups(runs)]
    [batch] = harness.recorder.cohorts
    assert batch.deadline is not None
    cut_length = 2 * batch.deadline
    assert harness.engine.now <= cut_length + 1 < CAP / 10, "the deadline was known before the runaways' end"
    for run, name, output in zip(runs, GROUPS, outputs, strict=True):
        record = harness.record(name)
        assert record.outcome is Outcome.COMPLETED
        assert len(record.selected) == SIZE
        assert record.cut_length in (None, cut_length)
        assert all(c.tokens <= cut_length + 1 for c in record.candidates), "polls come after each step"
        assert all(len(tokens) <= cut_length for tokens in output.values())
        fates = {
            c.index: Fate(harness.script(name, c.index).length, c.index not in runaways(harness, name), c.tail_draw)
            for c in run.candidates
        }
        rule = run._group.rule
        if record.cut_length is not None and isinstance(rule, CutTail):
            cuts = cut_lengths(rule, truncated(rule, fates, cut_length), batch.deadline, cut_length)
            assert output.keys() == chosen(rule, truncated(rule, fates, cut_length)).keys()
            for index, tokens in output.items():
                assert len(tokens) == cuts.get(index, min(fates[index].length, cut_length))
        if GROUPS.index(name) >= MOST_REPORTED:
            assert record.cut_length == cut_length
            assert record.deadline in (cut_length, max(batch.deadline, record.completion_length or 0))
    assert any(harness.record(name).completion_length is None for name in GROUPS)


@pytest.mark.parametrize("policy", CUTTING)
async def test_a_cohort_with_many_endless_groups_is_cut_by_the_needs_of_the_cohort_before(policy: str) -> None:
    def script(prompt: str, index: int) -> Script:
        random = Random(f"{prompt} {index}")
        runs_away = int(prompt[1:]) % 2 == 1
        return Script(CAP, finish_reason=FinishReason.LENGTH) if runs_away else Script(random.randint(10, 40))

    harness = Harness(script, POLICIES)
    took = []
    for cohort in "abc":
        names = [f"{cohort}{number}" for number in range(16)]
        runs = await harness.start_cohort(SIZE, policy, names)
        before = harness.engine.now
        await harness.groups(runs)
        took.append(harness.engine.now - before)
        deadline = harness.recorder.cohorts[-1].deadline
        if cohort != "a":
            assert deadline is not None
            records = [harness.record(name) for name in names]
            assert all(c.tokens <= 2 * deadline + 1 for r in records for c in r.candidates)
            assert [r.all_truncated for r in records] == [False, True] * 8
    assert took[0] == CAP, "nothing was known before"
    assert max(took[1:]) <= 2 * 1.5**3 * 40 + 2


def runaways(harness: Harness, name: str) -> list[int]:
    return [i for i in range(16) if harness.script(name, i).finish_reason is FinishReason.LENGTH]


Runs = list[GroupRun[str, list[int]]]


async def eight(script: dict[str, Script]) -> tuple[Harness, Runs, list[asyncio.Task[Any]], Cohort]:
    """Start eight groups that are allocated together."""
    harness = Harness(lambda prompt, _: script[prompt], POLICIES)
    runs = await harness.start_cohort(SIZE, "cap", GROUPS[:8])
    tasks = [await harness.begin(run) for run in runs]
    member = runs[7].member
    assert member is not None
    cohort = member.cohort
    return harness, runs, tasks, cohort


async def test_the_deadline_waits_again_for_a_restarted_group() -> None:
    script = {name: Script(10) for name in GROUPS[:7]} | {GROUPS[7]: Script(CAP)}
    harness, runs, tasks, cohort = await eight(script)
    await harness.steps(15)
    assert (cohort.deadline.tokens, cohort.deadline.pending_cut_length) == (None, 20)
    runs[7].suspend()
    assert not runs[7].needs_engine
    for _ in range(10):
        runs[7].poll()
    assert cohort.deadline.tokens is None, "it has no candidates, but will have"
    script[GROUPS[7]] = Script(13)
    runs[7].resume()
    await harness.engine.run()
    await asyncio.gather(*tasks)
    assert cohort.deadline.tokens == 13


async def test_the_deadline_waits_again_for_a_group_with_replaced_candidates() -> None:
    script = {name: Script(10) for name in GROUPS[:6]} | {GROUPS[6]: Script(CAP, delay=8), GROUPS[7]: Script(CAP)}
    harness, _, tasks, cohort = await eight(script)
    await harness.steps(25)
    assert (cohort.deadline.tokens, cohort.deadline.pending_cut_length) == (None, 20), (
        "it is beyond that, the group before is not"
    )
    script[GROUPS[7]] = Script(13)
    for candidate in harness.engine.running:
        if candidate.request == GROUPS[7]:
            candidate._finish(None)  # the engine has aborted it
    await harness.steps(8)
    assert cohort.deadline.tokens is None, "the new candidates may be short"
    await harness.engine.run()
    await asyncio.gather(*tasks)
    assert cohort.deadline.tokens == 13


async def test_a_group_reports_once_that_it_is_beyond_the_limit_of_the_other_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each report sorts what all groups of the cohort need, and the others may take long."""
    script = {name: Script(10) for name in GROUPS[:6]} | {name: Script(CAP) for name in GROUPS[6:8]}
    harness, runs, tasks, cohort = await eight(script)
    reports: list[int | None] = []
    monkeypatch.setattr(cohort, "report_minimum", lambda _, tokens: reports.append(tokens))
    for _ in range(40):
        await harness.engine.step()
        runs[6].poll()
    assert cohort.deadline.pending_cut_length == 20
    assert reports == [21, 21], "of two groups"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_candidate_cut_at_the_cut_length_is_cut_again_when_a_late_candidate_is_short() -> None:
    # 0 and 1 reach the cut length of 8 while 2 and 3, which began late, may still bring the deadline down to 5.
    script = {0: Script(90), 1: Script(90), 2: Script(2, delay=20), 3: Script(3, delay=20)}
    harness = Harness(lambda _, index: script[index])
    run = started(harness.engine, harness.recorder)
    run.open(CutTail(1, 2, completion_rank=2), Allocation(4))
    waiting = await harness.begin(run)
    run.set_deadline(5, 8)
    await poll_each_step(harness.engine, run, 10)
    assert [c.tokens for c in run.candidates[:2]] == [8, 8]
    await poll_each_step(harness.engine, run, 20)
    lengths = {t.index: len(t.output) for t in await waiting}
    assert lengths[2] == 2
    assert {tokens for index, tokens in lengths.items() if index in (0, 1)} == {5}
    [record] = harness.recorder.records
    assert all(c.selected_as is SelectedAs.LONG for c in record.selected if c.cut)
