"""Turns of sessions, by what vLLM ends them with."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.rollout.turns import Turn
from darts_server.vllm.api.routes import RouteCall
from darts_server.vllm.api.unshaped import Generation, UnshapedLLM
from darts_server.vllm.requests.prompt_request import PromptRequest

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("reason", "is_answered"), [("stop", True), ("length", True), ("abort", False), ("error", False)]
)
async def test_a_turn_is_answered_only_if_its_harness_gets_the_answer(reason: str, is_answered: bool) -> None:
    # An engine cannot be made to end a request with an error.
    async def outputs(_: Generation) -> AsyncIterator[RequestOutput]:
        logprobs: Any = [{11: Logprob(-0.5)}, {12: Logprob(-0.5)}]
        completion = CompletionOutput(0, "ab", [11, 12], -1.0, logprobs, finish_reason=reason)
        yield RequestOutput("r", None, [7, 8], None, [completion], finished=True)

    llm: Any = object.__new__(UnshapedLLM)
    llm.gate, llm._turns, llm._generate_unshaped = SimpleNamespace(is_closed=False), {}, outputs
    answers: list[tuple[list[int], list[int]]] = []
    left: list[int] = []
    turn: Any = SimpleNamespace(
        session_ended=asyncio.Event(),
        is_stopped=False,
        session=SimpleNamespace(rank=None),
        finish=lambda prompt, tokens, _: answers.append((list(prompt), list(tokens))),
        leave=left.append,
    )
    params = SamplingParams(logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
    request = PromptRequest({"prompt_token_ids": [7, 8]}, params, "r")
    ticket: Any = SimpleNamespace(release=lambda: None)
    async for _ in llm._serve_turn(Generation(request, RouteCall(), ticket, Turn()), turn):
        pass
    assert answers == ([([7, 8], [11, 12])] if is_answered else [])
    assert left == [2]
