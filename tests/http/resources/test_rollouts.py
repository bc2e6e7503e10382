"""Answers to a batch as JSON, as tensors and as events, on the scripted engine."""

import asyncio
import json
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, aclosing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import safetensors.numpy
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Message, Scope

from darts_server.caller import Caller, caller
from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import EngineRefused, GroupAborted, NotAcceptable, QuotaReached
from darts_server.http import errors
from darts_server.http.answers import JSON, MAX_READERS, SLICE_BYTES, SharedEncodings, encode_json
from darts_server.http.resources.rollouts import (
    Reading,
    _respond,
    add_routes,
    choose_media_type,
    encode_ascii,
    encode_batch_event,
    encode_events,
)
from darts_server.http.token_tensors import MEDIA_TYPE as TENSORS
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from tests.rollout.batches.conftest import anyio_backend
from tests.rollout.batches.streams import (
    batch_request,
    begin,
    finish,
    idempotency_key,
    new_registry,
    request,
    token_stream,
)
from tests.rollout.batches.test_saved import InMemory, serving
from tests.rollout.helpers import Harness, lengths

__all__ = ["anyio_backend"]

pytestmark = pytest.mark.anyio
PROMPTS: list[dict[str, Any]] = [{"text": "1", "metadata": {"n": 2**70, "ü": "日\u2028"}}, {"text": "2"}]
BODY = {"prompts": PROMPTS, "group_size": 4}
KEY = {"Idempotency-Key": "one"}


# --- JSON and tensors -------------------------------------------------------


@pytest.fixture
async def harness() -> Harness:
    return Harness(lengths(5, 60, 7, 50, 1, 30))


@pytest.fixture
async def registry(harness: Harness) -> BatchRegistry[str, list[int]]:
    return new_registry(harness, "shortest")


@pytest.fixture
async def client(registry: BatchRegistry[str, list[int]]) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    errors.install_handlers(app)
    add_routes(app.router, registry)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as made:
        yield made


def with_lists(tensors: dict[str, Any]) -> Any:
    """Return the JSON answer of an answer with tensors."""
    answer = json.loads(tensors["answer"].tobytes())
    offsets = tensors["offsets"].tolist()
    for holder in [*answer["groups"], *answer["unfinished"]]:
        for name in ("aborted", "trajectories"):
            for item in holder.get(name) or ():
                for field in ("token_ids", "logprobs"):
                    if (row := item[field]) is not None:
                        item[field] = tensors[field][offsets[row] : offsets[row + 1]].tolist()
    return answer


async def post(client: httpx.AsyncClient, harness: Harness, body: Any, **headers: str) -> httpx.Response:
    sending = asyncio.ensure_future(client.post("/rollouts", json=body, headers=headers))
    while not sending.done():
        await harness.engine.step()
    return await sending


async def test_both_forms_have_the_same_trajectories(harness: Harness, client: httpx.AsyncClient) -> None:
    plain = await post(client, harness, BODY, **KEY)
    assert plain.headers["content-type"] == "application/json"
    assert [len(group["trajectories"]) for group in plain.json()["groups"]] == [4, 4]
    assert plain.json()["groups"][0]["metadata"] == PROMPTS[0]["metadata"]
    again = await post(client, harness, BODY, **KEY, Accept=TENSORS)
    fetched = await client.get(f"/rollouts/{plain.json()['id']}", headers={"Accept": f"{TENSORS}, */*;q=0.1"})
    for answer in (again, fetched):
        assert (answer.status_code, answer.headers["content-type"]) == (200, TENSORS)
        assert with_lists(safetensors.numpy.load(answer.content)) == plain.json()


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("APPLICATION/JSON", JSON),
        (TENSORS, TENSORS),
        (f"{JSON}, {TENSORS}", JSON),
        (f"{TENSORS}, {JSON}", JSON),
        (f"{TENSORS}, {JSON};q=0.9", TENSORS),
        (f"{TENSORS};q=0.5, */*;q=0.1", TENSORS),
        (f"{TENSORS} ; q = 0.5 , {JSON};charset=utf-8;q=0.6", JSON),
        (f"*/*, {JSON};q=0", TENSORS),
        (f"{TENSORS};q=0, text/html", None),
        ("application/*;q=0, */*", None),
        ("text/html, application/xhtml+xml;q=0.9", None),
        ("json", None),
    ],
)
def test_the_preferred_form_is_chosen(accept: str, chosen: str | None) -> None:
    with nullcontext() if chosen else pytest.raises(NotAcceptable):
        assert choose_media_type(Headers({"accept": accept}), streams=False) == chosen


