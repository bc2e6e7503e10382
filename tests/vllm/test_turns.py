import pytest
from vllm import SamplingParams

from darts_server.rollout.turns.turns import Turns
from darts_server.types import RequestOptions, TurnKind
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.turns import make_turn

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
