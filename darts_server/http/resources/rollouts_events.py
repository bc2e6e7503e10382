"""Batches as server-sent events."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from darts_server.http.resources.rollouts_models import GroupOut, UnfinishedOut, UsageOut, error_object
from darts_server.rollout.batches.events import BatchBegan, Belongs, Broken, Delta, Discarded, Done, Event, GroupDecided
from darts_server.rollout.batches.run import BatchRun, Listener, Stream

MEDIA_TYPE = "text/event-stream"
QUIET_SECONDS = 15.0
"""Proxies close what says nothing for a minute, some for half of that."""
STILL_HERE = b": still here\n\n"
LARGEST_PIECE = 64 * 1024
"""Bytes, about: what the web server takes for a caller before it waits for it."""
TOLD_IN_DELTAS = {"trajectories": {"__all__": {"token_ids", "logprobs"}}}


class EventStream(StreamingResponse):
    """The events of a batch that follow number ``after``. Its caller listens from now on until it has gone."""

    def __init__(self, batch: BatchRun, after: int = 0) -> None:
        self._listener = batch.listen(after)
        super().__init__(pieces(self._listener, batch.form.stream), media_type=MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._listener:
            await super().__call__(scope, receive, send)


async def pieces(listener: Listener, stream: Stream, quiet: float = QUIET_SECONDS) -> AsyncGenerator[bytes, None]:
    """What is sent, made when the caller has taken what was sent before: all events that there are then.

    ``quiet``: seconds without an event after which the caller is told so.
    """
    while True:
        with anyio.move_on_after(quiet) as waiting:
            found = await listener.next()
        if waiting.cancelled_caught:
            yield STILL_HERE
            continue
        if found is None:
            return
        piece = framed(*found, stream)
        while len(piece) < LARGEST_PIECE and (found := listener.ready()) is not None:
            piece += framed(*found, stream)
        yield piece


def framed(number: int, event: Event, stream: Stream) -> bytes:
    """An event as it goes over the wire."""
    name, data = _told(event, stream)
    return f"event: {name}\nid: {number}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _told(event: Event, stream: Stream) -> tuple[str, dict[str, Any]]:
    match event:
        case Delta(name, number, start, token_ids, logprobs):
            place = {"trajectory_id": name, "number": number, "start": start}
            return "delta", {**place, "token_ids": token_ids, "logprobs": logprobs}
        case Belongs(name, number, sample, cut):
            what = {"length": len(sample.token_ids), "finish_reason": sample.finish_reason, "text": sample.text}
            return "trajectory", {"trajectory_id": name, "number": number, **what, "cut": cut}
        case Discarded(name, number, length, reason):
            return "discard", {"trajectory_id": name, "number": number, "length": length, "reason": reason}
        case GroupDecided(result):
            left_out = TOLD_IN_DELTAS if stream is Stream.TOKENS else None
            return "group", GroupOut.of(result).model_dump(mode="json", exclude=left_out)
        case BatchBegan(batch_id, policy, groups):
            return "batch", {"id": batch_id, "policy": policy, "groups": groups}
        case Done(batch_id, results, unfinished, seconds):
            usage = UsageOut.of(results, seconds).model_dump(mode="json")
            left = [UnfinishedOut.of(prompt).model_dump(mode="json") for prompt in unfinished]
            return "done", {"id": batch_id, "usage": usage, "unfinished": left}
        case Broken(error):
            return "error", {"error": error_object(error)}