def test_several_headers_are_one_list() -> None:
    raw = [(b"accept", b"text/html"), (b"accept", TENSORS.encode())]
    assert choose_media_type(Headers(raw=raw), streams=False) == TENSORS


@pytest.mark.parametrize(
    ("stream", "accept", "offers"),
    [
        (False, "application/msgpack", "application/json or application/vnd.safetensors"),
        ("groups", TENSORS, "text/event-stream"),
    ],
)
async def test_another_form_is_refused_before_anything_starts(
    harness: Harness, client: httpx.AsyncClient, stream: object, accept: str, offers: str
) -> None:
    answer = await post(client, harness, {**BODY, "stream": stream}, Accept=accept)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (406, "NotAcceptableError", "Accept")
    assert f"accept {offers}, or" in error["message"]
    assert not harness.engine.started


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream", "application/json"])
async def test_a_stream_is_a_stream_also_for_callers_that_always_accept_json(
    harness: Harness, client: httpx.AsyncClient, accept: str
) -> None:
    answer = await post(client, harness, {**BODY, "stream": "groups"}, **KEY, Accept=accept)
    assert answer.headers["content-type"].startswith("text/event-stream")
    batch_id = json.loads(answer.text.split("data: ", 1)[1].split("\n", 1)[0])["id"]
    refused = await client.get(f"/rollouts/{batch_id}", headers={"Accept": TENSORS})
    assert refused.status_code == 406


# --- groups that were aborted -----------------------------------------------


def by_text(text: str, index: int) -> Script:
    return Script(int(text), error=EngineRefused("no") if text == "6" else None)


async def answer_of(batch: BatchRun, media_type: str = JSON) -> Any:
    """Return the response to a caller that stays connected."""
    caller: Any = SimpleNamespace(receive=asyncio.Event().wait)
    return await _respond(caller, batch, media_type, Reading(), last_number=0)


async def read_answer(batch: BatchRun) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes((await answer_of(batch)).body))
    return body


async def abort(steps: int, *texts: str, carry: Carry = Carry.DROP) -> BatchRun:
    """Run a batch whose groups are aborted after some steps."""
    harness = Harness(by_text)
    batch = await begin(harness, new_registry(harness, "shortest"), request(*texts, carry=carry), steps)
    harness.rollouts.abort_all("an update")
    await finish(harness, batch)
    return batch


async def test_an_aborted_group_has_an_error_and_the_output_of_its_candidates() -> None:
    batch = await abort(9, "30", "5")
    body = await read_answer(batch)
    aborted, whole = body["groups"]
    assert (whole["error"], whole["aborted"], len(whole["trajectories"])) == (None, None, 4)
    assert aborted["error"] == {"message": "an update", "type": "InternalServerError", "param": None, "code": 503}
    assert (aborted["trajectories"], aborted["discarded"], aborted["num_eligible"]) == ([], [], None)
    assert (aborted["candidates"], aborted["mask"]) == (6, [False] * 6)
    assert [one["trajectory_id"] for one in aborted["aborted"]] == [f"{aborted['group_id']}:{i}" for i in range(6)]
    one = aborted["aborted"][3]
    assert (one["token_ids"], one["length"], one["cut"]) == (list(range(9)), 9, False)
    assert one["logprobs"] == [-token / 8 for token in range(9)]
    assert (one["weight_version_start"], one["weight_version_end"], one["version_spans"]) == (0, 0, [[0, 9]])
    assert body["usage"]["returned"] == 20
    assert body["usage"]["generated"] == 20 + 6 * 9 + sum(d["length"] for d in whole["discarded"])
    response = await answer_of(batch, TENSORS)
    tensors = b"".join([chunk async for chunk in response.body_iterator])
    assert with_lists(safetensors.numpy.load(tensors)) == body


