"""Policies on sessions: which sessions they prefer, and what they save."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.estimates.latency import LatencyCurve
from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.engines import Machine, StepTime
from darts_server.offline.simulation.model.sessions import Session, Turn
from darts_server.offline.simulation.presets import TINY_MACHINE
from darts_server.offline.simulation.sessions import (
    SESSION_POLICIES,
    SessionTraining,
    best_limits,
    compare_with_limits,
    limit_session,
    run_sessions,
)
from darts_server.offline.simulation.summary import Summary

ROOMY = Machine(StepTime(LatencyCurve((1.0,), (1.0,))))
"""Each step takes a second."""
RESTART = "off,start=1.5"
RESUME = "off,start=1.5,carry=resume"


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
    return run_sessions(text, SessionTraining(workload, TINY_MACHINE, 4, len(workload) // steps, steps, **options))


def one_turn(*tokens: int) -> list[Session]:
    return [Session((Turn(1, each),)) for each in tokens]


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


@pytest.mark.parametrize(
    "policy", ["auto", "uniform,order=long", "off,start=1.25,rounds=long", "cap,start=1.5,carry=resume"]
)
def test_a_policy_may_not_be_for_sessions(policy: str) -> None:
    with pytest.raises(InvalidSetting, match="--join-turns"):
        run(policy, sessions(4, 4))


# --- tail batching --------------------------------------------------------------


@pytest.mark.parametrize("carry", ["restart", "resume"])
def test_the_first_groups_that_are_complete_end_a_step(carry: str) -> None:
    # A step of one prompt runs two, and each step of the engine takes a second.
    training = SessionTraining([one_turn(3, 3), one_turn(8, 8)], ROOMY, 2, 1, 6)
    found = run_sessions(f"off,start=2,carry={carry}", training)
    seconds = []
    left = training.draw(0, 1, 2)[0][0].tokens
    for number in range(1, 9):
        new = training.draw(number, 1, 2)[0][0].tokens
        seconds.append(min(left, new))
        left = max(left, new)
        if carry == "resume":
            left -= seconds[-1]
    assert len({*seconds}) > 1
    # Two steps come before the measured steps.
    assert found["rollouts"] == seconds[2:]
    if carry == "restart":
        assert found["tokens_generated"] == 4 * np.mean(seconds[2:])


def test_tail_batching_prefers_fast_groups_and_resumed_groups_are_returned_later() -> None:
    workload = sessions(600, 6)
    restart = run(RESTART, workload, 10)
    resume = run(RESUME, workload, 10)
    off = run("off", workload, 10)
    assert restart["length"] < -0.1
    assert restart["length_z"] < -5
    assert abs(resume["length_z"]) < 3
    assert off["length_z"] == off["turns_z"] == 0
    assert restart["tokens_generated"] > 1.2 * off["tokens_generated"]
    assert resume["tokens_generated"] == pytest.approx(off["tokens_generated"], rel=0.05)
    assert (off["stale_share"], restart["stale_share"]) == (0, 0)
    assert 0.1 < resume["stale_share"] < 0.8
    assert resume["rollout_seconds"] < off["rollout_seconds"]


@pytest.mark.parametrize("policy", ["first", "uniform", "cap"])
def test_policies_can_restart_prompts_too(policy: str) -> None:
    training = SessionTraining(sessions(60, 6), ROOMY, 4, 30, 2)
    alone = run_sessions(policy, training)
    found = run_sessions(f"{policy},start=1.5", training)
    assert found["rollout_seconds"] < alone["rollout_seconds"]
    assert found["tokens_generated"] > alone["tokens_generated"]


# --- limits in hindsight ---------------------------------------------------------


def test_a_limit_ends_a_session_at_its_turn_or_token() -> None:
    whole = Session((Turn(5, 4), Turn(2, 3, 0.5), Turn(1, 6, 0.25)))
    assert limit_session(whole) == limit_session(whole, turns=3) == limit_session(whole, tokens=13) == whole
    assert limit_session(whole, turns=2).turns == limit_session(whole, tokens=7).turns == whole.turns[:2]
    assert limit_session(whole, tokens=8).turns == (*whole.turns[:2], Turn(1, 1, 0.25))
    assert limit_session(whole, tokens=2).turns == (Turn(5, 2),)


def test_the_best_limits_cut_no_more_than_a_share() -> None:
    # Sessions of 1 to 20 tokens, the longest five in two turns.
    workload = [one_turn(*range(1, 16)), [Session((Turn(1, 1), Turn(0, more))) for more in range(15, 20)]]
    assert best_limits(workload, [0.05, 0.25]) == [{"turns": 1}, {"tokens": 19}, {"tokens": 15}]
    assert best_limits([one_turn(7, 7)], [0.1]) == [{"tokens": 6}]


def test_a_limit_cuts_and_loses_what_is_beyond_it() -> None:
    workload = [[Session((Turn(1, 2), Turn(1, 6, 5.0))), *one_turn(4, 4, 5)]]
    found = compare_with_limits(["uniform,tail=longest"], SessionTraining(workload, ROOMY, 4, 1, 2))
    by_name = {summary["policy"]: summary for summary in found}
    assert [*by_name] == ["off", "uniform,tail=longest", "hindsight turns 1", "hindsight tokens 7"]
    off = by_name["off"]
    assert (off["rollout_seconds"], off["cut_share"], off["lost_share"]) == (2 + 5 + 6, 0, 0)
    turns = by_name["hindsight turns 1"]
    # 6 of 8 + 4 + 4 + 5 tokens are cut off.
    assert (turns["rollout_seconds"], turns["rollout_speedup"], turns["rollout_error"]) == (5, 13 / 5, 0)
    assert (turns["cut_share"], turns["lost_share"]) == (1 / 4, pytest.approx(6 / 21))
    assert (turns["turns"], turns["turns_saved"], turns["tool_seconds_saved"]) == (4, 1, 5)
    assert (turns["length"], turns["length_z"]) == (0, 0)
    tokens = by_name["hindsight tokens 7"]
    assert (tokens["rollout_seconds"], tokens["cut_share"]) == (12, 1 / 4)
    assert tokens["lost_share"] == pytest.approx(1 / 21)


def test_a_speed_has_the_standard_error_of_a_ratio_over_the_steps() -> None:
    # Steps of one prompt, which take 4 or 12 seconds, and with the limit 4 or 8 seconds.
    workload = [one_turn(2, 4), one_turn(8, 12)]
    found = compare_with_limits([], SessionTraining(workload, ROOMY, 2, 1, 2))
    tokens = found[-1]
    assert sorted(tokens["rollouts"]) == [4, 11]
    assert tokens["rollout_speedup"] == 16 / 15
    # Differences 4 - 64 / 15 and 12 - 176 / 15, so a standard deviation of sqrt(2) 4 / 15.
    assert tokens["rollout_error"] == pytest.approx(4 / 15 / 7.5)
    single = compare_with_limits([], SessionTraining(workload, ROOMY, 2, 1, 1))
    assert single[-1]["rollout_error"] is None


def test_the_limits_in_hindsight_include_the_share_that_a_policy_cuts() -> None:
    training = SessionTraining(sessions(100, 4), TINY_MACHINE, 4, 50, 2)
    off, cap, *limits = compare_with_limits(["cap"], training)
    assert 0 < cap["cut_share"] < 0.1
    nearest = min(limits, key=lambda summary: abs(summary["cut_share"] - cap["cut_share"]))
    assert nearest["policy"].startswith("hindsight tokens")
    assert nearest["cut_share"] == pytest.approx(cap["cut_share"], abs=0.01)
    assert off["rollout_speedup"] == 1 < nearest["rollout_speedup"]


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
    names = [line.split()[0] for line in table]
    assert names[: 2 + len(SESSION_POLICIES)] == ["policy", "off", *SESSION_POLICIES]
    assert {*names[2 + len(SESSION_POLICIES) :]} == {"hindsight"}
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
