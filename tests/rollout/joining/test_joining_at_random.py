"""Groups put together from single requests whose callers come, wait and go as they please."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from darts_server.engine.scripted import SETTLE_TURNS, Script, settle
from darts_server.exceptions import CandidateFailed, EngineDead
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.types import FinishReason, Outcome
from tests.group.oracle import chosen
from tests.rollout.joining.joining import WAIT, Caller, JoiningHarness

pytestmark = pytest.mark.anyio
POLICIES = {
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "sampled": Shaping(redundancy=1.5, num_longest=2),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "adaptive": Shaping(redundancy=1.5, num_longest=1, adaptive=True),
    "cut": Shaping(redundancy=1.5, num_longest=1, adaptive=True, deadline=Deadline(exploration=0.2)),
}
PATIENCE = 400
"""Steps after which a caller that still waits is taken to wait for ever; no script takes a fifth of it."""


class Crowd:
    """Callers of several prompts that come in any order, of whom some leave at any moment."""

    def __init__(self, seed: int, shaping: Shaping, *, failures: float = 0.0) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.failures = failures
        self.size = self.random.choice([3, 4, 8, 8, 8])
        self.harness = JoiningHarness(
            self.script, shaping, self.size, window=self.random.choice([0.0, 0.0, 1.0]), tail_seed=seed
        )
        self.leave_rate = self.random.choice([0.0, 0.1, 0.3])
        self.quiet_rate = self.random.choice([0.0, 0.02, 0.1])
        self.leaving: dict[int, list[Caller]] = {}
        self.coming = [f"p{prompt}" for prompt in range(self.random.randint(1, 12)) for _ in range(self.requests())]
        self.random.shuffle(self.coming)

    def requests(self) -> int:
        """A group's worth for a prompt, or two, some missing or some too many."""
        groups = self.random.choice([1, 1, 2])
        return max(1, groups * self.size + self.random.choice([0, 0, -1, 1, 3]))

    def script(self, request: str, index: int) -> Script:
        random = Random(f"{self.seed} {request} {index}")
        reason = FinishReason.LENGTH if random.random() < 0.1 else FinishReason.STOP
        length = 30 if reason is FinishReason.LENGTH else random.randint(1, 30)
        error = CandidateFailed("boom") if random.random() < self.failures else None
        return Script(length, random.randint(0, 6), reason, error, aborted=random.random() < self.failures)

    async def play(self) -> None:
        for step in range(PATIENCE):
            await self._step(step)
            if not self.coming and all(c.task.done() for c in self.harness.callers):
                break
            if self.random.random() < self.quiet_rate or (not self.coming and not self.harness.engine.running):
                await self.harness.advance_clock(self.random.choice([1.0, WAIT]))
        assert not self.coming
        await self.harness.engine.run()

    async def _step(self, step: int) -> None:
        """One decode step, in any turn of which somebody may come or go."""
        engine = self.harness.engine
        engine.now += 1
        for candidate in engine.running:
            candidate.step(engine.now)
        turns = sorted(self.random.randrange(SETTLE_TURNS) for _ in range(self.random.choice([0, 1, 3, 9])))
        for turn in range(SETTLE_TURNS):
            for _ in range(turns.count(turn)):
                self._come(step)
            for caller in self.leaving.pop(step * SETTLE_TURNS + turn, ()):
                caller.disconnect()
            await asyncio.sleep(0)

    def _come(self, step: int) -> None:
        if not self.coming:
            return
        caller = self.harness.send(f"c{len(self.harness.callers)}", self.coming.pop())
        if self.random.random() < self.leave_rate:
            moment = step * SETTLE_TURNS + self.random.randint(1, self.random.choice([SETTLE_TURNS, 60 * SETTLE_TURNS]))
            self.leaving.setdefault(moment, []).append(caller)

    def groups(self) -> Iterator[tuple[str, list[Caller]]]:
        for group_id in self.harness.runs:
            yield group_id, [c for c in self.harness.callers if c.group_id == group_id]


def check_who_got_what(crowd: Crowd) -> None:
    harness = crowd.harness
    for caller in harness.callers:
        assert caller.is_answered or caller.task.cancelled()
        assert not caller.is_answered or caller.result.prompt == caller.prompt
    given = Counter((c.result.request, c.result.index) for c in harness.callers if c.is_answered)
    assert not given or max(given.values()) == 1
    records = {record.group_id: record for record in harness.recorder.records}
    assert records.keys() == set(harness.runs)
    assert len(harness.recorder.records) == len(records)
    for group_id, callers in crowd.groups():
        record = records[group_id]
        assert set(record.request_ids) == {c.name for c in callers}
        given_here = {(c.result.request, c.result.index): c.result.tokens for c in callers if c.is_answered}
        selected = {harness.origin(group_id, c.index): c.tokens for c in record.selected}
        assert given_here.items() <= selected.items()
        assert all(c.is_answered for c in callers) or len(given_here) <= record.size
        if record.outcome is Outcome.CANCELLED:
            assert not all(c.is_answered for c in callers), "somebody hung up"
        assert all((c.selected_as is None) != (c.reason is None) for c in record.candidates)


