"""From requests to a trace and its simulation, where most answers are truncated."""

import json
from pathlib import Path

import httpx
import pytest

from darts_server.cli import main
from darts_server.offline.demo.server import Server
from darts_server.store.archive import pack

pytestmark = pytest.mark.engine
LIMIT = 20
"""Tokens. Most answers of the tiny model are longer at `TEMPERATURE`."""
TEMPERATURE = 2.0


def test_truncated_answers_are_exported_as_truncated_and_simulated_without_a_gain_by_carry_over(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[int]] = []
    truncated = 0
    with httpx.Client(base_url=server.url, timeout=240) as api:
        before = api.get("/darts/v1/state").content
        api.put("/darts/v1/state", content=pack([])).raise_for_status()
        policy = api.get("/darts/v1/policy").json()["policy"]
        try:
            api.patch("/darts/v1/policy", json={"policy": "auto"}).raise_for_status()
            prompts = [f"{number // 10}a+{number % 10}b-{number % 7}c>" for number in range(100)]
            for first in range(0, 100, 25):
                sampling = {"n": 2, "max_tokens": LIMIT, "temperature": TEMPERATURE, "return_token_ids": True}
                # Other random numbers than these may give lengths with a gain just above the limit.
                body = {"model": "tiny", "prompt": prompts[first : first + 25], "seed": first} | sampling
                choices = api.post("/v1/completions", json=body).json()["choices"]
                lengths = [len(choice["token_ids"]) for choice in choices]
                sent += [sorted(lengths[place : place + 2]) for place in range(0, 50, 2)]
                truncated += sum(choice["finish_reason"] == "length" for choice in choices)
            trace = tmp_path / "lengths.jsonl"
            assert main(["trace", "export", "--url", server.url, "--output", str(trace)]) == 0
        finally:
            api.patch("/darts/v1/policy", json={"policy": policy}).raise_for_status()
            api.put("/darts/v1/state", content=before).raise_for_status()
    assert truncated > 100, "more than half of 200 answers"

    # The trace has the lengths that were sent, with the limit and the prompts' tokens, and nothing else.
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sorted(sorted(line["lengths"]) for line in lines) == sorted(sent)
    assert {line["cap"] for line in lines} == {LIMIT}
    assert {line["prompt_tokens"] for line in lines} == {9}
    mean = sum(map(sum, sent)) / 200
    said = capsys.readouterr().out
    assert f"200 lengths: mean {mean:.1f} tokens, longest {LIMIT}." in said
    assert f"Limit: {LIMIT} tokens; {truncated / 200:.0%} of the lengths are truncated there." in said
    assert "drawn" not in said

    flags = ["--trace", str(trace), "--preset", "tiny", "--policies", "off,start=1.5,carry=resume", "auto"]
    assert main(["simulate", *flags]) == 0
    said = capsys.readouterr().out
    at_limit = sum(length == LIMIT for pair in sent for length in pair)
    assert f"mean {mean:.1f} tokens, longest {LIMIT}, {at_limit / 200:.0%} at the limit" in said
    assert "Carry-over gains next to nothing on these lengths: it is at best 1.0" in said
