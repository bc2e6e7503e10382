"""A fake server with the routes that TRL and its integration use, on a port."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from safetensors.torch import load

from . import transcripts
from .servers import listening

ANSWER, EOS = 5, 1
STATE = b"learned state"
METRICS = 'darts_candidates_started_total{{model_name="m"}} {n}.0\ndarts_weight_version{{model_name="m"}} 3.0\n'


@dataclass
class RecordedRequest:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    data: bytes
    query: str = ""

    @property
    def body(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.data)
        return decoded


@dataclass
class FakeVllm:
    """``failing`` and ``missing``: prefixes of paths that are answered with 500 and 404. ``requests``: all requests.

    ``groups``: records of the answer's groups; None if the server has none.
    """

    url: str = ""
    failing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ("/server_info",)
    first_logprob: float = -0.5
    groups: list[dict[str, Any]] | None = None
    left: set[tuple[int, ...]] = field(default_factory=set)
    requests: list[RecordedRequest] = field(default_factory=list)

    def of(self, method: str, path: str) -> list[RecordedRequest]:
        """Return the requests of a route in their order."""
        return [each for each in self.requests if (each.method, each.path) == (method, path)]

    @property
    def completions(self) -> list[RecordedRequest]:
        """Requests for completions, without the probe of the log-probs mode."""
        return [each for each in self.of("POST", "/v1/completions") if "top_k" in each.body and "n" in each.body]

    @property
    def pushed(self) -> list[dict[str, torch.Tensor]]:
        return [load(each.data) for each in self.of("PUT", "/darts/v1/weights")]

    @property
    def rewards(self) -> list[dict[str, Any]]:
        return [reward for each in self.of("POST", "/darts/v1/rewards") for reward in each.body["rewards"]]

    def answer(self, request: RecordedRequest) -> Response:
        self.requests.append(request)
        if request.path.startswith(self.missing):
            return Response(status_code=404)
        if request.path.startswith(self.failing):
            return Response("on fire", status_code=500)
        match request.method, request.path:
            case _, "/darts/v1/weights":
                weights = {"version": 3, "state": "serving", "rule": "finish", "last": None, "last_error": None}
                return JSONResponse(weights)
            case "POST", "/darts/v1/rewards":
                return JSONResponse({"matched": len(request.body["rewards"]), "repeated": 0, "unknown": 0})
            case "GET", "/darts/v1/state":
                return Response(STATE)
            case "GET", "/darts/v1/groups/cmpl-1" if self.groups is not None:
                return JSONResponse({"groups": self.groups})
            case "GET", path if path.startswith("/darts/v1/groups/"):
                return Response('{"error": {"message": "there is no such group"}}', 404, media_type="application/json")
            case "PUT", "/darts/v1/state":
                return JSONResponse({"prompts": 7})
            case "GET", "/metrics":
                return Response(METRICS.format(n=12 * len(self.completions)))
            case "GET", "/v1/models":
                return JSONResponse({"data": [{"id": "tiny"}]})
            case "POST", "/darts/v1/rollouts":
                return Response(b"".join(self._batch(request.body)), media_type="text/event-stream")
            case "POST", "/v1/completions":
                body = request.body
                numbers = range(body.get("n", 1))
                choices = [self._choice(p, k, body["max_tokens"]) for p in body["prompt"] for k in numbers]
                return JSONResponse({"id": "cmpl-1", "choices": choices})
        return JSONResponse({})

    def _batch(self, body: dict[str, Any]) -> list[bytes]:
        """Complete unfinished prompts of earlier batches first, and then the shortest prompts."""
        prompts = [tuple(prompt["token_ids"]) for prompt in body["prompts"]]
        order = sorted(range(len(prompts)), key=lambda place: (prompts[place] not in self.left, len(prompts[place])))
        wanted = body.get("num_groups", len(prompts))
        self.left = {prompts[place] for place in order[wanted:]}
        verified: dict[str, Any] = {}
        if "informative" in (body["policy"]["name"], body.get("only")):
            # Prompts with an even number of tokens have equal rewards.
            verified = {"num_rewarded": 2 * body["group_size"]}
        groups = []
        for place in order[:wanted]:
            if verified:
                verified["zero_variance"] = len(prompts[place]) % 2 == 0
            groups.append(("group", transcripts.group(place, *self._trajectories(place, body), **verified)))
        events = [transcripts.started(len(prompts)), *groups, transcripts.done(*sorted(order[wanted:]))]
        return transcripts.encode(*events)

    def _trajectories(self, place: int, body: dict[str, Any]) -> list[dict[str, Any]]:
        tokens = [[ANSWER + k, EOS] for k in range(body["group_size"])]
        logprobs = [self.first_logprob, -0.25]
        changes: dict[str, Any] = {"logprobs": logprobs}
        if body["policy"]["name"] == "informative":
            changes |= {"weight": 2.0, "reward": 1.0, "correct": True}
        return [
            transcripts.trajectory(place, k, 2, token_ids=ids, advantage=k - 1.5, **changes)
            for k, ids in enumerate(tokens)
        ]

    def _choice(self, prompt: list[int], number: int, max_tokens: int) -> dict[str, Any]:
        token_ids = [ANSWER + number, EOS][:max_tokens]
        tokens = [f"token_id:{token}" for token in token_ids]
        values = [self.first_logprob, -0.25][:max_tokens]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": [{name: value} for name, value in zip(tokens, values, strict=True)],
        }
        return {"prompt_token_ids": prompt, "token_ids": token_ids, "logprobs": logprobs}


@contextmanager
def fake_vllm() -> Iterator[FakeVllm]:
    server, app = FakeVllm(), FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])
    async def answer(request: Request) -> Response:
        headers = dict(request.headers)
        url, data = request.url, await request.body()
        return server.answer(RecordedRequest(request.method, url.path, headers, data, url.query))

    with listening(app) as listener:
        server.url = listener.url
        yield server
