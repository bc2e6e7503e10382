"""What a verifier returns becomes a reward, or a result that says why there is none."""

import math
import re

import numpy as np
import pytest

from darts_server.types import VerifierResult
from darts_server.verify.calls import Call, interpret_returned
from tests.verify.user_code import Raising


@pytest.mark.parametrize(
    ("returned", "reward", "correct"),
    [
        (2, 2.0, None),
        (-0.5, -0.5, None),
        (True, 1.0, True),
        (False, 0.0, False),
        (np.float32(0.5), 0.5, None),
        (np.int64(-1), -1.0, None),
        (np.bool_(True), 1.0, None),
        (np.array([1.5]), 1.5, None),
        ({"score": 1, "acc": False}, 1.0, False),
        ({"score": 0.2, "acc": 1.0}, 0.2, True),
        ({"reward": -1, "correct": np.bool_(True)}, -1.0, True),
        ({"score": 3, "acc": "unknown"}, 3.0, None),
        ({"score": np.float64(0), "is_correct": None}, 0.0, None),
    ],
)
def test_numbers_are_rewards(returned: object, reward: float, correct: bool | None) -> None:
    assert interpret_returned(returned) == Call(VerifierResult.REWARD, reward, correct)


@pytest.mark.parametrize("returned", [None, {"score": None}])
def test_none_is_no_reward(returned: object) -> None:
    assert interpret_returned(returned) == Call(VerifierResult.NONE, detail="returned None")


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        (math.nan, r"returned nan \(float\) instead of a finite number"),
        (-math.inf, "returned -inf"),
        ("1.0", r"returned '1.0' \(str\)"),
        ("x" * 10**6, r"returned 'xxxxxxxxxxxx\.\.\.xxxxxxxxxxxxx'"),
        ([1.0], r"returned \[1.0\] \(list\)"),
        (10**400, "raises OverflowError"),
        (np.ones(3), "raises ValueError"),
        ({}, "a dictionary without 'score'"),
        ({"score": "1"}, r"returned '1' \(str\)"),
        (object(), "returned <object"),
    ],
)
def test_everything_else_is_invalid_and_shown_in_short(returned: object, detail: str) -> None:
    call = interpret_returned(returned)
    assert (call.result, call.reward, call.correct) == (VerifierResult.INVALID, None, None)
    assert re.search(detail, call.detail), call.detail
    assert len(call.detail) < 200


def test_an_object_that_raises_is_invalid() -> None:
    assert interpret_returned(Raising()) == Call(
        VerifierResult.INVALID, detail="returned a value that raises RuntimeError"
    )
