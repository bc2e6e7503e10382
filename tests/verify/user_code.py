"""Reward functions of users, good and bad. The verifier's processes load this file."""

import asyncio
import ctypes
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

NOT_A_FUNCTION = 3


# --- veRL -------------------------------------------------------------------


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str.strip() == ground_truth)


async def async_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": 0.25, "acc": solution_str == ground_truth, "pred": solution_str}


def columns(**given: Any) -> float:
    """Reward the answer if all columns have arrived. Only a prefix says that it has veRL's form."""
    expected = {"data_source": "gsm8k", "solution_str": "a", "ground_truth": "x", "extra_info": {"index": 7}}
    return float(given == expected)


def no_verdict(solution_str: str, **_: Any) -> None:
    return None


RETURNED = {
    "number": 2,
    "bool": True,
    "numpy": np.float32(0.5),
    "numpy bool": np.bool_(True),
    "array of one": np.array([1.5]),
    "nan": math.nan,
    "inf": -math.inf,
    "string": "1.0",
    "list": [1.0],
    "huge": 10**400,
    "empty": {},
    "score of None": {"score": None},
    "score": {"score": 1, "acc": False},
    "object": object(),
    "function": lambda: 1.0,
    "array": np.ones(3),
}


def returning(solution_str: str, **_: Any) -> Any:
    return RETURNED[solution_str]


class Raising:
    """Raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError


def misbehave(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    """Do what the answer says, or give the reward 1."""
    match solution_str:
        case "raise":
            raise ValueError("a\nmessage" * 1000)
        case "exit":
            sys.exit(5)
        case "leave":
            os._exit(5)
        case "segfault":
            ctypes.string_at(0)
        case "short":
            time.sleep(0.5)
        case "hang":
            time.sleep(600)
        case "hold the lock":
            re.match(r"(a+)+$", "a" * 64 + "!")
        case "flood":
            for _ in range(200):
                print("x" * 1_000_000)
                print("x" * 1_000_000, file=sys.stderr)
        case "close":
            os.closerange(0, 100)
        case "fork":
            return float(os.fork() == 0)
        case "fork and stay":
            if os.fork() == 0:
                time.sleep(600)
        case "program":
            subprocess.Popen(["sleep", "600"])
            os._exit(0)
        case "program and hang":
            subprocess.run(["sleep", "600"])
        case "memory":
            return float(len(bytearray(1 << 33)))
        case "recursion":
            return misbehave(data_source, solution_str, ground_truth, extra_info)
        case "raising object":
            return Raising()
    return 1.0


def fail_at_random(solution_str: str, **_: Any) -> Any:
    """Fail in every way for about every twentieth answer."""
    dice = random.Random(solution_str).random()
    if dice < 0.0005:
        os._exit(1)
    if dice < 0.02:
        raise ValueError(solution_str)
    if dice < 0.03:
        return math.nan
    if dice < 0.04:
        return "text"
    if dice < 0.05:
        return None
    return dice


def slow(solution_str: str, **_: Any) -> float:
    time.sleep(2)
    return 1.0


def fast(solution_str: str, **_: Any) -> float:
    return 1.0


def process(solution_str: str, **_: Any) -> float:
    return float(os.getpid())


# --- TRL --------------------------------------------------------------------


def lengths(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


async def async_lengths(prompts: Any, completions: Sequence[Any], completion_ids: Any, **_: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [float(len(ids)) if ids else None for ids in completion_ids]


def with_columns(completions: Sequence[Any], answer: Sequence[str], log_metric: Any, **columns: Any) -> list[float]:
    log_metric("mean", 0.5)
    assert all(len(values) == len(completions) for name, values in columns.items() if isinstance(values, list))
    assert "trainer_state" in columns
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def prompts_too(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
    return [float(prompt in ("1+1", [{"role": "user", "content": "1+1"}])) for prompt in prompts]


def batch_size(completions: Sequence[Any], **_: Any) -> list[float]:
    time.sleep(0.01)
    return [float(len(completions))] * len(completions)


def poisoned(completions: Sequence[str], **_: Any) -> list[Any]:
    time.sleep(0.01)
    if "raise" in completions:
        raise ValueError
    if "leave" in completions:
        os._exit(1)
    if "hang" in completions:
        time.sleep(600)
    if "count" in completions:
        return [1.0] * (len(completions) + 1)
    return [1.0] * len(completions)


def neither(answer: str) -> float:
    return 1.0
