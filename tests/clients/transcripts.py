"""Event streams of the rollouts route, as bytes that a test can split, cut off and repeat."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from darts_client._rollouts import RolloutsRequest, Stream, rollouts_request

BATCH = "roll-1"
USAGE = {"generated": 9, "returned": 6, "wasted": 3, "seconds": 0.5}


def build_request(prompts: Any = ("a", "b"), stream: Stream = "groups", **changes: Any) -> RolloutsRequest:
    return rollouts_request(prompts, stream, **({"group_size": 2, "max_tokens": 16} | changes))


def trajectory(number: int, index: int, length: int, tokens: bool = True, **changes: Any) -> dict[str, Any]:
    """Candidate `index` of a group, with the token ids 0, 1, 2, …"""
    own_tokens = {"token_ids": list(range(length)), "logprobs": [-0.5 * k for k in range(length)]}
    return {
        "trajectory_id": f"{BATCH}-{number}:{index}",
        **(own_tokens if tokens else {}),
        "text": f"answer {index}",
        "finish_reason": "stop",
        "length": length,
        "rank": index,
        "selected_as": "short",
        "cut": False,
        "quality": None,
        "weight_version_start": 3,
        "weight_version_end": 3,
        **changes,
    }


def group(number: int, *trajectories: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A group, by default of two trajectories of 1 and 2 tokens, with a discarded third candidate."""
    return {
        "number": number,
        "group_id": f"{BATCH}-{number}",
        "prompt_key": f"key {number}",
        "metadata": None,
        "candidates": 3,
        "deadline": None,
        "mixed_versions": False,
        "trajectories": list(trajectories) or [trajectory(number, 0, 1), trajectory(number, 1, 2)],
        "discarded": [{"trajectory_id": f"{BATCH}-{number}:2", "length": 2, "reason": "longer_than_needed"}],
        "seconds": 0.25,
        "error": None,
        **changes,
    }


def failed_group(number: int, message: str = "too few could finish") -> dict[str, Any]:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
    return group(number, trajectories=[], discarded=[], error=error)


def delta(number: int, index: int, start: int, end: int, **changes: Any) -> dict[str, Any]:
    return {
        "trajectory_id": f"{BATCH}-{number}:{index}",
        "number": number,
        "start": start,
        "token_ids": list(range(start, end)),
        "logprobs": [-0.5 * k for k in range(start, end)],
        **changes,
    }


def trajectory_end(number: int, index: int, length: int, **changes: Any) -> dict[str, Any]:
    """The `trajectory` event."""
    whole = trajectory(number, index, length)
    names = ("trajectory_id", "length", "finish_reason", "text", "cut")
    return {"number": number} | {name: whole[name] for name in names} | changes


def discard(number: int, index: int, length: int, reason: str = "middle") -> dict[str, Any]:
    return {"trajectory_id": f"{BATCH}-{number}:{index}", "number": number, "length": length, "reason": reason}


def started(groups: int = 2) -> tuple[str, dict[str, Any]]:
    return "batch", {"id": BATCH, "policy": "uniform", "groups": groups}


def done(*unfinished: int) -> tuple[str, dict[str, Any]]:
    rest = [{"number": number, "prompt_key": f"key {number}", "metadata": None} for number in unfinished]
    return "done", {"id": BATCH, "usage": USAGE, "unfinished": rest}


def error(message: str, code: int = 503) -> tuple[str, dict[str, Any]]:
    return "error", {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}


def encode(*events: tuple[str, dict[str, Any]], first: int = 1) -> list[bytes]:
    """The events, numbered from `first` on."""
    return [
        f"id: {number}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()
        for number, (name, data) in enumerate(events, first)
    ]


GROUPS = encode(started(), ("group", group(1)), ("group", group(0)), done())
"""A complete stream of groups."""

TOKENS = encode(
    started(1),
    ("delta", delta(0, 0, 0, 1)),
    ("delta", delta(0, 2, 0, 2)),
    ("delta", delta(0, 1, 0, 1)),
    ("trajectory", trajectory_end(0, 0, 1)),
    ("discard", discard(0, 2, 2)),
    ("delta", delta(0, 1, 1, 4)),
    ("trajectory", trajectory_end(0, 1, 3, cut=True, finish_reason="length")),
    ("group", group(0, trajectory(0, 0, 1, tokens=False), trajectory(0, 1, 3, tokens=False, cut=True))),
    done(),
)
"""A complete stream of tokens; candidate 1 is cut at 3 tokens after 4 were sent."""


class Body(httpx.SyncByteStream):
    """Chunks of bytes, then the end of the body or an error."""

    def __init__(self, *chunks: bytes, then: Callable[[], None] = lambda: None) -> None:
        self.chunks = chunks
        self.then = then

    def __iter__(self) -> Iterator[bytes]:
        yield from self.chunks
        self.then()


def lose_connection() -> None:
    """End a body like a lost connection."""
    raise httpx.ReadError("connection reset")


class FakeServer:
    """Returns its answers in turn (events, a response, an error to raise, or JSON), and records the requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.transport = httpx.MockTransport(self)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "DELETE":
            return httpx.Response(200, json={"id": BATCH, "cancelled": True})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if isinstance(answer, Body):
            return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, stream=answer)
        return httpx.Response(200, json=answer)

    @property
    def routes(self) -> Sequence[tuple[str, str]]:
        return [(request.method, request.url.path) for request in self.requests]
