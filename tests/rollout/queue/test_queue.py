"""The queue on the scripted engine."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import (
    CandidateFailed,
    EngineBusy,
    InvalidRequest,
    NotFound,
    QuotaReached,
    ServerStopping,
    StateDamaged,
    StateFull,
    TooLarge,
    WeightsLost,
)
from darts_server.records import UpdateRecord
from darts_server.rollout.batches.results import GroupResult
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.queue import leases, ledger
from darts_server.rollout.queue.entries import AckOutcome, EntryState, Terms
from darts_server.rollout.queue.handout import TakenGroup
from darts_server.rollout.queue.owners import QueueLimits
from darts_server.rollout.queue.puts import Put, terms_of
from darts_server.rollout.queue.queue import PromptQueue
from darts_server.serving.admission import Admission, Bounds, Caller, caller
from darts_server.store.transactions import Changes, TransactionStore
from darts_server.types import PromptSpec, UpdateOutcome
from tests.rollout.batches.test_submission import POLICIES, Texts
from tests.rollout.helpers import Harness

pytestmark = pytest.mark.anyio
ME, OTHER, ADMIN = Caller("me"), Caller("other"), Caller("admin", is_admin=True)
Queue = PromptQueue[str, list[int]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def encode(result: GroupResult) -> bytes:
    error = None if result.error is None else str(result.error)
    texts = [sample.token_ids for sample in result.samples.values()]
    metadata = None if result.metadata is None else json.loads(result.metadata)
    return json.dumps({"samples": len(texts), "error": error, "metadata": metadata}).encode()


def script(prompt: str, index: int) -> Script:
    return Script(int(prompt) + index, error=CandidateFailed("broken") if prompt == "7" else None)


def new_planner(overrides: Mapping[str, object]) -> Planner:
    return Planner(POLICIES, str(overrides.get("name", "shortest")), Limits(64))


@asynccontextmanager
async def opened(
    harness: Harness, folder: Path | None = None, limits: QueueLimits | None = None
) -> AsyncIterator[Queue]:
    with TransactionStore(folder) as disk:
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode, limits)
        queue.open()
        try:
            yield queue
        finally:
            queue.drain()
            await asyncio.sleep(0.01)


def put(*texts: str, job: str = "job", **options: object) -> Put:
    prompts = [PromptSpec(text=text, metadata=json.dumps({"text": text}).encode()) for text in texts]
    return Put(job, prompts, [None] * len(texts), terms_of(4, {}, {}), options=options)


async def run(harness: Harness) -> None:
    """Run the engine until nothing has run for a while: the queue has nothing more to write and to start."""
    quiet = 0
    while quiet < 20:
        before = harness.engine.now
        await asyncio.sleep(0.005)
        await harness.engine.run()
        quiet = quiet + 1 if harness.engine.now == before else 0


async def wait_for(queue: Queue, **states: int) -> None:
    for _ in range(3000):
        if all(queue.meter.totals()[EntryState(name)] == count for name, count in states.items()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(queue.meter.totals())


def content(groups: list[TakenGroup]) -> list[object]:
    return [json.loads(group.group)["metadata"]["text"] for group in groups]


async def test_groups_come_out_as_they_are_complete_and_are_done_when_they_are_acknowledged() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        result = await queue.put(ME, put("30", "10", "20"))
        assert (len(result.names), result.added) == (3, 3)
        taking = asyncio.create_task(queue.take(ME, "job", 3, 30, 60))
        await run(harness)
        groups = await taking
        assert content(groups) == ["10", "20", "30"]
        assert [json.loads(group.group)["samples"] for group in groups] == [4, 4, 4]
        assert await queue.take(ME, "job", 1, 0, 60) == []
        done = await queue.acknowledge(ME, [group.lease for group in groups])
        assert done == [AckOutcome.ACKNOWLEDGED] * 3
        assert not sum(queue.meter.totals().values())
        assert harness.recorder.records[0].owner == "me"


async def test_a_bad_prompt_fails_alone_and_is_handed_out_once() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "x", "7", "20"))
        taking = asyncio.create_task(queue.take(ME, "job", 4, 30, 60))
        await run(harness)
        groups = {json.loads(group.group)["metadata"]["text"]: json.loads(group.group) for group in await taking}
        assert groups["x"]["error"] == "prompt.text: has an x"
        assert groups["7"]["error"] == "broken"
        assert [groups[text]["samples"] for text in ("10", "20", "x", "7")] == [4, 4, 0, 0]


class Picky(Texts):
    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if prompt.text == "13":
            raise InvalidRequest("sampling.max_tokens", "is too large for this prompt")
        return await super().make_request(prompt, sampling, size, request_id)


async def test_a_prompt_that_its_sampling_parameters_do_not_fit_fails_alone() -> None:
    harness = Harness(script)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Picky(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10", "11", "12", "13", "14"))
        taking = asyncio.create_task(queue.take(ME, "job", 5, 30, 60))
        for _ in range(500):
            await harness.engine.run()
            await asyncio.sleep(0.005)
            if taking.done():
                break
        errors = {
            json.loads(group.group)["metadata"]["text"]: json.loads(group.group)["error"] for group in await taking
        }
        assert errors == dict.fromkeys(["10", "11", "12", "14"]) | {
            "13": "sampling.max_tokens: is too large for this prompt"
        }
        queue.drain()
        await asyncio.sleep(0.01)


async def test_prompts_that_were_in_a_batch_with_a_bad_one_do_not_wait_for_the_rest_of_it() -> None:
    harness = Harness(script)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Picky(), new_planner, disk, encode)
        await queue.put(ME, put("5000", "10", "11", "13"))
        queue.open()
        for _ in range(500):
            await harness.engine.step()
            await asyncio.sleep(0.001)
            if queue.meter.totals()[EntryState.READY] == 3:
                break
        assert harness.engine.now < 5000
        assert (queue.meter.totals()[EntryState.READY], queue.meter.totals()[EntryState.RUNNING]) == (3, 1)
        queue.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("terms", [terms_of(4, {"any": 1}, {}), terms_of(99, {}, {}), terms_of(4, {}, {"name": "no"})])
async def test_terms_that_no_prompt_could_run_under_are_refused(terms: Terms) -> None:
    class Strict(Texts):
        def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
            if sampling:
                raise InvalidRequest("sampling.any", "there is none")
            return sampling

    harness = Harness(script)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Strict(), new_planner, disk, encode)
        with pytest.raises(InvalidRequest):
            await queue.put(ME, Put("job", [PromptSpec(text="1")], [None], terms))
        assert queue.jobs(ME) == []


async def test_what_is_in_the_queue_outlives_the_server(tmp_path: Path) -> None:
    harness = Harness(script)
    async with opened(harness, tmp_path) as queue:
        await queue.put(ME, put("10", "11", "500", groups_per_version=8))
        await settle()
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        while harness.engine.now < 30:
            await harness.engine.step()
            await asyncio.sleep(0.001)
        [group] = await taking
        await wait_for(queue, leased=1, ready=1, running=1)
    harness = Harness(script)
    async with opened(harness, tmp_path) as queue:
        assert queue.jobs(ME)[0].job.options.groups_per_version == 8
        assert await queue.acknowledge(ME, [group.lease]) == [AckOutcome.ACKNOWLEDGED]
        taking = asyncio.create_task(queue.take(ME, "job", 2, 30, 60))
        await run(harness)
        assert content(await taking) == ["11", "500"]


async def test_what_belongs_to_a_key_is_that_keys_and_admins_alone() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10"))
        await run(harness)
        assert await queue.take(OTHER, "job", 1, 0, 60) == []
        [group] = await queue.take(ME, "job", 1, 0, 60)
        assert await queue.acknowledge(OTHER, [group.lease]) == [AckOutcome.UNKNOWN]
        with pytest.raises(NotFound):
            await queue.drop(OTHER, "job")
        assert [len(queue.jobs(who)) for who in (ME, OTHER, ADMIN)] == [1, 0, 1]
        assert await queue.acknowledge(ADMIN, [group.lease]) == [AckOutcome.ACKNOWLEDGED]


async def test_a_deleted_job_stops_what_runs_and_others_go_on() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("5000", "6000"))
        await queue.put(ME, put("10", job="other"))
        await wait_for(queue, running=3)
        await settle()
        assert await queue.drop(ME, "job") == 2
        await run(harness)
        assert harness.engine.now < 1000, "they did not run to their end"
        assert content(await queue.take(ME, "other", 1, 30, 60)) == ["10"]
        assert harness.rollouts.running == 0
        assert harness.rollouts.admission.ahead == 0


async def test_the_engine_is_filled_and_not_more_so_that_later_jobs_have_their_turn() -> None:
    harness = Harness(script)
    harness.engine.capacity = 24
    harness.rollouts.admission = Admission(lambda: harness.engine.unfinished, 24, Bounds(10_000))
    async with opened(harness) as queue:
        await queue.put(ME, put(*["50"] * 30))
        await wait_for(queue, running=6)  # of four trajectories each
        await queue.put(OTHER, put("40"))
        taking = asyncio.create_task(queue.take(OTHER, "job", 1, 30, 60))
        for _ in range(500):
            await harness.engine.step()
            await asyncio.sleep(0.001)
            if taking.done():
                break
        assert content(await taking) == ["40"]
        assert queue.meter.totals()[EntryState.QUEUED] > 10


async def test_prompts_that_a_key_may_not_have_in_flight_together_run_one_after_the_other() -> None:
    harness = Harness(script)
    harness.rollouts.admission = Admission(lambda: harness.engine.unfinished, None, Bounds(None, max_per_caller=8))
    async with opened(harness) as queue:
        await queue.put(ME, put(*["10"] * 5))
        taking = asyncio.create_task(queue.take(ME, "job", 5, 30, 60))
        for _ in range(2000):
            await harness.engine.run()
            await asyncio.sleep(0.005)
            if taking.done():
                break
        assert [json.loads(group.group)["error"] for group in await taking] == [None] * 5


async def test_a_job_whose_consumer_has_stalled_stops_no_other_job_of_callers_without_a_key() -> None:
    harness, nobody = Harness(script), Caller(None)
    async with opened(harness, limits=QueueLimits(bytes=4000)) as queue:
        await queue.put(nobody, put(*["10"] * 40, job="stalled"))
        await run(harness)
        while queue.waits_for(queue.jobs(nobody)[0]) is None:
            await queue.put(nobody, put(*["10"] * 10, job="stalled"))
            await run(harness)
        for _ in range(3):
            await queue.put(nobody, put("11", "12", job="other"))
            taking = asyncio.create_task(queue.take(nobody, "other", 2, 30, 60))
            await run(harness)
            groups = await taking
            assert content(groups) == ["11", "12"]
            await queue.acknowledge(nobody, [group.lease for group in groups])
        assert queue.waits_for(queue.jobs(nobody)[0]) == "consumer"


async def test_a_prompt_that_waits_for_candidates_of_its_key_does_not_stop_its_other_jobs() -> None:
    harness = Harness(script)
    harness.rollouts.admission = Admission(lambda: harness.engine.unfinished, None, Bounds(None, max_per_caller=12))
    async with opened(harness) as queue:
        await queue.put(ME, put("5000", job="slow"))
        await wait_for(queue, running=1)
        large = Put("large", [PromptSpec(text="20")], [None], terms_of(8, {}, {}))
        await queue.put(ME, large)
        await queue.put(ME, put("10", job="small"))
        taking = asyncio.create_task(queue.take(ME, "small", 1, 30, 60))
        while not taking.done():
            await harness.engine.step()
            await asyncio.sleep(0.01)
        assert content(await taking) == ["10"]
        assert queue.meter.totals()[EntryState.RUNNING] == 1, "the slow one still runs"
        taking = asyncio.create_task(queue.take(ME, "large", 1, 30, 60))
        await run(harness)
        assert json.loads((await taking)[0].group)["samples"] == 8


def updated(harness: Harness, queue: Queue) -> None:
    harness.engine.weight_version += 1
    queue.update_ended(
        UpdateRecord(harness.engine.weight_version, UpdateOutcome.COMPLETED, "push", "finish", False, {})
    )


async def test_an_update_does_not_wait_for_groups_that_would_be_too_old_and_these_start_first() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "11", "5000", "12", "13", groups_per_version=2, max_staleness=0, groups_ahead=1))
        taking = asyncio.create_task(queue.take(ME, "job", 2, 30, 60))
        while not taking.done():
            await harness.engine.step()
            await asyncio.sleep(0.001)
        assert content(await taking) == ["10", "11"]
        queue.update_announced(1)
        harness.rollouts.gate.close("update")
        async with asyncio.timeout(5):
            await harness.rollouts.gate.wait_until_empty()
        updated(harness, queue)
        harness.rollouts.gate.open("update")
        await wait_for(queue, running=3, leased=2)
        while not harness.engine.running:
            await asyncio.sleep(0.01)
        assert harness.engine.running[0].request == "5000"
        assert queue.meter.counts.stale == 1


async def test_one_step_off_the_engine_runs_while_the_consumer_trains() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put(*map(str, range(10, 30)), groups_per_version=4, max_staleness=1))
        await wait_for(queue, running=8)
        for step in range(3):
            taking = asyncio.create_task(queue.take(ME, "job", 4, 30, 60))
            await run(harness)
            groups = await taking
            assert [group.staleness for group in groups] == [min(step, 1)] * 4
            await queue.acknowledge(ME, [group.lease for group in groups])
            await run(harness)
            assert queue.meter.totals()[EntryState.READY] == 4, "nothing more starts until the update"
            assert queue.waits_for(queue.jobs(ME)[0]) == "weights"
            updated(harness, queue)
        assert queue.meter.counts.stale == 0


async def test_groups_that_are_aborted_from_outside_start_again() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("50"))
        await wait_for(queue, running=1)
        await settle()
        harness.rollouts.abort_all("paused")
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        await run(harness)
        assert content(await taking) == ["50"]
        assert queue.meter.counts.aborted == 1


async def test_a_group_that_is_always_aborted_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.starting.RETRY_SECONDS", 0.0)
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("50"))
        for _ in range(1000):
            await asyncio.sleep(0.005)
            harness.rollouts.abort_all("paused")
            if queue.meter.totals()[EntryState.READY]:
                break
        [group] = await queue.take(ME, "job", 1, 0, 60)
        assert "paused" in json.loads(group.group)["error"]


async def test_a_stopping_server_leases_nothing_and_acknowledges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.job_entries.MAX_TAKEN_BYTES", 1)
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "11"))
        await run(harness)
        [group] = await queue.take(ME, "job", 2, 30, 60)  # as many bytes as go out together
        waiting = asyncio.create_task(queue.take(ME, "none", 1, 30, 60))
        await asyncio.sleep(0)
        queue.drain()
        for taking in (waiting, queue.take(ME, "job", 1, 30, 60)):
            with pytest.raises(ServerStopping):
                await taking
        assert queue.meter.totals()[EntryState.READY] == 1
        assert await queue.acknowledge(ME, [group.lease]) == [AckOutcome.ACKNOWLEDGED]


async def test_terms_are_bounded() -> None:
    class Any(Texts):
        def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
            return {}

    with TransactionStore() as disk:
        queue = Queue(Harness(script).rollouts, Any(), new_planner, disk, encode)
        with pytest.raises(TooLarge, match="sampling"):
            await queue.put(ME, Put("job", [PromptSpec(text="1")], [None], terms_of(4, {"stop": "a" * (1 << 20)}, {})))
        assert queue.jobs(ME) == []


async def test_a_consumer_that_gets_nothing_wakes_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with TransactionStore() as disk:
        queue = Queue(Harness(script).rollouts, Texts(), new_planner, disk, encode)
        monkeypatch.setattr(queue, "_wake_up", lambda: pytest.fail("it woke others up"))
        assert await queue.take(ME, "job", 1, 0, 60) == []


async def test_lost_weights_fail_no_prompt() -> None:
    harness = Harness(script)

    class Losing(Texts):
        async def make_request(
            self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str
        ) -> str:
            harness.rollouts.gate.fail(WeightsLost("lost"))
            return await super().make_request(prompt, sampling, size, request_id)

    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Losing(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10", "11"))
        await run(harness)
        await queue.put(ME, put("12"))
        await run(harness)
        assert queue.meter.totals()[EntryState.QUEUED] == 3
        assert queue.meter.counts.failed == 0
        queue.drain()
        await asyncio.sleep(0.01)


async def test_errors_that_nobody_expects_fail_their_prompt_alone() -> None:
    class Broken(Texts):
        async def make_request(
            self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str
        ) -> str:
            if prompt.text == "13":
                raise RuntimeError("template")
            return await super().make_request(prompt, sampling, size, request_id)

    class Damaged(TransactionStore):
        def read(self, kind: str, key: str) -> bytes | None:
            if (kind, key) == ("prompt", "2"):
                raise StateDamaged("checksum")
            return super().read(kind, key)

    def encode_most(result: GroupResult) -> bytes:
        if b"14" in (result.metadata or b""):
            raise ValueError("bytes")
        return encode(result)

    harness = Harness(script)
    with Damaged() as disk:
        queue = Queue(harness.rollouts, Broken(), new_planner, disk, encode_most)
        await queue.put(ME, put("10", "12", "11", "13", "14"))
        queue.open()
        taking = asyncio.create_task(queue.take(ME, "job", 5, 5, 60))
        for _ in range(200):
            await harness.engine.run()
            await asyncio.sleep(0.005)
            if taking.done():
                break
        errors = [json.loads(group.group)["error"] for group in sorted(await taking, key=lambda group: group.lease)]
        assert errors == [None, "checksum", None, "template", "bytes"]
        queue.drain()
        await asyncio.sleep(0.01)


async def test_a_group_whose_consumer_left_before_it_got_it_goes_to_the_next() -> None:
    harness = Harness(script)

    async with opened(harness) as queue:
        await queue.put(ME, put("10"))
        await run(harness)
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert content(await queue.take(ME, "job", 1, 30, 60)) == ["10"]


async def test_the_callers_context_is_not_that_of_the_request_that_put_the_prompts() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        token = caller.set(OTHER)
        await queue.put(ME, put("10"))
        await run(harness)
        caller.reset(token)
        assert harness.recorder.records[0].owner == "me"


async def test_prompts_for_which_the_engine_has_no_room_start_again_later() -> None:
    harness = Harness(script)
    harness.engine.start_error = EngineBusy("the queue is full", 5)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "20"))
        await run(harness)
        await wait_for(queue, queued=2)
        assert queue.meter.counts.aborted == 0
        harness.engine.start_error = None
        taking = asyncio.create_task(queue.take(ME, "job", 2, 30, 60))
        while not taking.done():
            await run(harness)
        groups = await taking
        assert sorted(map(str, content(groups))) == ["10", "20"]
        assert [json.loads(group.group)["error"] for group in groups] == [None, None]


async def test_many_groups_that_are_too_old_or_whose_leases_expire_are_moved_in_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "MOVED_AT_ONCE", 2)
    monkeypatch.setattr(leases, "EXPIRED_AT_ONCE", 2)
    harness = Harness(script)
    texts = [str(10 + number) for number in range(9)]
    async with opened(harness) as queue:
        await queue.put(ME, put(*texts, max_staleness=0))
        await run(harness)
        await wait_for(queue, ready=9)
        assert len(await queue.take(ME, "job", 9, 0, 0.05)) == 9
        await wait_for(queue, ready=9)
        harness.engine.weight_version += 1
        queue.update_ended(UpdateRecord(1, UpdateOutcome.COMPLETED, "push", None, False, {}))
        for _ in range(20):
            await run(harness)
            if queue.meter.counts.stale == 9 and queue.meter.totals()[EntryState.READY] == 9:
                break
        groups = await queue.take(ME, "job", 9, 0, 60)
        assert sorted(content(groups), key=str) == texts
        assert [group.staleness for group in groups] == [0] * 9
        assert queue.meter.counts.expired == 9


async def test_ready_groups_outlive_an_update_that_was_announced_and_failed() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "5000", max_staleness=0))
        await wait_for(queue, running=2)
        await settle()
        while not queue.meter.totals()[EntryState.READY]:
            await harness.engine.step()
            await asyncio.sleep(0.001)
        queue.update_announced(1)
        assert queue.meter.totals()[EntryState.READY] == 1
        queue.update_ended(UpdateRecord(0, UpdateOutcome.FAILED, "push", "finish", False, {}))
        [group] = await queue.take(ME, "job", 1, 0, 60)
        assert (content([group]), group.staleness) == (["10"], 0)
        assert queue.meter.counts.stale == 1, "the running one was stopped"


async def test_a_take_whose_answer_was_lost_gets_its_groups_again() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "11"))
        await run(harness)
        [first] = await queue.take(ME, "job", 1, 30, 60, key="k")
        assert await queue.take(ME, "job", 1, 30, 60, key="k") == [first]
        cancelled = asyncio.create_task(queue.take(ME, "job", 1, 30, 60, key="other"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert await queue.take(ME, "job", 1, 0, 60) == [], "it waits for the request that comes again"
        assert content(await queue.take(ME, "job", 1, 0, 60, key="other")) == ["11"]


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_take_that_cannot_be_written_leaves_its_groups_to_the_next(key: str | None) -> None:
    class Full(TransactionStore):
        is_full = False

        def write(self, changes: Changes) -> None:
            if self.is_full:
                raise StateFull("no space")
            super().write(changes)

    harness = Harness(script)
    with (disk := Full()):
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10"))
        await run(harness)
        disk.is_full = True
        with pytest.raises(StateFull):
            await queue.take(ME, "job", 1, 30, 60, key=key)
        disk.is_full = False
        assert content(await queue.take(ME, "job", 1, 0, 60, key="other")) == ["10"]
        queue.drain()
        await asyncio.sleep(0.01)


async def test_a_damaged_group_starts_again_and_others_are_handed_out() -> None:
    class Damaged(TransactionStore):
        damaged = ("group", "1")

        def read(self, kind: str, key: str) -> bytes | None:
            if (kind, key) == self.damaged:
                raise StateDamaged("checksum")
            return super().read(kind, key)

    harness = Harness(script)
    with (disk := Damaged()):
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10", "11", groups_per_version=2))
        await run(harness)
        assert content(await queue.take(ME, "job", 2, 30, 60)) == ["11"]
        assert queue.jobs(ME)[0].job.taken == 1
        disk.damaged = ("group", "none")
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        await run(harness)
        assert content(await taking) == ["10"]
        queue.drain()
        await asyncio.sleep(0.01)


async def test_a_take_that_finds_only_damaged_groups_waits_for_others() -> None:
    class Damaged(TransactionStore):
        def read(self, kind: str, key: str) -> bytes | None:
            if (kind, key) == ("group", "1"):
                raise StateDamaged("checksum")
            return super().read(kind, key)

    harness = Harness(script)
    with Damaged() as disk:
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10", "500"))
        await wait_for(queue, running=2)
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        while harness.engine.now < 30:
            await harness.engine.step()
            await asyncio.sleep(0.001)
        assert not taking.done()
        await run(harness)
        assert content(await taking) == ["500"]
        queue.drain()
        await asyncio.sleep(0.01)


async def test_a_consumer_gets_a_group_as_soon_as_an_older_one_no_longer_holds_it_back() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        await queue.put(ME, put("10", "5000", "10", groups_per_version=1, max_staleness=1))
        taking = asyncio.create_task(queue.take(ME, "job", 1, 30, 60))
        while not taking.done():
            await harness.engine.step()
            await asyncio.sleep(0.001)
        await taking
        updated(harness, queue)
        await wait_for(queue, running=2)
        while not queue.meter.totals()[EntryState.READY]:
            await harness.engine.step()
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(queue.take(ME, "job", 1, 60, 60))
        await asyncio.sleep(0.02)
        assert not waiting.done(), "it would make the older one too old"
        [older] = queue.jobs(ME)[0].running
        attempt = queue._runner._attempts[older]
        assert attempt.submission is not None
        harness.rollouts.abort(attempt.submission.group_id(attempt.index))
        [group] = await asyncio.wait_for(waiting, 10)
        assert (content([group]), group.staleness) == (["10"], 0)


class Clock:
    """Stands for the module `time`. ``moment``: what its monotonic clock shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moment = 0.0
        self.time = time.time
        monkeypatch.setattr("darts_server.rollout.queue.queue.time", self)

    def monotonic(self) -> float:
        return self.moment


