"""What the benchmark of the ingress makes and fits."""

import json

import pytest

from benchmarks.ingress import TRAJECTORIES, answer_with, exponent


@pytest.mark.parametrize("power", [0.0, 0.13, 1.0])
def test_the_exponent_is_that_of_the_number_of_servers(power: float) -> None:
    assert exponent({count: 1000 * count**power for count in (1, 2, 4, 8, 16)}) == pytest.approx(power)


def test_an_answer_has_tokens_and_logprobs_of_all_trajectories() -> None:
    answer = json.loads(answer_with(50))
    assert len(answer["choices"]) == TRAJECTORIES
    for choice in answer["choices"]:
        lengths = {len(choice["token_ids"]), *(len(values) for values in choice["logprobs"].values())}
        assert lengths == {50}
    assert len(answer_with(0)) < 150
