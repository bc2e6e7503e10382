"""Durable batches, which run on without their caller and are kept."""

import asyncio
import gc
import tracemalloc
from array import array

import pytest

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import (
    Conflict,
    GroupAborted,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaReached,
    TooLarge,
)
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.events import BatchFailed
from darts_server.rollout.batches.registry import BatchRetention, kept_bytes
from darts_server.rollout.batches.run import AnswerFormat, BatchRun
from darts_server.types import FinishReason, Outcome, PromptSpec, Sample
from tests.rollout.batches.streams import (
    GROUPS,
    STOPPING,
    WHOLE,
    Server,
    batch_request,
    idempotency_key,
    new_server,
    read_events,
    token_stream,
)
from tests.rollout.helpers import Texts, lengths
from tests.rollout.joining.joining import SteppedLoop

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server() -> Server:
    return new_server(lengths(5), retention=BatchRetention(resume_seconds=60, kept_seconds=600, kept_batches=2))


@pytest.fixture
async def bounded() -> Server:
    return new_server(lengths(5), retention=BatchRetention(kept_bytes=400_000))


async def pass_time(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await settle()


def is_kept(server: Server, batch: BatchRun) -> bool:
    try:
        return server.registry.find(batch.batch_id) is batch
    except NotFound:
        return False


async def test_the_same_key_gives_the_same_batch_while_it_runs_and_afterwards(server: Server) -> None:
    first, second = await asyncio.gather(
        *(server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key()) for _ in range(2))
    )
    assert first is second
    await server.engine.run()
    done = await first.wait()
    assert len(done.results) == 2
    assert await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key()) is first
    assert server.registry.find(first.batch_id) is first
    assert server.harness.recorder.started == 12


async def test_a_key_belongs_to_one_caller_and_one_body(server: Server) -> None:
    first = await server.registry.start_or_find(batch_request(1), WHOLE, idempotency_key())
    with pytest.raises(Conflict) as refused:
        await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key(body=b"other"))
    assert refused.value.field == "Idempotency-Key"
    assert await server.registry.start_or_find(batch_request(1), WHOLE, idempotency_key(owner="other")) is not first


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_refused_batch_leaves_its_key_and_its_bytes_free_also_if_its_callers_have_left(
    bounded: Server, leaves: bool
) -> None:
    wrong = BatchRequest([PromptSpec(text="x")], 4)
    callers = [
        asyncio.create_task(bounded.registry.start_or_find(wrong, WHOLE, idempotency_key(body_bytes=150_000)))
        for _ in range(2)
    ]
    await asyncio.sleep(0)
    if leaves:
        for each in callers:
            each.cancel()
    refused = await asyncio.gather(*callers, return_exceptions=True)
    assert {type(one) for one in refused} == {asyncio.CancelledError if leaves else InvalidRequest}
    await settle()
    await bounded.registry.start_or_find(batch_request(1), WHOLE, idempotency_key(body=b"right", body_bytes=150_000))


async def test_a_durable_batch_is_cancelled_if_its_caller_does_not_come_back(server: Server) -> None:
    batch = await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key())
    await pass_time(50)
    with batch.listen():
        await pass_time(100)
    assert batch.end is None
    await pass_time(59)
    assert len(server.engine.running) == 12
    await pass_time(2)
    assert not server.engine.running
    assert [record.outcome for record in server.harness.recorder.records] == [Outcome.CANCELLED] * 2
    assert not is_kept(server, batch)
    assert await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key()) is not batch


@pytest.mark.parametrize("leaves_at_once", [False, True])
async def test_a_batch_without_a_key_is_cancelled_with_its_caller_and_not_kept(leaves_at_once: bool) -> None:
    server = new_server(lengths(50), "cut")
    batch = await server.registry.start_or_find(batch_request(2), WHOLE)
    assert not is_kept(server, batch)
    with batch.listen():
        if not leaves_at_once:
            await settle()
            assert len(server.engine.running) == 12
    await settle()
    assert not server.engine.running
    assert not server.harness.rollouts.runs
    assert len(server.harness.recorder.cohorts) == 1
    with pytest.raises(NotFound):
        server.registry.cancel(batch.batch_id)


