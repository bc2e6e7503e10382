"""How the benchmark of predictions reads what a server has learned, and compares."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from benchmarks.prediction import POLICIES, SIZE, Learned, Row, report, shaping_of
from darts_client import Group, Trajectory
from darts_server.policy.latency import LatencyModel
from darts_server.policy.length_profile import LengthProfile
from darts_server.policy.lengths import PromptStats
from darts_server.store import Store


def saved(*, step_seconds: float = 0.01, start_seconds: float = 0.0) -> bytes:
    """A state in which every length is that of its prompt's mean, and every step and every start take equally long."""
    latency, profile = LatencyModel(), LengthProfile()
    for batch in (1, 8, 64, 256):
        for _ in range(20):
            latency.observe(batch, step_seconds)
    for _ in range(20):
        latency.observe(64, step_seconds + 8 * start_seconds, 8)
    profile.observe([(1.0, False)] * 500)
    with Store() as store:
        for number in range(10):
            store.put("prompt", f"p{number}", asdict(PromptStats(0.0, 40.0, 1, SIZE, 0)))
        store.put("latency", "engine", {"value": json.dumps(latency.state)})
        store.put("profile", "all", {"value": json.dumps(profile.state)})
        return store.export()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rollout_of_equal_lengths_takes_as_many_steps(policy: str) -> None:
    learned = Learned.of_state(saved())
    seconds = learned.seconds(shaping_of(policy), [f"p{number}" for number in range(8)], np.random.default_rng(0))
    assert seconds == pytest.approx(0.40, rel=0.1)  # ratios are kept in bins, and the longest is a few per cent longer


def test_candidates_beyond_what_the_engine_runs_at_once_queue() -> None:
    learned = Learned.of_state(saved())
    keys = [f"p{number % 10}" for number in range(17)]
    assert learned.seconds(None, keys, np.random.default_rng(0)) == pytest.approx(0.80, rel=0.1)


def test_candidates_that_start_take_time_besides_their_tokens() -> None:
    learned, free = Learned.of_state(saved(start_seconds=0.001)), Learned.of_state(saved())
    keys = [f"p{number}" for number in range(8)]
    for policy, candidates in (("off", SIZE), ("uniform", 12)):
        seconds = [each.seconds(shaping_of(policy), keys, np.random.default_rng(0)) for each in (learned, free)]
        assert seconds[0] - seconds[1] == pytest.approx(0.001 * 8 * candidates)
    trajectory = Trajectory(0, "", finish_reason="stop", token_ids=(1,) * 20, logprobs=None)
    assert learned.replayed([Group("g", None, (trajectory,) * 3)]) == pytest.approx(0.203)
    assert str(learned).endswith("10.00 ms of 128; a candidate that starts 1.00 ms.")


def test_a_state_without_lengths_or_steps_is_refused() -> None:
    with Store() as store, pytest.raises(ValueError, match="lacks lengths or step times"):
        Learned.of_state(store.export())


def test_errors_are_against_the_mean_of_the_rounds_and_last() -> None:
    rows = [
        Row("off", 8, 0.9, [64, 64], measured=[0.8, 1.2], replayed=[0.9, 0.9]),
        Row("cap", 8, 1.4, [64, 64], measured=[2.0, 2.0], replayed=[1.9, 1.9]),
    ]
    assert rows[0].error == pytest.approx(-0.1)
    assert rows[1].corrected(1.2) == pytest.approx(1.4 * 1.2 / 2 - 1)
    lines = report(Learned.of_state(saved()), rows, 1.2).splitlines()
    assert lines[-1] == "Predicted: median error 20.0%, largest 30.0%. Wanted: 10%, 25%."
    assert "| 8 | off | 64 | 1.000 [0.800, 1.200] | 0.900 | -10% | 0.900 | -10% | +8% |" in lines
