"""Which of the engine's steps are reported, from the statistics that vLLM collects."""

from typing import Any

import pytest
from vllm.v1.metrics.stats import IterationStats

from darts_server.vllm.launch import Steps


def reported(tokens: int, between: list[float], first: int = 0) -> list[tuple[int, float, int]]:
    """Return what is reported of a step with so many tokens, of which some are the first ones."""
    stats: Any = IterationStats()
    found: list[tuple[int, float, int]] = []
    stats.num_generation_tokens = tokens
    stats.inter_token_latencies_iter = between
    stats.time_to_first_tokens_iter = [0.5] * first
    steps = Steps()
    steps.record(stats)  # nobody listens yet
    steps.listener = lambda *step: found.append(step)
    steps.record(stats)
    return found


def test_a_step_that_only_decodes_is_reported_with_its_shortest_time() -> None:
    assert reported(3, [0.01, 0.04, 0.01]) == [(3, 0.01, 0)]  # the second was preempted before


def test_a_step_in_which_sequences_start_is_reported_with_how_many() -> None:
    assert reported(5, [0.03, 0.03], first=3) == [(5, 0.03, 3)]


@pytest.mark.parametrize(
    ("tokens", "between", "first"),
    [
        (4, [], 4),  # nothing says when it began
        (8, [0.01] * 4, 0),  # several tokens for each
        (9, [0.01] * 4, 1),
        (2, [0.0, 0.01], 0),
        (0, [], 0),
    ],
)
def test_a_step_without_a_time_of_its_own_is_not_reported(tokens: int, between: list[float], first: int) -> None:
    assert reported(tokens, between, first) == []