async def test_ended_batches_are_kept_for_a_time_and_the_oldest_are_dropped_first(server: Server) -> None:
    opened = []
    for name in "abc":
        opened.append(await server.registry.start_or_find(batch_request(1), WHOLE, idempotency_key(name)))
        await server.engine.run()
        await pass_time(1)
    assert [is_kept(server, batch) for batch in opened] == [False, True, True]
    await pass_time(598.5)
    assert [is_kept(server, batch) for batch in opened] == [False, False, True]
    await pass_time(1)
    assert not is_kept(server, opened[2])
    assert await server.registry.start_or_find(batch_request(1), WHOLE, idempotency_key("c")) not in opened


async def test_no_ended_batch_is_kept_with_a_limit_of_zero() -> None:
    server = new_server(lengths(5), retention=BatchRetention(kept_batches=0))
    batch = await server.registry.start_or_find(batch_request(1), WHOLE, idempotency_key())
    await server.engine.run()
    await settle()
    assert batch.end is not None
    assert not is_kept(server, batch)


async def test_ended_batches_of_one_caller_push_out_none_of_another(server: Server) -> None:
    opened = []
    for number, owner in enumerate(("victim", "flooder", "flooder", "flooder")):
        key = idempotency_key(str(number), owner=owner)
        opened.append(await server.registry.start_or_find(batch_request(1), WHOLE, key))
        await server.engine.run()
        await settle()
    assert [is_kept(server, batch) for batch in opened] == [True, False, False, True]


async def test_cancelling_stops_a_batch_once_and_raises_in_its_callers(server: Server) -> None:
    for key in (idempotency_key(), None):
        batch = await server.registry.start_or_find(batch_request(2), WHOLE, key)
        with batch.listen():
            waiting = asyncio.ensure_future(batch.wait())
            await settle()
            assert server.registry.cancel(batch.batch_id)
            with pytest.raises(GroupAborted):
                await waiting
        await settle()
        assert not server.engine.running
    cancelled = await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key())
    assert not server.registry.cancel(cancelled.batch_id)


async def test_draining_cancels_batches_without_a_listener(server: Server) -> None:
    alone, attended = [
        await server.registry.start_or_find(batch_request(2), WHOLE, idempotency_key(key)) for key in ("a", "b")
    ]
    with attended.listen():
        server.registry.drain()
        with pytest.raises(GroupAborted, match="stopping"):
            await alone.wait()
        await server.engine.run()
        assert len((await attended.wait()).results) == 2


async def test_failing_ends_streams_with_the_error_and_answers_the_others() -> None:
    server = new_server(lambda prompt, _: Script(5 if prompt == "0" else 5000))
    stream = await server.registry.start_or_find(batch_request(2), token_stream())
    whole = await server.registry.start_or_find(batch_request(2), WHOLE)
    with whole.listen():
        hearing = asyncio.ensure_future(read_events(stream))
        await server.harness.steps(10)
        server.registry.fail(STOPPING)
        server.harness.rollouts.fail_all(STOPPING)
        events = await hearing
        assert events[-1][1] == BatchFailed(STOPPING)
        done = await whole.wait()
        assert [result.error for result in sorted(done.results, key=lambda r: r.number)] == [None, STOPPING]
    await settle()
    assert not server.engine.running


# --- bytes ------------------------------------------------------------------


def large(size: int) -> BatchRequest:
    return BatchRequest([PromptSpec(text="0", metadata=b"x" * size)], 4)


