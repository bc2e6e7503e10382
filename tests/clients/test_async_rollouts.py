"""The client's iterators, against event streams of a fake server."""

import gc
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from darts_client import Client, Event, Group, GroupEvent, NotFound, ProtocolError

from .transcripts import BATCH, GROUPS, TOKENS, Body, FakeServer, lose_connection
from .vllm_answers import URL

pytestmark = pytest.mark.usefixtures("no_delays")
POST = ("POST", "/darts/v1/rollouts")
GET = ("GET", f"/darts/v1/rollouts/{BATCH}")
DELETE = ("DELETE", f"/darts/v1/rollouts/{BATCH}")
SIZES: dict[str, Any] = {"group_size": 2, "max_tokens": 16}


def read_groups(server: FakeServer, **options: Any) -> list[Group]:
    with Client(URL, transport=server.transport) as client:
        return list(client.rollouts(["a", "b"], **SIZES, **options))


def read_events(server: FakeServer) -> list[Event]:
    with Client(URL, transport=server.transport) as client:
        return list(client.stream_tokens("a", chunk_tokens=1, **SIZES))


def test_split_lines_comments_and_unknown_fields_change_nothing() -> None:
    stream = [b": ping\n\n", *GROUPS[:2], b": ping\n\n", b"retry: 5\n\n", *GROUPS[2:]]
    single_bytes = [bytes([byte]) for byte in b"".join(stream)]
    assert [group.number for group in read_groups(FakeServer(Body(*single_bytes)))] == [1, 0]
    with_crlf = b"".join(stream).replace(b"\n", b"\r\n")
    assert [group.number for group in read_groups(FakeServer(Body(with_crlf)))] == [1, 0]


def time_out() -> None:
    raise httpx.ReadTimeout("silent")


@pytest.mark.parametrize("ending", [lose_connection, time_out, lambda: None])
@pytest.mark.parametrize("received", range(len(TOKENS)))
def test_a_lost_connection_is_resumed_without_duplicates(ending: Callable[[], None], received: int) -> None:
    half = TOKENS[received][:20]  # of an event that is incomplete, and sent again
    server = FakeServer(Body(*TOKENS[:received], half, then=ending), Body(*TOKENS[max(0, received - 1) :]))
    assert read_events(server) == read_events(FakeServer(Body(*TOKENS)))
    assert server.routes == [POST, GET if received else POST]
    first, second = server.requests
    if received:
        assert second.headers["Last-Event-ID"] == str(received)
    else:
        assert second.headers["Idempotency-Key"] == first.headers["Idempotency-Key"]
        assert second.content == first.content


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


def test_a_batch_that_is_not_read_sends_nothing() -> None:
    server = FakeServer()
    with Client(URL, transport=server.transport) as client, client.rollouts("a", **SIZES):
        pass
    assert server.requests == []


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


def test_deltas_of_a_candidate_discarded_meanwhile_may_be_missing() -> None:
    server = FakeServer(Body(*TOKENS[:2], then=lose_connection), Body(TOKENS[3], *TOKENS[4:]))
    [group] = [event.group for event in read_events(server) if isinstance(event, GroupEvent)]
    assert group.lengths == (1, 3)