async def test_jobs_outlive_a_step_of_the_clock_and_a_suspended_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, now, clock = Harness(script), 0.0, Clock(monkeypatch)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode, clock=lambda: now)
        queue.open()
        await queue.put(ME, put("5000", expires_after=200.0))
        await wait_for(queue, running=1)
        now = clock.moment = 3600.0
        for _ in range(3):
            queue._wake_up()
            await asyncio.sleep(0.01)
        assert queue.meter.counts.dropped == 0
        assert 1 <= queue._ledger.jobs.clock <= 2
        queue.drain()
        await asyncio.sleep(0.01)


async def test_a_job_that_is_not_used_is_dropped_with_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, clock = Harness(script), Clock(monkeypatch)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Texts(), new_planner, disk, encode)
        queue.open()
        await queue.put(ME, put("5000", expires_after=200.0))
        await wait_for(queue, running=1)
        await settle()
        for _ in range(2000):  # a turn counts one second at most, and two of these may come in the same turn
            clock.moment += 1.0
            queue._wake_up()
            await asyncio.sleep(0.001)
            if not queue.jobs(ME):
                break
        assert clock.moment >= 200
        assert not queue.jobs(ME)
        await run(harness)
        assert (queue.meter.counts.dropped, harness.rollouts.running) == (1, 0)
        queue.drain()
        await asyncio.sleep(0.01)