async def test_a_batch_that_has_nothing_to_return_is_answered_with_the_error() -> None:
    with pytest.raises(GroupAborted, match="an update"):
        await answer_of(await abort(0, "30"))


@pytest.mark.parametrize("failing", [(), ("6",)])
async def test_prompts_that_are_carried_over_are_returned_also_if_all_groups_have_failed(failing: tuple[str]) -> None:
    """Otherwise their caller would think that the prompts are lost, and send them again."""
    body = await read_answer(await abort(9, *failing, "30", carry=Carry.RESUME))
    assert [group["error"]["message"] for group in body["groups"]] == ["no" for _ in failing]
    assert body["carried"] == 1
    [prompt] = body["unfinished"]
    assert (prompt["number"], prompt["carry"], prompt["error"]["message"]) == (len(failing), "resume", "an update")


async def test_output_that_is_not_kept_for_a_later_batch_is_in_the_answer_and_in_the_last_event() -> None:
    """A server stops after an update, so the next server cannot continue the tokens."""
    async with serving(InMemory(), by_text, has_initial_weights=False) as server:
        batch = await server.begin(9, "30", carry=Carry.RESUME)
        await server.stop()
        body = await read_answer(batch)
        assert batch.end is not None
        last = encode_batch_event(9, batch.end, StreamMode.GROUPS).decode().split("data: ", 1)[1]
    assert (body["groups"], body["carried"]) == ([], 1)
    [prompt] = body["unfinished"]
    assert (prompt["carry"], prompt["error"]["code"]) == ("resume", 503)
    assert [(one["length"], one["version_spans"]) for one in prompt["aborted"]] == [(9, [[0, 9]])] * 6
    assert json.loads(last)["unfinished"] == body["unfinished"]


# --- events -----------------------------------------------------------------


def parse_events(text: bytes) -> list[tuple[str, int, dict[str, Any]]]:
    frames = [dict(line.split(": ", 1) for line in frame.split("\n")) for frame in text.decode().split("\n\n") if frame]
    return [(frame["event"], int(frame["id"]), json.loads(frame["data"])) for frame in frames]


async def test_events_that_come_between_two_reads_are_sent_together() -> None:
    harness = Harness(lengths(40))
    batch = await new_registry(harness, "off").start_or_find(batch_request(1, size=2), token_stream(4))
    assert batch.feed is not None
    with batch.listen():
        async with aclosing(encode_events(batch.feed, 0, StreamMode.TOKENS, SharedEncodings())) as stream:
            began = parse_events(await anext(stream))
            for _ in range(20):
                await harness.engine.step()
            [first, second] = parse_events(await anext(stream))
            await harness.engine.run()
            rest = [event for text in [text async for text in stream] for event in parse_events(text)]
    assert [name for name, _, _ in began] == ["batch"]
    assert (first[0], first[1], second[1]) == ("delta", 2, 3)
    assert len(first[2]["token_ids"]) > 15
    assert [name for name, _, _ in rest] == ["delta", "trajectory", "delta", "trajectory", "group", "done"]
    assert [number for _, number, _ in rest] == list(range(4, 10))


async def test_chunks_are_not_much_larger_than_the_web_servers_buffer() -> None:
    harness = Harness(lengths(1000))
    batch = await new_registry(harness, "off").start_or_find(
        batch_request(10, size=8), token_stream(10_000), idempotency_key()
    )
    await settle()
    await harness.engine.run()
    assert batch.feed is not None
    with batch.listen():
        sizes = [len(text) async for text in encode_events(batch.feed, 0, StreamMode.TOKENS, SharedEncodings())]
    assert len(sizes) > 10
    assert max(sizes) < 3 * SLICE_BYTES


# --- many readers of what is kept -------------------------------------------


class Connection:
    """A connection that reads only the first parts of its answer until ``is_read`` is set."""

    scope: ClassVar[Scope] = {"type": "http", "method": "GET", "asgi": {"spec_version": "2.3"}}

    def __init__(self, first: int) -> None:
        self.first = first
        self.parts: list[bytes] = []
        self.is_read = asyncio.Event()

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.parts.append(message["body"])
            if len(self.parts) >= self.first:
                await self.is_read.wait()


