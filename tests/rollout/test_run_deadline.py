"""Policies with a deadline, from the allocation of a batch to what its callers get."""

from dataclasses import dataclass
from math import ceil
from random import Random

import pytest

from darts_server.engine.scripted import Script
from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.policy.deadline import QUANTILE, Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CandidateRecord, CohortRecord, GroupRecord
from darts_server.rollout.plan import Planner
from darts_server.rollout.run import GroupRun
from darts_server.types import FinishReason, Outcome, SelectedAs
from tests.group.oracle import Fate, chosen, cut_lengths
from tests.rollout.helpers import Harness

pytestmark = pytest.mark.anyio
SIZE = 8
GROUPS = [f"p{i}" for i in range(16)]
SEEDS = range(8)


def shaping(exploration: float = 0.0) -> Shaping:
    return Shaping(redundancy=1.5, adaptive=True, deadline=Deadline(exploration=exploration, cut_factor=1000.0))


@dataclass
class Played:
    """A batch that was played to its end. ``steps``: of the engine until then."""

    harness: Harness
    runs: dict[str, GroupRun[str, list[int]]]
    outputs: dict[str, dict[int, list[int]]]
    batch: CohortRecord
    steps: int

    def fates(self, name: str) -> dict[int, Fate]:
        """How every candidate of a group would end if it were not stopped."""
        fates = {}
        for candidate in self.runs[name]._group.candidates:
            script = self.harness.script(name, candidate.index)
            fates[candidate.index] = Fate(script.length, script.finish_reason is FinishReason.STOP, candidate.tail_draw)
        return fates

    def needed(self, name: str) -> int:
        """The length of a group's M-th shortest."""
        return sorted(fate.length for fate in self.fates(name).values() if fate.valid)[SIZE - 1]

    def reported(self, name: str) -> int:
        """The need that a group reports: with fewer than the mean of 12 candidates, that of the same share of them."""
        fates = self.fates(name)
        place = min(ceil(SIZE * len(fates) / 12), SIZE)
        return sorted(fate.length for fate in fates.values() if fate.valid)[place - 1]

    def records(self) -> list[tuple[str, GroupRecord]]:
        return [(name, self.harness.record(name)) for name in GROUPS]


def long_tails(seed: int) -> Harness:
    """Prompts of different lengths, each with a few candidates that are many times as long as the others."""

    def script(prompt: str, index: int) -> Script:
        random = Random(f"{seed} {prompt} {index}")
        usual = Random(f"{seed} {prompt}").randint(4, 20)
        length = max(1, round(usual * random.lognormvariate(0, 0.9)))
        return Script(min(length, 200))

    harness = Harness(script, {"sampled": shaping()})
    if seed % 2:  # prompts that differ in how many candidates they get
        harness.store.add_stds(**{name: Random(f"{seed} {name}").choice([1.0, 100.0, 900.0]) for name in GROUPS})
    return harness


async def play(harness: Harness, policy: str) -> Played:
    runs = dict(zip(GROUPS, await harness.start_cohort(SIZE, policy, GROUPS), strict=True))
    harness.engine.now = 0
    groups = await harness.groups(list(runs.values()))
    outputs = {name: {t.index: t.output for t in group} for name, group in zip(GROUPS, groups, strict=True)}
    [batch] = harness.recorder.cohorts
    assert not harness.rollouts.runs
    return Played(harness, runs, outputs, batch, harness.engine.now)


def tails(record: GroupRecord) -> list[CandidateRecord]:
    return [c for c in record.selected if c.selected_as is not SelectedAs.SHORT]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_group_has_the_candidates_that_its_rule_selects_under_the_deadline(seed: int) -> None:
    played = await play(long_tails(seed), "sampled")
    deadline, cut = played.batch.deadline, 0
    assert deadline == sorted(map(played.reported, GROUPS))[ceil(QUANTILE * len(GROUPS)) - 1]
    assert (played.batch.groups, played.batch.mean_candidates, played.batch.explored) == (16, 12, False)
    for name, record in played.records():
        rule, fates, limit = played.runs[name]._group.rule, played.fates(name), max(deadline, played.needed(name))
        assert isinstance(rule, CutTail)
        assert record.outcome is Outcome.COMPLETED
        assert {c.index: c.selected_as for c in record.selected} == chosen(rule, fates, deadline)
        assert len(tails(record)) == 1
        cuts = cut_lengths(rule, fates, deadline)
        for index, output in played.outputs[name].items():
            assert output == list(range(cuts.get(index, fates[index].length)))
            assert len(output) <= limit
        assert record.deadline in (None, limit), "None for one that was complete before"
        assert record.ended_at <= limit
        for candidate in (c for c in record.candidates if c.cut):
            cut += 1
            assert (candidate.selected_as, candidate.finish_reason) == (SelectedAs.LONG, FinishReason.LENGTH)
            assert candidate.tokens == record.deadline == len(played.outputs[name][candidate.index])
            assert (candidate.weight_version_end, candidate.ended_at) == (0, candidate.tokens)
        assert not record.mixed_versions
    assert cut
    assert played.steps <= max(deadline, *map(played.needed, GROUPS)), "no group waits for more"
    assert (len({len(record.candidates) for _, record in played.records()}) > 1) == bool(seed % 2)


@pytest.mark.parametrize("seed", SEEDS)
async def test_explored_groups_are_not_cut_and_are_marked(seed: int) -> None:
    harness = long_tails(seed)
    harness.rollouts.planner = Planner({"explored": shaping(exploration=1.0)}, "explored", harness.limits)
    played = await play(harness, "explored")
    assert played.batch.explored
    assert played.batch.deadline is not None
    whole = SampledTail(SIZE - 1, 1)
    beyond = 0
    for name, record in played.records():
        assert record.explored
        fates = played.fates(name)
        assert {c.index: c.selected_as for c in record.selected} == chosen(whole, fates)
        assert not any(c.cut for c in record.candidates)
        for index, output in played.outputs[name].items():
            assert len(output) == fates[index].length
        if record.deadline is not None:
            assert record.deadline == max(played.batch.deadline, played.needed(name))
            assert record.cut_length == 1000 * played.batch.deadline
            beyond += any(c.tokens > record.deadline for c in tails(record))
    assert beyond, "something would have been taken away"