async def test_admins_delete_jobs_of_others() -> None:
    async with opened(Harness(script)) as queue:
        await queue.put(ME, put("5000"))
        with pytest.raises(NotFound):
            await queue.drop(ADMIN, "job")
        assert await queue.drop(ADMIN, "job", "me") == 1


async def test_one_keys_quota_stops_its_own_prompts_alone() -> None:
    harness = Harness(script)
    harness.rollouts.admission = Admission(lambda: harness.engine.unfinished, None, Bounds(None, max_per_caller=9))
    async with opened(harness) as queue:
        await queue.put(ME, put(*["5000"] * 3))
        await queue.put(OTHER, put("10", "11", "12"))
        taking = asyncio.create_task(queue.take(OTHER, "job", 3, 30, 60))
        while not taking.done():
            await harness.engine.step()
            await asyncio.sleep(0.001)
        assert content(await taking) == ["10", "11", "12"]
        states = {each.job.id[0]: (len(each.running), len(each.order)) for each in queue.jobs(ADMIN)}
        assert states["me"] == (1, 2), "as many as the quota has room for, which one direct request may exceed"


async def test_terms_that_cannot_be_planned_any_more_fail_their_prompt_and_leave_none_running() -> None:
    plans = 0

    def planner(overrides: Mapping[str, object]) -> Planner:
        nonlocal plans
        plans += 1
        if plans > 1:  # after the put
            raise RuntimeError("settings")
        return new_planner(overrides)

    harness = Harness(script)
    with TransactionStore() as disk:
        queue = Queue(harness.rollouts, Texts(), planner, disk, encode)
        queue.open()
        await queue.put(ME, put("10"))
        await run(harness)
        [group] = await queue.take(ME, "job", 1, 5, 60)
        assert json.loads(group.group)["error"] == "settings"
        queue.drain()
        await asyncio.sleep(0.01)


async def test_consumers_are_limited_and_woken_by_their_own_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.rollout.queue.consumers.MAX_CONSUMERS", 1)
    harness = Harness(script)
    async with opened(harness) as queue:
        with queue.count_consumer(ME), queue.count_consumer(OTHER), pytest.raises(QuotaReached):
            queue.count_consumer(ME).__enter__()
        with queue.count_consumer(ME):
            pass
        waiting = asyncio.create_task(queue.wait_for_change(ME, "job", 30))
        await queue.put(ME, put("10", job="other"))
        await run(harness)
        assert len(await queue.take(ME, "other", 1, 30, 60)) == 1
        assert not waiting.done()
        await queue.put(ME, put("10"))
        await run(harness)
        await asyncio.wait_for(waiting, 5)


async def test_many_acknowledgements_leave_others_their_turn() -> None:
    harness = Harness(script)
    async with opened(harness) as queue:
        acknowledging = asyncio.create_task(queue.acknowledge(ME, ["1-x"] * 5000))
        turns = 0
        while not acknowledging.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 10
        assert await acknowledging == [AckOutcome.UNKNOWN] * 5000