async def test_ended_batches_are_kept_up_to_a_limit_in_bytes_and_half_of_it_for_one_caller(bounded: Server) -> None:
    async def run(key: str, owner: str, size: int) -> BatchRun:
        batch = await bounded.registry.start_or_find(large(size), WHOLE, idempotency_key(key, owner=owner))
        with batch.listen():
            await bounded.engine.run()
            await batch.wait()
        assert size < kept_bytes(batch) < size + 20_000
        return batch

    first, second = await run("1", "a", 80_000), await run("2", "a", 80_000)
    other = await run("1", "b", 80_000)
    assert all(is_kept(bounded, batch) for batch in (first, second, other))
    third = await run("3", "a", 80_000)
    assert [is_kept(bounded, batch) for batch in (first, second, other, third)] == [False, True, True, True]
    too_large = await run("4", "b", 210_000)
    assert [is_kept(bounded, batch) for batch in (second, other, third, too_large)] == [True, False, True, False]
    last = [await run("5", owner, 140_000) for owner in ("b", "c")]
    assert [is_kept(bounded, batch) for batch in (second, third, *last)] == [False, True, True, True]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_sampling_parameters_count_however_their_batch_has_ended(bounded: Server, is_cancelled: bool) -> None:
    batch = await bounded.registry.start_or_find(batch_request(1), WHOLE, idempotency_key("1"))
    batch.sampling = {"stop": ["x" * 250_000]}
    if is_cancelled:
        bounded.registry.cancel(batch.batch_id)
    else:
        await bounded.engine.run()
        await settle()
    assert batch.end is not None
    assert kept_bytes(batch) > 250_000
    assert not is_kept(bounded, batch)


class Arrays(Texts):
    """Create samples with arrays, as the engine does."""

    async def to_sample(self, output: list[int]) -> Sample:
        tokens, logprobs = array("i", output), array("d", [-token / 8 for token in output])
        return Sample(tokens, logprobs, "t" * len(output), FinishReason.STOP)


@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("answer_format", [WHOLE, GROUPS, token_stream(1), token_stream(100)])
async def test_a_kept_batch_counts_with_its_memory(
    answer_format: AnswerFormat, is_cancelled: bool, tokens: int
) -> None:
    server = new_server(lengths(tokens), texts=Arrays())
    tracemalloc.start()
    try:
        batch = await server.registry.start_or_find(batch_request(8, size=8), answer_format, idempotency_key())
        reading = asyncio.ensure_future(batch.wait() if batch.feed is None else read_events(batch))
        with batch.listen():
            await server.harness.steps(tokens - 1)
            if is_cancelled:
                server.registry.cancel(batch.batch_id)
            await settle()
            await server.engine.run()
            await asyncio.wait([reading])
            reading.exception()
        await settle()
        counted = kept_bytes(batch)
        assert is_kept(server, batch)
        # What is freed with the batch is what was kept for it.
        del reading
        server.harness.recorder.records.clear()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        server.registry._drop(server.registry._durable[idempotency_key()])
        del batch
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = before - after
    assert kept / 1.5 < counted < 1.5 * kept


async def test_running_batches_count_by_the_size_of_their_requests(bounded: Server) -> None:
    async def open_batch(key: str, owner: str, size: int) -> BatchRun:
        return await bounded.registry.start_or_find(
            batch_request(1), WHOLE, idempotency_key(key, owner=owner, body_bytes=size)
        )

    with pytest.raises(TooLarge, match="at most 200000 bytes with Idempotency-Key"):
        await open_batch("1", "a", 200_001)
    await open_batch("1", "a", 150_000)
    with pytest.raises(QuotaReached, match="this key's running batches"):
        await open_batch("2", "a", 60_000)
    await open_batch("1", "b", 200_000)
    with pytest.raises(Overloaded, match="all running batches"):
        await open_batch("1", "c", 60_000)
    await bounded.engine.run()
    await settle()
    await open_batch("2", "a", 190_000)
    assert bounded.harness.recorder.started == 18


async def test_a_batch_that_starts_takes_the_place_of_ended_ones(bounded: Server) -> None:
    ended = await bounded.registry.start_or_find(large(100_000), WHOLE, idempotency_key("1"))
    with ended.listen():
        await bounded.engine.run()
        await ended.wait()
    assert is_kept(bounded, ended)
    await bounded.registry.start_or_find(batch_request(1), WHOLE, idempotency_key("2", body_bytes=150_000))
    assert not is_kept(bounded, ended)
