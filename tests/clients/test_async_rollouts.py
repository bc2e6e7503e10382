"""The iterators of both clients (one is made of the other), against event streams of a fake server."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from darts_client import (
    AsyncClient,
    Client,
    Delta,
    Discard,
    Done,
    Event,
    Group,
    GroupEvent,
    NotFound,
    ProtocolError,
    TrajectoryEvent,
)

from .transcripts import BATCH, GROUPS, TOKENS, Body, FakeServer, lose_connection
from .vllm_answers import URL

pytestmark = pytest.mark.usefixtures("no_delays")
POST, GET, DELETE = (
    ("POST", "/darts/v1/rollouts"),
    ("GET", f"/darts/v1/rollouts/{BATCH}"),
    ("DELETE", f"/darts/v1/rollouts/{BATCH}"),
)
SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 16}


def read_groups(server: FakeServer, **options: Any) -> list[Group]:
    with Client(URL, transport=server.transport) as client:
        return list(client.rollouts(["a", "b"], **SIZES, **options))


def test_split_lines_comments_and_unknown_fields_change_nothing() -> None:
    stream = [b": ping\n\n", *GROUPS[:2], b": ping\n\n", b"retry: 5\n\n", *GROUPS[2:]]
    single_bytes = [bytes([byte]) for byte in b"".join(stream)]
    assert [group.number for group in read_groups(FakeServer(Body(*single_bytes)))] == [1, 0]
    with_crlf = b"".join(stream).replace(b"\n", b"\r\n")
    assert [group.number for group in read_groups(FakeServer(Body(with_crlf)))] == [1, 0]


def time_out() -> None:
    raise httpx.ReadTimeout("silent")


@pytest.mark.parametrize("ending", [lose_connection, time_out, lambda: None])
@pytest.mark.parametrize("cut", range(1, 5))
def test_a_lost_connection_is_resumed_without_duplicates(ending: Callable[[], None], cut: int) -> None:
    half = GROUPS[cut - 1][:20]  # of an event that is incomplete, and sent again
    server = FakeServer(Body(*GROUPS[: cut - 1], half, then=ending), Body(*GROUPS[max(0, cut - 2) :]))
    assert [group.number for group in read_groups(server)] == [1, 0]
    assert server.routes == [POST, POST if cut == 1 else GET]
    first, second = server.requests
    if cut == 1:
        assert second.headers["Idempotency-Key"] == first.headers["Idempotency-Key"]
        assert second.content == first.content
    else:
        assert second.headers["Last-Event-ID"] == str(cut - 1)


def test_a_request_that_was_not_accepted_is_retried() -> None:
    busy = httpx.Response(503, headers={"Retry-After": "0"}, json={"error": {"message": "busy"}})
    server = FakeServer(httpx.ConnectError("refused"), busy, Body(*GROUPS))
    assert len(read_groups(server, durable=False)) == 2
    assert server.routes == [POST] * 3


def test_an_unknown_batch_and_an_answer_without_event_stream_are_errors() -> None:
    not_found = httpx.Response(404, json={"error": {"message": "no batch is kept", "param": "batch_id"}})
    with pytest.raises(NotFound, match="no batch"):
        read_groups(FakeServer(Body(*GROUPS[:2], then=lose_connection), not_found))
    with pytest.raises(ProtocolError, match="text/event-stream"):
        read_groups(FakeServer(*(httpx.Response(200, json={"groups": []}) for _ in range(2))))


def test_an_invalid_event_cancels_the_batch() -> None:
    server = FakeServer(Body(*GROUPS[:2], b"id: 3\nevent: group\ndata: {}\n\n"))
    with pytest.raises(ProtocolError, match=r"event 3 \(group\)"):
        read_groups(server)
    assert server.routes == [POST, DELETE]


def test_leaving_early_closes_the_connection_and_cancels_the_batch() -> None:
    body = Body(*GROUPS)
    server = FakeServer(body)
    with Client(URL, transport=server.transport) as client:
        with client.rollouts(["a", "b"], **SIZES) as groups:
            for _ in groups:
                break
            assert not body.closed
        assert body.closed
        assert server.routes == [POST, DELETE]
        with client.rollouts("a", **SIZES):  # one that is not read sends nothing
            pass
        assert server.routes == [POST, DELETE]


def test_leaving_early_works_without_the_server() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    server = FakeServer(Body(*GROUPS))
    with Client(URL, transport=server.transport) as client, client.rollouts(["a", "b"], **SIZES) as groups:
        next(groups)
        server.transport.handler = refuse


def test_a_garbage_collected_iterator_cancels_the_batch() -> None:
    server = FakeServer(Body(*GROUPS))
    with Client(URL, transport=server.transport) as client:
        for _ in client.rollouts(["a", "b"], **SIZES):
            break
        gc.collect()
        assert server.routes == [POST, DELETE]


class Endless(Body):
    """Sends its chunks, then stays open."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__(*chunks)
        self.all_sent = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        self.all_sent.set()
        await asyncio.Event().wait()


@pytest.mark.anyio
async def test_cancelling_the_reader_cancels_the_batch() -> None:
    body = Endless(*GROUPS[:2])
    server = FakeServer(body)
    async with AsyncClient(URL, transport=server.transport) as client:

        async def read() -> list[Group]:
            return [group async for group in client.rollouts(["a", "b"], **SIZES)]

        task = asyncio.create_task(read())
        await body.all_sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert body.closed
        assert server.routes == [POST, DELETE]


def read_events(server: FakeServer) -> list[Event]:
    with Client(URL, transport=server.transport) as client:
        return list(client.stream_tokens("a", chunk_tokens=1, **SIZES))


def test_tokens_are_typed_events_and_the_group_is_complete() -> None:
    events = read_events(FakeServer(Body(*TOKENS)))
    kinds = [Delta, Delta, Delta, TrajectoryEvent, Discard, Delta, TrajectoryEvent, GroupEvent, Done]
    assert [type(event) for event in events] == kinds
    [group] = [event.group for event in events if isinstance(event, GroupEvent)]
    assert [t.token_ids for t in group.trajectories] == [(0,), (0, 1, 2)]
    assert [t.logprobs for t in group.trajectories] == [(0.0,), (0.0, -0.5, -1.0)]
    assert group.lengths == (1, 3)


@pytest.mark.parametrize("lost_after", range(1, len(TOKENS)))
def test_tokens_are_the_same_wherever_the_connection_is_lost(lost_after: int) -> None:
    whole = read_events(FakeServer(Body(*TOKENS)))
    server = FakeServer(Body(*TOKENS[:lost_after], then=lose_connection), Body(*TOKENS[lost_after:]))
    assert read_events(server) == whole
    assert server.requests[1].headers["Last-Event-ID"] == str(lost_after)


def test_deltas_of_a_candidate_discarded_meanwhile_may_be_missing() -> None:
    server = FakeServer(Body(*TOKENS[:2], then=lose_connection), Body(TOKENS[3], *TOKENS[4:]))
    [group] = [event.group for event in read_events(server) if isinstance(event, GroupEvent)]
    assert group.lengths == (1, 3)
