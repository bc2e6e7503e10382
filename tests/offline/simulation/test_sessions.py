"""Policies on sessions: which sessions they prefer, and what they save."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.sessions import Session, Turn
from darts_server.offline.simulation.presets import TINY_MACHINE
from darts_server.offline.simulation.sessions import SESSION_POLICIES, run_sessions
from darts_server.offline.simulation.summary import Summary


def sessions(prompts: int, samples: int, seed: int = 0) -> list[list[Session]]:
    """Draw sessions of 1 to 4 turns, whose lengths have long tails."""
    rng = np.random.default_rng(seed)
    return [
        [
            Session(
                tuple(
                    Turn(20 if turn == 0 else 30, 1 + int(rng.lognormal(2, 1)), 0.05 * turn)
                    for turn in range(int(rng.integers(1, 5)))
                )
            )
            for _ in range(samples)
        ]
        for _ in range(prompts)
    ]


def run(text: str, workload: list[list[Session]], steps: int = 2, **options: Any) -> Summary:
    return run_sessions(text, workload, TINY_MACHINE, size=4, prompts=len(workload) // steps, steps=steps, **options)


def test_policies_with_weights_return_sessions_of_the_mean_length() -> None:
    workload = sessions(400, 6)
    for policy in ("off", "uniform", "uniform,longest=2", "cap"):
        found = run(policy, workload)
        assert abs(found["length_z"]) < 3
        assert abs(found["turns_z"]) < 3
    assert run("uniform", workload)["length"] != 0


def test_the_first_that_finish_are_too_short() -> None:
    found = run("first", sessions(400, 6))
    assert found["length"] < -0.1
    assert found["length_z"] < -10
    assert found["turns_bias"] < -0.1


def test_sessions_that_end_at_a_limit_have_finished_first_too() -> None:
    limited = [[session._replace(valid=False) for session in group] for group in sessions(10, 6)]
    assert run("first", limited) == run("first", sessions(10, 6))


def test_what_has_run_and_what_was_saved_are_all_that_was_to_do() -> None:
    workload = sessions(40, 6)
    turns = np.mean([len(session.turns) for group in workload for session in group])
    tools = np.mean([turn.tool_seconds for group in workload for session in group for turn in session.turns])
    tools *= turns
    for policy in ("first", "uniform", "cap", "uniform,longest=0"):
        found = run(policy, workload)
        started = 20 * (4 if policy == "cap" else 6)
        if policy != "cap":
            assert found["turns"] + found["turns_saved"] == pytest.approx(started * turns)
            assert found["tool_seconds"] + found["tool_seconds_saved"] == pytest.approx(started * tools)
        assert found["turns_saved"] > 0
        assert found["tool_seconds_saved"] > 0


def test_all_policies_get_the_same_sessions_and_too_few_samples_are_drawn_again() -> None:
    workload = sessions(20, 3)
    # A policy that stops nothing runs all sessions.
    whole = run("uniform,tail=longest", workload)
    more = run("uniform,tail=longest,redundancy=2", workload)
    assert run("off", workload)["tokens_generated"] < whole["tokens_generated"] < more["tokens_generated"]
    assert run("off", workload) == run("off", workload, seed=0) != run("off", workload, seed=1)


def test_cap_cuts_sessions_and_selects_all() -> None:
    found = run("cap", sessions(400, 4))
    assert 0 < found["cut_share"] < 0.2
    assert found["length"] == found["length_z"] == found["turns_bias"] == 0


def test_a_single_group_has_no_standard_error() -> None:
    assert run("uniform", sessions(1, 6), steps=1)["length_z"] == 0


def test_sessions_can_be_compared_by_seconds() -> None:
    workload = sessions(40, 6)
    by_tokens = run("uniform", workload)
    by_seconds = run("uniform", workload, by_seconds=True)
    assert by_tokens["tokens_generated"] != by_seconds["tokens_generated"]
    assert run("off", workload) == run("off", workload, by_seconds=True)


@pytest.mark.parametrize("policy", ["auto", "off,start=1.5", "uniform,order=long", "first,start=1.5"])
def test_a_policy_that_defers_prompts_is_not_for_sessions(policy: str) -> None:
    with pytest.raises(InvalidSetting, match="--join-turns"):
        run(policy, sessions(4, 4))


# --- the command --------------------------------------------------------------


def write(folder: Path) -> Path:
    """Write a trace of 8 prompts with 4 samples."""
    path = folder / "sessions.jsonl"
    lines = []
    for number, group in enumerate(sessions(8, 4)):
        for session in group:
            tools = enumerate(session.turns[1:])
            lines.append(
                {
                    "step": 0,
                    "group": number,
                    "prompt_tokens": 20,
                    "turns": [{"generated": turn.generated} for turn in session.turns],
                    "tools": [{"turn": i, "seconds": turn.tool_seconds, "tokens": turn.added} for i, turn in tools],
                }
            )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_compares_policies_on_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "found.json"
    flags = ["--preset", "tiny", "--prompts", "8", "--group-size", "4", "--steps", "1", "--json", str(found)]
    assert main(["simulate", "--trace", str(write(tmp_path)), *flags]) == 0
    table = capsys.readouterr().out.rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["policy", "off", *SESSION_POLICIES]
    written = json.loads(found.read_text())
    off = written["policies"][0]
    assert off["step_speedup"] == off["rollout_speedup"] == off["tokens_generated"] == 1
    whole = [session for group in sessions(8, 4) for session in group]
    assert off["turns"] == sum(len(session.turns) for session in whole)
    flags = [*flags, "--join-turns", "--policies", "darts"]
    assert main(["simulate", "--trace", str(write(tmp_path)), *flags]) == 0
    assert json.loads(found.read_text())["policies"][0]["truncated_share"] is not None


@pytest.mark.parametrize("flag", [["--speculate", "0.5"], ["--max-tokens", "50"]])
def test_flags_that_sessions_do_not_have_are_refused(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(write(tmp_path)), *flag]) == USAGE_ERROR
    assert "--join-turns" in capsys.readouterr().err
