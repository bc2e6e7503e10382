"""Batches that skip prompts whose rewards are almost surely equal, on the scripted engine."""

from collections import Counter
from collections.abc import Sequence

import pytest

from darts_server.http.resources.rollouts_models import GroupOut, UnfinishedOut
from darts_server.policy.shaping import Shaping
from darts_server.rollout.batches.batch import BatchGroup, draw_skipped_groups
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.events import BatchDone
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.plan import Limits, Planner
from darts_server.types import PromptSpec, RequestOptions
from tests.rollout.batches.streams import SIZE, Server, by_text, key, request
from tests.rollout.helpers import Harness, Texts

pytestmark = pytest.mark.anyio

FLOOR = 0.25
SHAPINGS = {"signal": Shaping(redundancy=1.5, num_longest=0, adapts_to_signal=True, skip_floor=FLOOR)}
HOPELESS = [str(number) for number in range(10, 18)]
EVEN = ["20", "21"]


class Seeded(Texts):
    """Requests whose seed is ``seed``, as other requests if it is None."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return None if self.seed is None else (self.seed, int(request))


def skipping_server(seed: int | None = 0, shapings: dict[str, Shaping] = SHAPINGS) -> Server:
    """Return a server that knows the pass rates of the prompts."""
    harness = Harness(by_text)
    documents = harness.store
    documents.put("recent_pass_rates", "all", {"value": "[100.0, 50.0, 37.5, 7]"})
    for text in HOPELESS:
        documents.put("pass_counts", f"key of {text}", {"value": "[0.0, 500.0, 7]"})
    for text in EVEN:
        documents.put("pass_counts", f"key of {text}", {"value": "[250.0, 250.0, 7]"})
    planner = harness.rollouts.planner = Planner(shapings, "signal", Limits(64))
    return Server(harness, BatchRegistry(harness.rollouts, Seeded(seed), lambda _: planner))


def skipped(done: BatchDone) -> set[int]:
    assert all(not prompt.skipped or prompt.carry is Carry.DROP for prompt in done.unfinished)
    return {prompt.number for prompt in done.unfinished if prompt.skipped}


async def test_skipped_prompts_are_named_and_groups_that_run_have_their_probability() -> None:
    server = skipping_server()
    done = await server.run(request(*HOPELESS, *EVEN))
    gone = skipped(done)
    assert 0 < len(gone) < len(HOPELESS)
    assert done.skipped == server.harness.recorder.skipped == len(gone)
    assert {HOPELESS[number] for number in gone} | {key(result) for result in done.results} == {*HOPELESS, *EVEN}
    for result in done.results:
        assert result.error is None
        assert len(result.samples) == SIZE
        assert result.record is not None
        assert result.record.run_probability == (1.0 if key(result) in EVEN else FLOOR)
        assert GroupOut.of(result).run_probability == result.record.run_probability
    out = [UnfinishedOut.of(prompt) for prompt in done.unfinished]
    assert {(prompt.skipped, prompt.error, prompt.aborted, prompt.carry) for prompt in out} == {
        (True, None, None, Carry.DROP)
    }
    rollouts = server.harness.rollouts
    assert len(server.harness.recorder.cohorts) == 1, "skipped groups have left their cohort"
    assert (len(rollouts.runs), rollouts.gate.work_inside) == (0, 0)
    assert (rollouts.admission.not_in_engine, rollouts.admission.unanswered_requests) == (0, 0)


async def test_a_seed_repeats_the_draws_until_the_weights_change() -> None:
    first, *others = [skipping_server(seed=5) for _ in range(3)]
    draws = skipped(await first.run(request(*HOPELESS)))
    assert [skipped(await other.run(request(*HOPELESS))) for other in others] == [draws, draws]
    later = set()
    for version in range(1, 9):
        others[0].engine.weight_version = version
        later.add(frozenset(skipped(await others[0].run(request(*HOPELESS)))))
    assert len(later) > 4


@pytest.mark.parametrize("seeded", [True, False])
async def test_prompts_run_as_often_as_their_weight_says(seeded: bool) -> None:
    rollouts = skipping_server().harness.rollouts
    plan = rollouts.plan(SIZE, RequestOptions())
    assert plan is not None
    ran: Counter[str] = Counter()
    batches = 1000
    for seed in range(batches):
        groups = [
            BatchGroup(number, f"batch-{number}", PromptSpec(text=text), text, f"key of {text}", text)
            for number, text in enumerate([*HOPELESS, *EVEN])
        ]
        draw_skipped_groups(groups, plan, rollouts, Seeded(seed if seeded else None))
        ran.update(group.request for group in groups if not group.is_skipped)
    assert [ran[text] for text in EVEN] == [batches] * 2
    for text in HOPELESS:
        assert ran[text] / batches == pytest.approx(FLOOR, abs=4 * (FLOOR * (1 - FLOOR) / batches) ** 0.5)


async def test_a_batch_without_a_prompt_that_runs_ends_at_once() -> None:
    for seed in range(100):
        server = skipping_server(seed)
        done = await server.run(request(*HOPELESS[:2]))
        if len(skipped(done)) == 2:
            assert done.results == []
            assert (server.harness.rollouts.admission.unanswered_requests, server.engine.started) == (0, [])
            return
    pytest.fail("no batch was skipped whole")


@pytest.mark.parametrize("num_groups", [2, 6, 10])
async def test_skipped_prompts_do_not_count_as_groups(num_groups: int) -> None:
    server = skipping_server()
    done = await server.run(request(*HOPELESS, *EVEN, num_groups=num_groups))
    running = 10 - len(skipped(done))
    assert len(done.results) == min(num_groups, running)
    assert len(done.unfinished) == 10 - len(done.results)


@pytest.mark.parametrize("carry", [Carry.RESUME, Carry.RESTART])
async def test_a_batch_that_carries_prompts_over_skips_none(carry: Carry) -> None:
    done = await skipping_server().run(request(*HOPELESS, *EVEN, carry=carry))
    assert len(done.results) == 10
    assert {result.record.run_probability for result in done.results if result.record} == {1.0}


async def test_the_candidates_of_a_prompt_do_not_depend_on_skipped_prompts() -> None:
    counts: dict[str, set[int]] = {}
    for seed in range(6):
        done = await skipping_server(seed).run(request(*HOPELESS, *EVEN, budget=50))
        for result in done.results:
            assert result.record is not None
            counts.setdefault(key(result), set()).add(len(result.record.candidates))
    assert all(len(different) == 1 for different in counts.values())


async def test_single_requests_are_never_skipped() -> None:
    harness = skipping_server().harness
    for text in HOPELESS:
        # The keys of these groups are their texts.
        harness.store.put("pass_counts", text, {"value": "[0.0, 500.0, 7]"})
    assert set(harness.rollouts.allocator.run_probabilities(harness.plan(SIZE, "signal"), HOPELESS)) == {FLOOR}
    runs = await harness.start_cohort(SIZE, "signal", HOPELESS)
    await harness.engine.run()
    for run in runs:
        assert run.record is not None
        assert (run.record.run_probability, run.record.size) == (1.0, SIZE)


async def test_without_a_floor_every_prompt_runs() -> None:
    server = skipping_server(shapings={"signal": Shaping(redundancy=1.5, num_longest=0, adapts_to_signal=True)})
    done = await server.run(request(*HOPELESS, *EVEN))
    assert (len(done.results), done.unfinished) == (10, [])
    assert server.harness.recorder.skipped == 0
