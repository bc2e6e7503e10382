"""The results of verifiers' calls: what a verifier returned, as a reward."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from darts_server.types import VerifierResult

REWARD_KEYS = ("score", "reward")
CORRECT_KEYS = ("acc", "correct", "is_correct")
"""Keys of returned dictionaries: veRL's ``acc``, and names of other trainers."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The end of a verifier's call for one answer."""

    result: VerifierResult
    reward: float | None = None
    correct: bool | None = None
    """None if the verifier gives a reward only."""
    detail: str = ""
    """Why there is no reward."""


def decode_columns(metadata: bytes | None) -> dict[str, Any]:
    """Return the columns in a prompt's metadata."""
    columns = msgspec.json.decode(metadata or b"{}")
    return columns if isinstance(columns, dict) else {}


def interpret_returned(returned: object) -> Call:
    """Interpret a number, also of numpy or torch, a boolean, or a dictionary of these."""
    try:
        reward: object = returned
        correct: object = None
        if isinstance(returned, Mapping):
            if not any(key in returned for key in REWARD_KEYS):
                return Call(VerifierResult.INVALID, detail="returned a dictionary without 'score'")
            # NeMo-Gym masks a sample whose reward means nothing.
            reward = None if returned.get("mask_sample") else _first_value(returned, REWARD_KEYS)
            correct = _first_value(returned, CORRECT_KEYS)
        elif isinstance(returned, bool):
            correct = returned
        if reward is None:
            return Call(VerifierResult.NONE, detail="returned None")
        number = _to_float(reward)
        if number is None or not math.isfinite(number):
            detail = f"returned {reprlib.repr(reward)} ({type(reward).__name__}) instead of a finite number"
            return Call(VerifierResult.INVALID, detail=detail)
        correctness = _to_float(correct)
        return Call(VerifierResult.REWARD, number, None if correctness is None else correctness > 0)
    except Exception as error:
        # A returned object is foreign code too.
        return Call(VerifierResult.INVALID, detail=f"returned a value that raises {type(error).__name__}")


def _first_value(returned: Mapping[object, object], keys: tuple[str, ...]) -> object:
    return next((returned[key] for key in keys if key in returned), None)


def _to_float(value: object) -> float | None:
    item = getattr(value, "item", None)
    if callable(item):
        value = item()
    return float(value) if isinstance(value, int | float) else None
