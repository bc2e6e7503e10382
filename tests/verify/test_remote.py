"""Verifiers behind URLs get the requests of three trainers' protocols."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai.types.responses import Response as OpenAiResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from darts_server.types import PromptSpec, VerifierResult
from darts_server.verify import remote
from darts_server.verify.batcher import Batcher
from darts_server.verify.calls import Call
from darts_server.verify.remote import Connection
from darts_server.verify.specs import Kind, parse_specs
from darts_server.verify.types import NO_VERDICT, Answer, Verdict
from darts_server.verify.verifiers import VerifierLimits, Verifiers

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
Handler = Callable[[Any], Awaitable[Response] | Response]


def answer(text: str = "2", prompt: PromptSpec | None = None, **columns: Any) -> Answer:
    metadata = json.dumps(columns or {"answer": "2"}).encode()
    return Answer(prompt or PromptSpec(text="1+1=", metadata=metadata), text, [1])


def messages(**columns: Any) -> PromptSpec:
    return PromptSpec(messages=json.dumps(MESSAGES).encode(), metadata=json.dumps(columns).encode())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.01, 0.02))


@asynccontextmanager
async def served(
    handler: Handler, kind: Kind = Kind.SLIME, connections: int = 2, timeout: float = 10
) -> AsyncIterator[tuple[Batcher, list[Any]]]:
    """Run a verifier on a server with this handler of decoded bodies. Also yield the bodies that it gets."""
    bodies: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await Request(scope, receive).json()
        bodies.append(body)
        response = handler(body)
        if not isinstance(response, Response):
            response = await response
        await response(scope, receive, send)

    client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    runners = [Connection(client, kind, "http://rm/", timeout) for _ in range(connections)]
    batcher = Batcher(runners, 600, lambda *_: None)
    try:
        yield batcher, bodies
    finally:
        await batcher.close()


# --- protocols --------------------------------------------------------------


async def test_openrlhf_gets_lists() -> None:
    def rewards(body: Any) -> Response:
        return JSONResponse({"rewards": [float(label == "2") for label in body["labels"]], "extra_logs": {}})

    async with served(rewards, Kind.OPENRLHF, connections=1) as (batcher, bodies):
        asked = [
            answer("2"),
            answer("3", label="3"),
            answer("4", PromptSpec(token_ids=[1], metadata=b'{"prompt": "2+2=", "ground_truth": "2"}')),
            answer("2", messages()),
        ]
        await batcher.submit(asked[0])
        calls = await asyncio.gather(*map(batcher.submit, asked))
        assert [call.reward for call in calls] == [1.0, 0.0, 1.0, 0.0]
        assert bodies[1] == {
            "query": ["1+1=2", "1+1=3", "2+2=4", "Add.\n1+12"],
            "prompts": ["1+1=", "1+1=", "2+2=", "Add.\n1+1"],
            "labels": ["2", "3", "2", None],
        }


async def test_a_batch_for_openrlhf_is_as_large_as_the_answers_that_wait() -> None:
    async def rewards(body: Any) -> Response:
        await asyncio.sleep(0.01)
        return JSONResponse({"rewards": [1.0] * len(body["query"])})

    async with served(rewards, Kind.OPENRLHF, connections=1) as (batcher, bodies):
        await batcher.submit(answer())
        assert all(call.reward for call in await asyncio.gather(*(batcher.submit(answer()) for _ in range(150))))
        assert [len(body["query"]) for body in bodies] == [1, 64, 64, 22]


async def test_slime_gets_one_answer_and_returns_a_number() -> None:
    async with served(lambda body: JSONResponse(0.5)) as (batcher, bodies):
        assert await batcher.submit(answer()) == Call(VerifierResult.REWARD, 0.5)
        assert await batcher.submit(answer("x" * 100_000, messages(label=[1]))) == Call(VerifierResult.REWARD, 0.5)
        assert bodies[0] == {"prompt": "1+1=", "response": "2", "label": "2"}
        assert bodies[1]["prompt"] == MESSAGES
        assert bodies[1]["label"] == [1]
    async with served(lambda body: JSONResponse({"score": 1, "acc": False})) as (batcher, _):
        assert await batcher.submit(answer()) == Call(VerifierResult.REWARD, 1.0, False)


async def test_nemo_gym_gets_the_row_with_a_response() -> None:
    async with served(lambda body: JSONResponse({**body, "reward": 1.0}), Kind.NEMO_GYM) as (batcher, bodies):
        assert await batcher.submit(answer("4", messages(expected_answer="4"))) == Call(VerifierResult.REWARD, 1.0)
        [body] = bodies
        assert body["expected_answer"] == "4"
        assert body["responses_create_params"] == {"input": MESSAGES}
        assert OpenAiResponse.model_validate(body["response"]).output_text == "4"
        # A row of NeMo-Gym's data set has the parameters itself.
        row = {"responses_create_params": {"input": "2+2", "tools": []}}
        await batcher.submit(answer("4", messages(**row)))
        assert bodies[1]["responses_create_params"] == row["responses_create_params"]


async def test_a_sample_that_nemo_gym_masks_has_no_reward() -> None:
    masked = {"reward": 0.0, "mask_sample": True}
    async with served(lambda body: JSONResponse(masked), Kind.NEMO_GYM) as (batcher, _):
        assert (await batcher.submit(answer())).result is VerifierResult.NONE


# --- failures ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "result", "detail"),
    [
        (Response("no", 404), VerifierResult.ERROR, "answered with status 404: no"),
        (Response("busy", 503), VerifierResult.ERROR, "answered with status 503: busy"),
        (Response("<html>"), VerifierResult.ERROR, "did not answer with JSON: <html>"),
        (JSONResponse("1.0"), VerifierResult.INVALID, "returned '1.0' (str) instead of a finite number"),
        (Response("1e999"), VerifierResult.ERROR, "did not answer with JSON"),
        (Response("[" * 100_000), VerifierResult.ERROR, "did not answer with JSON"),
        (Response("1" * 300_000), VerifierResult.ERROR, "answered with more than 200000 bytes"),
        (Response("", 307, {"location": "http://other/"}), VerifierResult.ERROR, "answered with status 307"),
        (JSONResponse(None), VerifierResult.NONE, "returned None"),
        (JSONResponse([1.0]), VerifierResult.INVALID, "returned [1.0] (list) instead of a finite number"),
    ],
)
async def test_an_error_or_nonsense_is_no_reward(
    response: Response, result: VerifierResult, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 200_000)
    async with served(lambda body: response) as (batcher, _):
        call = await batcher.submit(answer())
        assert (call.result, call.reward) == (result, None)
        assert detail in call.detail


@pytest.mark.parametrize("rewards", [[], [1.0, 2.0], None, {"a": 1}, "x"])
async def test_a_wrong_count_of_rewards_is_invalid(rewards: Any) -> None:
    async with served(lambda body: JSONResponse({"rewards": rewards}), Kind.OPENRLHF) as (batcher, _):
        call = await batcher.submit(answer())
        assert call.result is VerifierResult.INVALID
        assert "rewards for 1 answers" in call.detail


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_request_is_sent_again_if_the_server_is_busy(status: int) -> None:
    attempts = Counter[str]()

    def busy_once(body: Any) -> Response:
        attempts[body["response"]] += 1
        return JSONResponse(1.0) if attempts[body["response"]] > 1 else Response("", status)

    async with served(busy_once) as (batcher, bodies):
        assert await batcher.submit(answer()) == Call(VerifierResult.REWARD, 1.0)
        assert len(bodies) == 2


async def test_an_answer_that_the_server_refuses_costs_no_other_answer_its_reward() -> None:
    def refusing(body: Any) -> Response:
        if "bad" in body["labels"]:
            return Response("bad", 400)
        return JSONResponse({"rewards": [1.0] * len(body["labels"])})

    async with served(refusing, Kind.OPENRLHF, connections=1) as (batcher, _):
        await batcher.submit(answer())
        labels = ["good"] * 10 + ["bad"] + ["good"] * 10
        calls = await asyncio.gather(*(batcher.submit(answer(label=label)) for label in labels))
        assert [call.reward for call in calls] == [1.0] * 10 + [None] + [1.0] * 10


async def test_a_server_that_takes_too_long_gives_no_reward() -> None:
    async def slow(body: Any) -> Response:
        await asyncio.sleep(60 if body["response"] == "slow" else 0)
        return JSONResponse(1.0)

    async with served(slow, timeout=0.2) as (batcher, _):
        slow_call, call = await asyncio.gather(batcher.submit(answer("slow")), batcher.submit(answer()))
        assert slow_call == Call(VerifierResult.TIMEOUT, detail="took longer than 0.2 seconds")
        assert call.reward == 1.0


async def test_requests_at_the_same_time_are_limited() -> None:
    running = 0
    most = 0

    async def counting(body: Any) -> Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return JSONResponse(1.0)

    async with served(counting, connections=3) as (batcher, _):
        calls = await asyncio.gather(*(batcher.submit(answer()) for _ in range(30)))
        assert all(call.reward == 1.0 for call in calls)
        assert most == 3


async def test_a_text_that_json_cannot_carry_is_an_error() -> None:
    async with served(lambda body: JSONResponse(1.0)) as (batcher, _):
        call = await batcher.submit(answer("\ud800"))
        assert call.result is VerifierResult.ERROR
        assert "cannot get the answer" in call.detail
        assert (await batcher.submit(answer())).reward == 1.0


async def test_a_server_that_cannot_be_reached_is_no_verdict() -> None:
    specs = parse_specs(["boxed", "rm=0.5*slime+http://127.0.0.1:1/"])
    verifiers = Verifiers(specs, VerifierLimits(processes=1), default=2)
    counted = Counter[tuple[str, VerifierResult]]()
    verifiers.called.add(lambda name, result, _: counted.update([(name, result)]))
    await verifiers.start()
    try:
        assert await verifiers.verify(answer(r"\boxed{2}")) == Verdict(2.0, True)
        assert counted == {("boxed", VerifierResult.REWARD): 1, ("rm", VerifierResult.UNREACHABLE): 1}
    finally:
        await verifiers.close()
    assert await verifiers.verify(answer(""), ["boxed", "nobody"]) == NO_VERDICT