def check_the_rule(crowd: Crowd) -> None:
    """Check that the rule would select the same from all started candidates, had none been stopped."""
    harness = crowd.harness
    for record in harness.recorder.records:
        group = harness.runs[record.group_id]._group
        selected = {c.index for c in record.selected}
        if not group.is_open:
            assert not selected
            continue
        wanted = chosen(group.rule, harness.fates(record.group_id))  # type: ignore[arg-type]  # one of `Rule`
        assert record.outcome is not Outcome.FAILED
        if record.outcome is Outcome.COMPLETED:
            assert {c.index: c.selected_as for c in record.selected if not c.cut} == {
                i: end for i, end in wanted.items() if not record.candidates[i].cut
            }
            assert selected == wanted.keys()
            assert len(selected) == record.size
        else:
            assert selected <= wanted.keys()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(10))
async def test_every_waiting_caller_gets_a_trajectory_of_its_prompt_and_the_group_follows_its_rule(
    policy: str, seed: int
) -> None:
    crowd = Crowd(seed, POLICIES[policy])
    await crowd.play()
    await crowd.harness.assert_empty()
    check_who_got_what(crowd)
    check_the_rule(crowd)
    # One that is stopped before its turn never reaches the engine.
    assert crowd.harness.recorder.started >= len(crowd.harness.engine.started)
    assert all(b.groups >= 1 for b in crowd.harness.recorder.cohorts)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(100, 104))
async def test_failing_candidates_are_replaced_or_every_caller_gets_the_error(policy: str, seed: int) -> None:
    crowd = Crowd(seed, POLICIES[policy], failures=0.15)
    await crowd.play()
    await crowd.harness.assert_empty()
    for _, callers in crowd.groups():
        stayed = [c for c in callers if not c.task.cancelled()]
        errors = {repr(c.task.exception()) for c in stayed if not c.is_answered}
        assert len(errors) <= 1, "all callers of a group get the same error"
        got = {(c.result.request, c.result.index): c.result.tokens for c in stayed if c.is_answered}
        assert len(got) == sum(c.is_answered for c in stayed)
        for candidate, tokens in got.items():
            script = crowd.script(*candidate)
            # a cut candidate had not failed yet
            assert tokens < script.length or (script.error is None and not script.aborted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(200, 203))
async def test_an_engine_that_dies_at_any_moment_leaves_no_caller_waiting(policy: str, seed: int) -> None:
    crowd = Crowd(seed, POLICIES[policy])
    playing = asyncio.create_task(crowd.play())
    for _ in range(crowd.random.randrange(40 * SETTLE_TURNS)):
        await asyncio.sleep(0)
    crowd.harness.engine.kill()
    await playing
    crowd.harness._others.discard(playing)
    await crowd.harness.assert_empty()
    for caller in crowd.harness.callers:
        assert caller.task.cancelled() or caller.is_answered or isinstance(caller.task.exception(), EngineDead)


# --- the lottery -------------------------------------------------------------------

TRIALS = 500
SIZE = 8


async def ranks_of_those_who_stay(random: Random) -> list[tuple[int, int]]:
    """Place in the queue and length rank of each caller that stays; the earlier ones' own candidates are shorter."""
    harness = JoiningHarness(
        lambda request, index: Script(1 + int(request.partition(":c")[2]) if not index else 20), SHORT, SIZE
    )
    callers = await harness.send_all()
    leaving = {random.randrange(0, SIZE + 2): caller for caller in random.sample(callers, random.randint(0, 4))}
    for step in range(SIZE + 2):
        if step in leaving:
            leaving[step].disconnect()
            await settle()
        await harness.engine.step()
    stayed = [(place, c) for place, c in enumerate(callers) if c not in leaving.values()]
    assert all(c.is_answered for _, c in stayed)
    await harness.assert_empty()
    return [(place, c.result.tokens) for place, c in stayed]


SHORT = Shaping(redundancy=1.5, num_longest=0)


@pytest.mark.nightly
async def test_lengths_depend_neither_on_the_order_of_callers_nor_on_disconnects() -> None:
    random = Random(1)
    ranks = [pair for _ in range(TRIALS) for pair in await ranks_of_those_who_stay(random)]
    deviation = ((SIZE**2 - 1) / 12) ** 0.5

    def unbiased(values: list[int]) -> bool:
        return bool(abs(sum(values) / len(values) - (SIZE + 1) / 2) < 5 * deviation / len(values) ** 0.5)

    assert unbiased([rank for _, rank in ranks])
    for place in range(SIZE):
        assert unbiased([rank for at, rank in ranks if at == place]), place
    for rank, count in Counter(rank for _, rank in ranks).items():
        expected = len(ranks) / SIZE
        assert abs(count - expected) < 5 * (expected * (1 - 1 / SIZE)) ** 0.5, rank
