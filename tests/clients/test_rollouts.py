"""Both iterators, against transcripts that a server may tell."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from darts_client import (
    AsyncClient,
    AsyncRollouts,
    Client,
    ConnectionFailed,
    Delta,
    Discard,
    Done,
    Event,
    Group,
    GroupEvent,
    NotFound,
    Overloaded,
    ProtocolError,
    TimedOut,
    TrajectoryEvent,
)

from .answers import URL
from .transcripts import BATCH, GROUPS, TOKENS, Body, Listed, began, breaks, done, error, failed, group, written

POST, GET, DELETE = (
    ("POST", "/darts/v1/rollouts"),
    ("GET", f"/darts/v1/rollouts/{BATCH}"),
    (
        "DELETE",
        f"/darts/v1/rollouts/{BATCH}",
    ),
)
SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 16}


def blocking(server: Listed, **options: Any) -> list[Group]:
    with Client(URL, transport=server.transport) as client:
        return list(client.rollouts(["a", "b"], **SIZES, **options))


def waiting(server: Listed, **options: Any) -> list[Group]:
    async def collect() -> list[Group]:
        async with AsyncClient(URL, transport=server.transport) as client:
            return [group async for group in client.rollouts(["a", "b"], **SIZES, **options)]

    return asyncio.run(collect())


Way = Callable[..., list[Group]]
both = pytest.mark.parametrize("way", [blocking, waiting])


@both
def test_groups_come_in_the_order_of_their_completion(way: Way) -> None:
    server = Listed(Body(*GROUPS))
    assert [group.number for group in way(server)] == [1, 0]
    assert server.asked == [POST]


@both
def test_torn_lines_comments_and_what_a_later_server_tells_change_nothing(way: Way) -> None:
    told = [b": still here\n\n", *GROUPS[:2], b": still here\n\n", b"retry: 5\n\n", *GROUPS[2:]]
    bytes_alone = [bytes([byte]) for byte in b"".join(told)]
    assert [group.number for group in way(Listed(Body(*bytes_alone)))] == [1, 0]
    with_returns = b"".join(told).replace(b"\n", b"\r\n")
    assert [group.number for group in way(Listed(Body(with_returns)))] == [1, 0]


@both
@pytest.mark.parametrize("ending", [breaks, lambda: None])
@pytest.mark.parametrize("torn", range(1, 5))
def test_a_lost_connection_is_picked_up_without_duplicates(way: Way, ending: Callable[[], None], torn: int) -> None:
    half = GROUPS[torn - 1][:20]  # of an event that is not complete, and comes again
    server = Listed(Body(*GROUPS[: torn - 1], half, then=ending), Body(*GROUPS[max(0, torn - 2) :]))
    assert [group.number for group in way(server)] == [1, 0]
    assert server.asked == [POST, POST if torn == 1 else GET]
    first, second = server.requests
    if torn == 1:
        assert second.headers["Idempotency-Key"] == first.headers["Idempotency-Key"]
        assert second.content == first.content
    else:
        assert second.headers["Last-Event-ID"] == str(torn - 1)


@both
def test_a_silent_connection_is_lost(way: Way) -> None:
    def silent() -> None:
        raise httpx.ReadTimeout("silent")

    server = Listed(Body(*GROUPS[:2], then=silent), Body(*GROUPS[2:]))
    assert [group.number for group in way(server)] == [1, 0]


@both
def test_a_batch_that_is_not_durable_ends_with_its_connection(way: Way) -> None:
    server = Listed(Body(*GROUPS[:2], then=breaks))
    with pytest.raises(ConnectionFailed):
        way(server, durable=False)
    assert server.asked == [POST]
    assert "Idempotency-Key" not in server.requests[0].headers


@both
def test_a_batch_that_is_gone_is_an_error(way: Way) -> None:
    gone = httpx.Response(404, json={"error": {"message": "no batch is kept", "param": "batch_id"}})
    with pytest.raises(NotFound, match="no batch"):
        way(Listed(Body(*GROUPS[:2], then=breaks), gone))


@both
def test_a_request_that_was_not_taken_is_sent_again(way: Way) -> None:
    busy = httpx.Response(503, headers={"Retry-After": "0"}, json={"error": {"message": "busy"}})
    server = Listed(httpx.ConnectError("refused"), busy, Body(*GROUPS))
    assert len(way(server, durable=False)) == 2
    assert server.asked == [POST] * 3


@both
def test_an_error_in_the_middle_is_raised_and_nothing_is_tried_again(way: Way) -> None:
    server = Listed(Body(*GROUPS[:2], *written(error("aborted"), first=3)))
    with pytest.raises(Overloaded, match="aborted"):
        way(server)
    assert server.asked == [POST]


@both
def test_an_answer_that_is_no_stream_is_refused(way: Way) -> None:
    with pytest.raises(ProtocolError, match="text/event-stream"):
        way(Listed(*(httpx.Response(200, json={"groups": []}) for _ in range(2))))


@both
def test_nonsense_in_the_middle_stops_the_batch(way: Way) -> None:
    server = Listed(Body(*GROUPS[:2], b"id: 3\nevent: group\ndata: {}\n\n"))
    with pytest.raises(ProtocolError, match=r"event 3 \(group\)"):
        way(server)
    assert server.asked == [POST, DELETE]


@both
def test_failed_groups_are_not_yielded_and_whole_ones_are(way: Way) -> None:
    told = written(began(), ("group", failed(0)), ("group", group(1)), done())
    assert [group.number for group in way(Listed(Body(*told)))] == [1]


@both
def test_the_whole_batch_has_its_time(way: Way) -> None:
    with pytest.raises(TimedOut, match="after 0 s"):
        way(Listed(Body(*GROUPS), Body(*GROUPS)), timeout=0)


def test_what_the_batch_has_told_is_known_afterwards() -> None:
    told = written(began(3), ("group", failed(0)), ("group", group(1)), done(2))
    with (
        Client(URL, transport=Listed(Body(*told)).transport) as client,
        client.rollouts(["a", "b", "c"], num_groups=1, **SIZES) as groups,
    ):
        assert (groups.id, groups.usage) == (None, None)
        assert len(list(groups)) == 1
        assert (groups.id, groups.policy) == (BATCH, "uniform")
        assert groups.usage is not None
        assert groups.usage.returned == 6
        assert [prompt.number for prompt in groups.unfinished] == [2]
        assert [group.number for group in groups.failed] == [0]


def test_to_leave_early_closes_the_connection_and_stops_the_batch() -> None:
    body = Body(*GROUPS)
    server = Listed(body)
    with Client(URL, transport=server.transport) as client:
        with client.rollouts(["a", "b"], **SIZES) as groups:
            for _ in groups:
                break
            assert not body.closed
        assert body.closed
        assert server.asked == [POST, DELETE]


def test_to_forget_the_iterator_stops_the_batch() -> None:
    server = Listed(Body(*GROUPS))
    with Client(URL, transport=server.transport) as client:
        for _ in client.rollouts(["a", "b"], **SIZES):
            break
        gc.collect()
        assert server.asked == [POST, DELETE]


def test_a_server_that_is_gone_does_not_keep_its_callers() -> None:
    server = Listed(Body(*GROUPS))
    with (
        Client(URL, transport=server.transport) as client,
        client.rollouts(["a", "b"], **SIZES) as groups,
    ):
        next(groups)
        server.transport.handler = refuse


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def test_what_is_never_read_sends_nothing() -> None:
    server = Listed()
    with Client(URL, transport=server.transport) as client, client.rollouts("a", **SIZES):
        pass
    assert server.asked == []


@pytest.mark.anyio
async def test_to_leave_early_closes_the_connection_and_stops_the_batch_async() -> None:
    body = Body(*GROUPS)
    server = Listed(body)
    async with AsyncClient(URL, transport=server.transport) as client:
        async with client.rollouts(["a", "b"], **SIZES) as groups:
            async for _ in groups:
                break
            assert not body.closed
        assert body.closed
        assert server.asked == [POST, DELETE]


class Endless(Body):
    """Tells what it has and nothing more."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__(*chunks)
        self.told_all = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk
        self.told_all.set()
        await asyncio.Event().wait()