async def kept_batch(stream: StreamMode = StreamMode.OFF) -> BatchRun:
    """Run a batch of one group, whose answer has about a megabyte."""
    harness = Harness(lengths(9000))
    registry = new_registry(harness, "off")
    batch = await registry.start_or_find(batch_request(1, size=8), AnswerFormat(stream), idempotency_key())
    await finish(harness, batch)
    return batch


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("stream", "media_type"), [(StreamMode.OFF, JSON), (StreamMode.OFF, TENSORS), (StreamMode.GROUPS, "")]
)
async def test_readers_that_do_not_read_share_one_encoding_and_cost_a_slice_each(
    stream: StreamMode, media_type: str
) -> None:
    batch = await kept_batch(stream)
    reading = Reading()
    connections = [Connection(1 if stream is StreamMode.OFF else 2) for _ in range(40)]

    async def answer(connection: Connection) -> None:
        caller: Any = SimpleNamespace(receive=asyncio.Event().wait)
        response = await _respond(caller, batch, media_type, reading, last_number=0)
        await response(connection.scope, connection.receive, connection.send)

    with traced():
        sending = [asyncio.create_task(answer(connection)) for connection in connections]
        for connection in connections:
            while len(connection.parts) < connection.first:
                await asyncio.sleep(0)
        taken, _ = tracemalloc.get_traced_memory()
    assert len(reading.answers) + len(reading.events) == 1
    for connection in connections:
        connection.is_read.set()
    await asyncio.gather(*sending)
    bodies = {b"".join(connection.parts) for connection in connections}
    assert len(bodies) == 1
    [body] = bodies
    assert len(body) > 5 * SLICE_BYTES
    assert max(len(part) for part in connections[0].parts) <= 2 * SLICE_BYTES
    assert taken < 3 * len(body) + 40 * 3 * SLICE_BYTES, "forty encodings would be much more"
    assert len(reading.answers) == len(reading.events) == batch.listeners == 0


async def test_connections_of_a_key_that_read_kept_batches_are_limited() -> None:
    batch = await kept_batch()
    reading = Reading()
    with ExitStack() as open_now:
        for _ in range(MAX_READERS):
            open_now.enter_context(reading.listen(batch))
        with pytest.raises(QuotaReached, match="that read finished or shared batches"), reading.listen(batch):
            pass
        token = caller.set(Caller("other"))
        with reading.listen(batch):
            pass
        caller.reset(token)
    with reading.listen(batch):
        assert batch.listeners == 1


async def test_the_first_reader_of_a_running_batch_is_not_counted() -> None:
    harness = Harness(lengths(5))
    registry = new_registry(harness, "off")
    reading = Reading()
    with ExitStack() as open_now:
        for number in range(MAX_READERS + 10):
            batch = await registry.start_or_find(batch_request(1), AnswerFormat(), idempotency_key(str(number)))
            open_now.enter_context(reading.listen(batch))
        for _ in range(MAX_READERS):
            open_now.enter_context(reading.listen(batch))
        with pytest.raises(QuotaReached), reading.listen(batch):
            pass


floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(floats), st.lists(st.integers(-(2**31), 2**31 - 1)), texts)
def test_arrays_are_read_back_exactly(numbers: list[float], tokens: list[int], text: str) -> None:
    value = {"numbers": array("d", numbers), "tokens": array("i", tokens), "same": np.array(numbers), "text": text}
    expected = {"numbers": numbers, "tokens": tokens, "same": numbers, "text": text}
    assert json.loads(encode_json(value)) == expected
    escaped = encode_ascii(value)
    assert escaped.isascii()
    assert "\n" not in escaped, "it is one line of an event"
    assert json.loads(escaped) == expected


def test_numbers_that_json_does_not_have_are_null_and_other_objects_are_refused() -> None:
    assert encode_json([float("nan"), array("d", [float("inf"), 1.0])]) == b"[null,[null,1.0]]"
    for value in (object(), {"a": {1, object()}}):
        with pytest.raises(TypeError):
            encode_json(value)
