from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from darts_server.rollout.turns.turns import Turns
from darts_server.types import RequestOptions, TurnKind
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.turns import make_turn, remember_answers

TRAINING = SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("params", "policy"), [(SamplingParams(temperature=0), None), (SamplingParams(temperature=1.0), "off")]
)
def test_training_may_use_the_names_of_evaluations_sessions(params: SamplingParams, policy: str | None) -> None:
    turns = Turns()
    evaluated = PromptRequest({"prompt_token_ids": [1, 2]}, params, "a")
    turns.add_answer(make_turn(evaluated, None, RequestOptions(policy=policy), "0_0", None), [3])
    trained = PromptRequest({"prompt_token_ids": [5, 6]}, TRAINING, "b")
    opening = make_turn(trained, None, RequestOptions(), "0_0", None)
    assert turns.classify(opening) is TurnKind.OPENING
    turns.add_answer(opening, [7])
    later = PromptRequest({"prompt_token_ids": [8]}, TRAINING, "c")
    assert turns.classify(make_turn(later, None, RequestOptions(), "0_0", None)) is TurnKind.SESSION


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answered(reason: str) -> AsyncGenerator[Any, None]:
    yield SimpleNamespace(outputs=[SimpleNamespace(index=0, finish_reason=reason, token_ids=[], text="")])


@pytest.mark.anyio
@pytest.mark.parametrize(("reason", "kind"), [("abort", TurnKind.TOKENS), ("stop", TurnKind.OPENING)])
async def test_a_member_of_a_group_that_was_aborted_without_a_token_goes_on_alone(reason: str, kind: TurnKind) -> None:
    turns, request = Turns(), PromptRequest({"prompt_token_ids": [1, 2]}, TRAINING, "a")
    first, again = (make_turn(request, None, RequestOptions(), None, None) for _ in range(2))
    first.group_size = 8
    async for _ in remember_answers(turns, first, request, answered(reason)):
        pass
    assert turns.classify(again) is kind
