"""``POST /darts/v1/rollouts`` of an ingress."""

import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from darts_server.exceptions import DartsError, NotAcceptable
from darts_server.http.errors import body_of
from darts_server.http.requests import choose_media_type
from darts_server.http.sse import MEDIA_TYPE, EventStream, encode, encode_text
from darts_server.ingress.batches.budget import Planner
from darts_server.ingress.batches.events import GROUP, Event
from darts_server.ingress.batches.request import Batch, read_batch
from darts_server.ingress.batches.run import DividedBatch, PartRefused
from darts_server.ingress.call import Call, to_response
from darts_server.ingress.everyone.hold import Hold
from darts_server.ingress.forwarding.forward import Forwarder
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.routing.router import KeyedRequest, RoutedRequest, Router
from darts_server.ingress.routing.terms import Terms

KEY_HEADER = "idempotency-key"
JSON = "application/json"
_CARRIES = re.compile(rb'"carr(?:y|ied)"\s*:')
_GROUP_SIZE = re.compile(rb'"group_size"\s*:\s*(\d{1,5})')


class Batches:
    """Divides batches among replicas."""

    def __init__(self, fleet: Fleet, router: Router, forwarder: Forwarder, hold: Hold) -> None:
        self._fleet = fleet
        self._router = router
        self._forwarder = forwarder
        self._hold = hold
        self._planner = Planner()

    async def run(self, call: Call) -> Response | None:
        """Answer a batch.

        One that can be fetched again, and one whose prompts are carried over, runs on one replica: always the same.
        """
        body, scope = call.body, call.headers.get("authorization", "")
        if (key := call.headers.get(KEY_HEADER)) is not None:
            await self._forward(call, KeyedRequest(self._router, f"{scope} {key}"))
            return None
        if _CARRIES.search(body):
            await self._forward(call, KeyedRequest(self._router, scope))
            return None
        batch = read_batch(body)
        if batch is None or len(self._fleet.serving) < 2:
            size = _GROUP_SIZE.search(body)
            candidates = (int(size[1]) if size else 1) * (1 if batch is None else len(batch.prompts))
            await self._forward(call, RoutedRequest(self._router, Terms(scope, max(1, candidates))))
            return None
        _check_accept(call, bool(batch.stream))
        part = _as_part(call.outgoing)
        divided = DividedBatch(batch, part, scope, self._fleet, self._router, self._hold, self._planner)
        try:
            return await (_stream(divided) if batch.stream else _answer(divided))
        except PartRefused as refused:
            return to_response(refused.answer)

    async def _forward(self, call: Call, placement: KeyedRequest | RoutedRequest) -> None:
        await self._forwarder.forward(call.outgoing, placement, call.reply, call.received_at)


def _check_accept(call: Call, streams: bool) -> None:
    """
    Raises:
        NotAcceptable: the caller does not accept the answer to a divided batch, which is merged from events.
    """
    if choose_media_type(call.request.headers, (MEDIA_TYPE, JSON) if streams else (JSON,)) is None:
        raise NotAcceptable(
            "Accept",
            f"a batch that is divided among servers is answered as {MEDIA_TYPE if streams else JSON}; accept that, too"
            + ("" if streams else ", or send the batch with an Idempotency-Key, with which it runs on one server"),
        )


def _as_part(outgoing: Outgoing) -> Outgoing:
    """Leave out what the caller accepts: parts are streamed, whatever their caller gets."""
    return replace(outgoing, headers=[(name, value) for name, value in outgoing.headers if name.lower() != b"accept"])


async def _answer(divided: DividedBatch) -> Response:
    groups: dict[int, Event] = {}
    async with aclosing(divided.events()) as events:
        async for event in events:
            if event.name == GROUP:
                groups[event.number] = event
    if not divided.complete and not any(group.has_tokens for group in groups.values()):  # nothing to return
        error = groups[min(groups)].json()["error"]
        return JSONResponse({"error": error}, error["code"])
    head = _head(divided)
    tail = {name: head.pop(name) for name in ("survivors", "sampling")} | _end(divided)
    texts = b",".join(groups[number].data for number in sorted(groups))
    body = json.dumps(head).encode()[:-1] + b', "groups": [' + texts + b"], " + json.dumps(tail).encode()[1:]
    return Response(body, media_type=JSON)


async def _stream(divided: DividedBatch) -> Response:
    events = divided.events()
    first = await anext(events)  # raises what has a status of its own
    return EventStream(_encoded(divided, first, events), nullcontext())


async def _encoded(
    divided: DividedBatch, first: Event, events: AsyncGenerator[Event, None]
) -> AsyncGenerator[bytes, None]:
    number = 1
    try:
        async with aclosing(events):
            yield encode("batch", _head(divided) | {"groups": len(divided.batch.prompts)}, number)
            if first.name != "batch":
                yield encode_text(first.name, first.data.decode(), number := number + 1)
            async for event in events:
                if event.name != "batch":
                    yield encode_text(event.name, event.data.decode(), number := number + 1)
    except PartRefused as refused:
        yield encode("error", json.loads(refused.answer.body), number + 1)
    except DartsError as error:
        yield encode("error", body_of(error), number + 1)
    else:
        end = _end(divided)
        fields = {name: end[name] for name in ("usage", "unfinished", "carried")}
        yield encode("done", {"id": _head(divided)["id"], **fields}, number + 1)


def _head(divided: DividedBatch) -> dict[str, Any]:
    assert divided.started is not None, "a replica says it before any group"
    started = divided.started
    return {"id": divided.batch_id, **{name: started[name] for name in ("policy", "survivors", "sampling")}}


def _end(divided: DividedBatch) -> dict[str, Any]:
    batch, generated = divided.batch, max(divided.generated, divided.returned)
    usage = {"generated": generated, "returned": divided.returned, "wasted": generated - divided.returned}
    unfinished = [_unfinished(batch, n) for n in range(len(batch.prompts)) if n not in divided.decided]
    seconds = time.perf_counter() - divided.began
    return {"unfinished": unfinished, "carried": divided.carried, "usage": {**usage, "seconds": seconds}}


def _unfinished(batch: Batch, number: int) -> dict[str, Any]:
    key, metadata = batch.keys.get(number, ""), batch.metadata.get(number)
    kept = {"carry": "drop", "error": None, "aborted": None}
    return {"number": number, "prompt_key": key, "metadata": metadata, **kept}
