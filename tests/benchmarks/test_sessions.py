"""The sessions that the replay imposes on the engine, and the limits of its controls."""

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.sessions import PROMPT_SCALE, TOOL_SCALE, context_of, load, parse_policy, with_limit
from darts_server.offline.simulation.model.sessions import Session, Turn

TRACED = Session((Turn(10, 40), Turn(20, 8, 0.5), Turn(1, 100, 0.25)))


def test_traced_lengths_and_tools_are_scaled_and_samples_shuffled(tmp_path: Path) -> None:
    trace = tmp_path / "sessions.jsonl"
    lines = [
        {
            "group": group,
            "prompt_tokens": 640,
            "turns": [{"generated": 40}, {"generated": 80 + sample}],
            "tools": [{"turn": 0, "seconds": 2.0, "tokens": 1280}],
        }
        for group in range(2)
        for sample in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    found = load(trace, seed=0, token_scale=0.5)
    assert [len(sessions) for sessions in found] == [40, 40]
    assert found[0][0].turns[0] == Turn(round(640 * PROMPT_SCALE), 20)
    assert {session.turns[1].tool_seconds for session in found[0]} == {2 * TOOL_SCALE}
    assert {session.turns[1].added for session in found[0]} == {1280 * PROMPT_SCALE}
    lengths = [session.turns[1].generated for session in found[0]]
    assert lengths != sorted(lengths) == [round((80 + sample) / 2) for sample in range(40)]
    assert context_of(found) == 10 + 20 + 20 + 60
    assert load(trace, seed=0, token_scale=0.001)[0][0].tokens == 2


def test_a_policy_may_be_a_limit_of_the_agent() -> None:
    assert with_limit("cap", TRACED, 0.5) == with_limit("turns 3", TRACED, 0.5) == TRACED
    assert with_limit("turns 1", TRACED, 0.5).turns == TRACED.turns[:1]
    # The limit is in tokens of the trace, and the lengths are scaled already.
    assert with_limit("tokens 90", TRACED, 0.5).turns == (Turn(10, 40), Turn(20, 5, 0.5))
    assert with_limit("tokens 1", TRACED, 0.1).tokens == 1


@pytest.mark.parametrize("text", ["turns 0", "tokens", "tokens 4.5", "darts"])
def test_unknown_policies_are_refused(text: str) -> None:
    assert parse_policy("tail batching") == "tail batching"
    assert parse_policy("tokens 487") == "tokens 487"
    with pytest.raises(argparse.ArgumentTypeError, match="turns N"):
        parse_policy(text)
