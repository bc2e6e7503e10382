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
from tests.policy.oracle import chosen
from tests.rollout.joining.joining import WAIT, Caller, Hall, SteppedLoop

pytestmark = pytest.mark.anyio
POLICIES = {
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "sampled": Shaping(redundancy=1.5, num_longest=2),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "adaptive": Shaping(redundancy=1.5, num_longest=1, adaptive=True),
    "cut": Shaping(redundancy=1.5, num_longest=1, adaptive=True, deadline=Deadline(exploration=0.2)),
    "shadow": Shaping(redundancy=1.5, num_longest=1, shadow=True),
}
PATIENCE = 400
"""Steps after which a caller that still waits is taken to wait for ever; no script takes a fifth of it."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": SteppedLoop}


class Crowd:
    """Callers of several prompts that come in any order, of whom some leave at any moment."""

    def __init__(self, seed: int, shaping: Shaping, *, failures: float = 0.0) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.failures = failures
        self.size = self.random.choice([3, 4, 8, 8, 8])
        self.hall = Hall(self.script, shaping, self.size, window=self.random.choice([0.0, 0.0, 1.0]), tail_seed=seed)
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
            if not self.coming and all(c.task.done() for c in self.hall.callers):
                break
            if self.random.random() < self.quiet_rate or (not self.coming and not self.hall.engine.running):
                await self.hall.quiet(self.random.choice([1.0, WAIT]))
        assert not self.coming
        await self.hall.engine.run()  # shadow candidates run on

    async def _step(self, step: int) -> None:
        """One decode step, in any turn of which somebody may come or go."""
        engine = self.hall.engine
        engine.now += 1
        for candidate in engine.running:
            candidate.step(engine.now)
        turns = sorted(self.random.randrange(SETTLE_TURNS) for _ in range(self.random.choice([0, 1, 3, 9])))
        for turn in range(SETTLE_TURNS):
            for _ in range(turns.count(turn)):
                self._come(step)
            for caller in self.leaving.pop(step * SETTLE_TURNS + turn, ()):
                caller.hang_up()
            await asyncio.sleep(0)

    def _come(self, step: int) -> None:
        if not self.coming:
            return
        caller = self.hall.come(f"c{len(self.hall.callers)}", self.coming.pop())
        if self.random.random() < self.leave_rate:
            moment = step * SETTLE_TURNS + self.random.randint(1, self.random.choice([SETTLE_TURNS, 60 * SETTLE_TURNS]))
            self.leaving.setdefault(moment, []).append(caller)

    def groups(self) -> Iterator[tuple[str, list[Caller]]]:
        for group_id in self.hall.rollouts.begun:
            yield group_id, [c for c in self.hall.callers if c.group_id == group_id]


def check_who_got_what(crowd: Crowd) -> None:
    hall = crowd.hall
    for caller in hall.callers:
        assert caller.served or caller.task.cancelled()
        assert not caller.served or caller.got.prompt == caller.prompt
    given = Counter((c.got.request, c.got.index) for c in hall.callers if c.served)
    assert not given or max(given.values()) == 1
    records = {record.group_id: record for record in hall.recorder.records}
    assert records.keys() == set(hall.rollouts.begun)
    assert len(hall.recorder.records) == len(records)
    for group_id, callers in crowd.groups():
        record = records[group_id]
        assert set(record.request_ids) == {c.name for c in callers}
        given_here = {(c.got.request, c.got.index): c.got.tokens for c in callers if c.served}
        selected = {hall.origin(group_id, c.index): c.tokens for c in record.selected}
        assert given_here.items() <= selected.items()
        assert all(c.served for c in callers) or len(given_here) <= record.size
        if record.outcome is Outcome.CANCELLED:
            assert not all(c.served for c in callers), "somebody hung up"
        assert all((c.selected_as is None) != (c.reason is None) for c in record.candidates)


def check_the_rule(crowd: Crowd) -> None:
    """What was given is what the rule makes of all candidates that were started, had nobody stopped them."""
    hall = crowd.hall
    for record in hall.recorder.records:
        group = hall.rollouts.begun[record.group_id]._group
        selected = {c.index for c in record.selected}
        if not group.is_open:
            assert not selected
            continue
        wanted = chosen(group.rule, hall.fates(record.group_id))  # type: ignore[arg-type]
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
@pytest.mark.parametrize("seed", range(25))
async def test_every_caller_that_stays_gets_one_trajectory_of_its_own_prompt_and_the_group_is_the_rules(
    policy: str, seed: int
) -> None:
    crowd = Crowd(seed, POLICIES[policy])
    await crowd.play()
    await crowd.hall.assert_empty()
    check_who_got_what(crowd)
    check_the_rule(crowd)
    assert crowd.hall.recorder.started == len(crowd.hall.engine.started)
    assert all(b.groups >= 1 for b in crowd.hall.recorder.batches)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(100, 106))
async def test_candidates_that_fail_cost_nobody_its_trajectory_or_everybody_hears_of_it(policy: str, seed: int) -> None:
    crowd = Crowd(seed, POLICIES[policy], failures=0.15)
    await crowd.play()
    await crowd.hall.assert_empty()
    for _, callers in crowd.groups():
        stayed = [c for c in callers if not c.task.cancelled()]
        errors = {repr(c.task.exception()) for c in stayed if not c.served}
        assert len(errors) <= 1, "all of a group hear the same"
        got = {(c.got.request, c.got.index): c.got.tokens for c in stayed if c.served}
        assert len(got) == sum(c.served for c in stayed)
        for candidate, tokens in got.items():
            script = crowd.script(*candidate)
            # a cut candidate had not failed yet
            assert tokens < script.length or (script.error is None and not script.aborted)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(200, 204))
async def test_an_engine_that_dies_at_any_moment_leaves_nobody_waiting(policy: str, seed: int) -> None:
    crowd = Crowd(seed, POLICIES[policy])
    playing = asyncio.create_task(crowd.play())
    for _ in range(crowd.random.randrange(40 * SETTLE_TURNS)):
        await asyncio.sleep(0)
    crowd.hall.engine.kill()
    await playing
    crowd.hall._others.discard(playing)
    await crowd.hall.assert_empty()
    for caller in crowd.hall.callers:
        assert caller.task.cancelled() or caller.served or isinstance(caller.task.exception(), EngineDead)


# --- the lottery -------------------------------------------------------------------

TRIALS = 500
SIZE = 8


async def ranks_of_those_who_stay(random: Random) -> list[tuple[int, int]]:
    """Place in the queue and length rank of each caller that stays; the earlier ones' own candidates are shorter."""
    hall = Hall(lambda request, index: Script(1 + int(request.partition(":c")[2]) if not index else 20), SHORT, SIZE)
    callers = await hall.all_come()
    leaving = {random.randrange(0, SIZE + 2): caller for caller in random.sample(callers, random.randint(0, 4))}
    for step in range(SIZE + 2):
        if step in leaving:
            leaving[step].hang_up()
            await settle()
        await hall.engine.step()
    stayed = [(place, c) for place, c in enumerate(callers) if c not in leaving.values()]
    assert all(c.served for _, c in stayed)
    await hall.assert_empty()
    return [(place, c.got.tokens) for place, c in stayed]


SHORT = Shaping(redundancy=1.5, num_longest=0)


async def test_neither_the_queue_nor_who_hangs_up_tells_anything_of_lengths() -> None:
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
