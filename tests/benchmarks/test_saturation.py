"""The benchmarks of the API process run, with few sequences, and see what they measure."""

import argparse
import asyncio
from pathlib import Path

import pytest

from benchmarks import saturation
from benchmarks.engine_messages import ROWS, measure_messages
from darts_server.demo.server import MODEL, serving

HEALTHY = {
    "began": 0.0,
    "ended": 10.0,
    "sent": 1000,
    "processed": 1000,
    "scripting": 0.0,
    "lags": [0.001],
    "tokens": [0.002],
    "stops": [],
    "answers": [0.004],
}


def test_messages_cost_something_in_each_way() -> None:
    lines = measure_messages(requests=3, tokens=8, rounds=1).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(ROWS)
    assert float(lines[2].split(" | ")[1]) > 0


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({}, "at none of these rates"),
        ({"lags": [0.06]}, "from 200 tokens/s on"),
        ({"tokens": [0.06]}, "from 200 tokens/s on"),
        ({"processed": 960}, "from 200 tokens/s on"),
    ],
)
def test_a_process_that_is_late_or_behind_is_saturated(change: dict[str, object], end: str) -> None:
    text = saturation.report([(100.0, 1.0, HEALTHY), (200.0, 1.0, HEALTHY | change)])
    assert text.endswith(f"Saturated {end}.")
    assert "| 100 | 100 | 10% | 1,000 | 1, 1 | 2 | 0 |  | 1 | 4.0, 4.0 |" in text


@pytest.mark.engine
@pytest.mark.nightly
def test_stops_and_answers_of_scripted_tokens_are_measured(tmp_path: Path) -> None:
    options = argparse.Namespace(sequences=24, tokens=20, seconds=3.0, rates=[2000], no_logprobs=False)
    command = ("benchmarks.saturation", saturation.SERVE, "20", str(MODEL))
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    with serving(command, tmp_path / "server.log", *saturation.FLAGS, env=env) as server:
        [(rate, cpu, found)] = asyncio.run(saturation.measure(server, options))
    assert (rate, cpu > 0) == (2000, True)
    assert found["processed"] > 0
    assert found["lags"]
    assert found["stops"]
    assert all(seconds > 0 for seconds in found["stops"] + found["answers"] + found["tokens"])
    assert found["answers"]
