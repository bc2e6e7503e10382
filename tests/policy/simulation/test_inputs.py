"""Machines, batches and plans refuse what cannot be."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from darts_server.policy.latency import LatencyCurve
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import Batch, BatchPlan
from darts_server.policy.simulation.machine import Machine, StepTime
from darts_server.policy.simulation.rollout import simulate

TIMES = StepTime(LatencyCurve((1.0,), (1.0,)))
BATCH = Batch(np.ones(2, dtype=int), np.full((2, 3), 5), np.zeros((2, 3)), 4)


@pytest.mark.parametrize("name", ["per_context_token", "per_prefill_token", "per_start"])
@pytest.mark.parametrize("value", [-1.0, inf])
def test_step_times_are_finite_and_not_negative(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0"):
        replace(TIMES, **wrong)


@pytest.mark.parametrize("name", ["replicas", "max_num_seqs", "kv_blocks", "block_size"])
def test_a_machine_has_at_least_one_of_each(name: str) -> None:
    none: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        replace(Machine(TIMES), **none)


@pytest.mark.parametrize("name", ["training_per_token", "between_rollouts"])
def test_training_takes_no_negative_time(name: str) -> None:
    negative: dict[str, Any] = {name: -1.0}
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0"):
        replace(Machine(TIMES), **negative)


def test_training_takes_time_for_each_token_and_for_the_weights() -> None:
    assert Machine(TIMES, training_per_token=0.5, between_rollouts=3).training_seconds(10) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.zeros((0, 3), dtype=int)}, "at least one prompt"),
        ({"prompt_tokens": np.ones(3, dtype=int)}, "one entry for each row"),
        ({"tail_draws": np.zeros((2, 2))}, "its shape"),
        ({"lengths": np.zeros((2, 3), dtype=int)}, "at least 1"),
        ({"done": np.zeros((2, 2), dtype=int)}, "done must have the shape"),
        ({"done": np.full((2, 3), 5)}, "not exceed them"),
    ],
)
def test_a_batch_fits_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BATCH, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": [8, 7]}, "at least the size 8, got 7"),
        ({"saturated": [True]}, "one entry for each prompt"),
        ({"enough": 0}, r"enough must be in \[1, 2\]"),
        ({"enough": 3}, r"enough must be in \[1, 2\]"),
        ({"shaping": None}, "no more candidates than the size 8"),
        ({"shaping": Shaping(pruning=Pruning())}, "are not simulated"),
    ],
)
def test_a_plan_fits_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BatchPlan(8, [12, 8], Shaping()), **changes)


@pytest.mark.parametrize("candidates", [[2], [2, 4]])
def test_a_batch_has_the_plans_prompts_and_candidates(candidates: list[int]) -> None:
    with pytest.raises(ValueError, match="the batch must have the plan's prompts"):
        simulate(BATCH, BatchPlan(2, candidates, Shaping()), Machine(TIMES))