@pytest.mark.anyio
async def test_to_cancel_the_reader_stops_the_batch() -> None:
    body = Endless(*GROUPS[:2])
    server = Listed(body)
    async with AsyncClient(URL, transport=server.transport) as client:

        async def read() -> list[Group]:
            return [group async for group in client.rollouts(["a", "b"], **SIZES)]

        task = asyncio.create_task(read())
        await body.told_all.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert body.closed
        assert server.asked == [POST, DELETE]


async def consume(stream: AsyncRollouts[Event]) -> list[Event]:
    return [event async for event in stream]


def tokens_of(server: Listed, way: str) -> list[Event]:
    if way == "blocking":
        with Client(URL, transport=server.transport) as client:
            return list(client.stream_tokens("a", chunk_tokens=1, **SIZES))

    async def collect() -> list[Event]:
        async with AsyncClient(URL, transport=server.transport) as client:
            return await consume(client.stream_tokens("a", chunk_tokens=1, **SIZES))

    return asyncio.run(collect())


@pytest.mark.parametrize("way", ["blocking", "waiting"])
def test_tokens_come_as_typed_events_and_the_group_is_whole(way: str) -> None:
    events = tokens_of(Listed(Body(*TOKENS)), way)
    kinds = [Delta, Delta, Delta, TrajectoryEvent, Discard, Delta, TrajectoryEvent, GroupEvent, Done]
    assert [type(event) for event in events] == kinds
    [group] = [event.group for event in events if isinstance(event, GroupEvent)]
    assert [t.token_ids for t in group.trajectories] == [(0,), (0, 1, 2)]
    assert [t.logprobs for t in group.trajectories] == [(0.0,), (0.0, -0.5, -1.0)]
    assert group.lengths == (1, 3)


@pytest.mark.parametrize("lost_after", range(1, len(TOKENS)))
def test_tokens_are_the_same_wherever_the_connection_is_lost(lost_after: int) -> None:
    whole = tokens_of(Listed(Body(*TOKENS)), "blocking")
    server = Listed(Body(*TOKENS[:lost_after], then=breaks), Body(*TOKENS[lost_after:]))
    assert tokens_of(server, "blocking") == whole
    assert server.requests[1].headers["Last-Event-ID"] == str(lost_after)


def test_deltas_of_what_was_discarded_meanwhile_may_be_left_out() -> None:
    server = Listed(Body(*TOKENS[:2], then=breaks), Body(TOKENS[3], *TOKENS[4:]))
    [group] = [event.group for event in tokens_of(server, "blocking") if isinstance(event, GroupEvent)]
    assert group.lengths == (1, 3)


def test_a_failed_group_is_an_event_with_its_error() -> None:
    told = written(began(), ("group", failed(1)))
    with Client(URL, transport=Listed(Body(*told)).transport) as client:
        stream = client.stream_tokens(["a", "b"], durable=False, **SIZES)
        event = next(stream)
    assert isinstance(event, GroupEvent)
    assert str(event.group.error) == "HTTP 500: too few could finish"
