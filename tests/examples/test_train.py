"""The parts of the training loop without a server: rewards, batches, log and picture."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from darts_client import Group, Trajectory
from darts_server.demo.problems import Problem, sample_problem
from examples.tiny_rl import train
from examples.tiny_rl.grpo import Update
from examples.tiny_rl.remote import Rollouts
from examples.tiny_rl.train_log import Entry, HeldOut, Seconds, Training, read_log
from examples.tiny_rl.train_picture import picture

PROBLEM = sample_problem(Random(1))
RIGHT = f"#{PROBLEM.answer}"
SECONDS = Seconds(rollout=1.5, train=0.5, push=0.25)


def answer(text: str, length: int = 3, truncated: bool = False, version: int = 0) -> Trajectory:
    reason: Literal["length", "stop"] = "length" if truncated else "stop"
    return Trajectory(0, text, (5,) * length, (-0.5,) * length, reason, weight_version_start=version)


def group(*trajectories: Trajectory) -> Group:
    return Group("g", None, trajectories)


def entry(step: int, right: float, held_out: float | None = None) -> Entry:
    training = Training(right, 0.1, 30.0, 90.0, 0.0, 5000, 3000, -0.1, 0.2, 1e-5, step, SECONDS)
    return Entry(step, training, None if held_out is None else HeldOut(8, held_out, 0.02, 31.0, 88.0, 7.0, 0.0))


def test_a_right_answer_is_rewarded_with_one_and_a_truncated_one_with_nothing() -> None:
    assert train.score(PROBLEM, answer(RIGHT)) == 1.0
    assert train.score(PROBLEM, answer("#")) == 0.0
    assert train.score(PROBLEM, answer(RIGHT, truncated=True)) == 0.0


def test_a_truncated_trajectory_is_trained_on_with_all_its_tokens_as_a_wrong_one() -> None:
    answers = [answer(RIGHT), answer(RIGHT), answer("a-5=2", length=48, truncated=True)]
    rewards = [[train.score(PROBLEM, each) for each in answers]]
    batch = train.graded([[7, 8]], Rollouts([group(*answers)], generated=100), rewards)
    assert [len(each.tokens) for each in batch] == [5, 5, 50]
    assert [len(each.logprobs) for each in batch] == [3, 3, 48]
    assert [each.prompt_length for each in batch] == [2, 2, 2]
    assert [each.advantage for each in batch] == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])


def test_held_out_problems_are_not_trained_on() -> None:
    held_out = train.problems(1, 50)
    pool = train.problems(1, 50, avoid=held_out)
    assert len({problem.prompt for problem in held_out + pool}) == 100


def test_the_same_seed_gives_the_same_batches_and_each_epoch_all_problems_in_a_new_order() -> None:
    def epochs(seed: int) -> list[list[Problem]]:
        pool = train.problems(seed, 32)
        batches = list(islice(train.endless(pool, 8, Random(seed)), 8))
        return [[problem for batch in half for problem in batch] for half in (batches[:4], batches[4:])]

    first, second = epochs(3)
    assert [first, second] == epochs(3) != epochs(4)
    assert first != second
    assert {problem.prompt for problem in first} == {problem.prompt for problem in second}
    assert len(first) == 32


def test_the_log_describes_the_groups() -> None:
    groups = [group(answer(RIGHT, 4, version=7), answer("#", 2, version=7)), group(*[answer("x", 256, True, 7)] * 2)]
    rewards = [[1.0, 0.0], [0.0, 0.0]]
    summary = train.summary(Rollouts(groups, generated=900), rewards, Update(-0.1, 0.2, 1e-5), SECONDS)
    assert (summary.right, summary.reward_variance, summary.truncated) == (0.25, 0.125, 0.5)
    assert (summary.generated, summary.trained, summary.length_mean) == (900, 518, 129.5)
    assert summary.weight_version == 7
    assert summary.seconds.total == 2.25


def test_held_out_error_counts_prompts_not_samples() -> None:
    held_out = HeldOut.of([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], [[2, 2, 2, 2], [8, 4, 4, 8], [3, 3, 3, 3]], 3)
    assert held_out.samples == 12
    assert held_out.right == pytest.approx(2 / 3)
    assert held_out.standard_error == pytest.approx(1 / 3)
    assert held_out.length_std == pytest.approx(16**0.5 / 3**0.5 / 3)
    assert held_out.truncated == 0.25


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [Entry(0, held_out=HeldOut(8, 0.5, 0.02, 31.0, 88.0, 7.0, 0.1)), entry(1, 0.5), entry(2, 0.6, 0.7)]
    path = tmp_path / "log.jsonl"
    with path.open("w") as log:
        assert train.run(iter(entries), 2, log) == entries
    assert len(path.read_text().splitlines()) == 3
    assert read_log(path) == entries


@pytest.mark.parametrize("steps", [1, 4])
def test_picture_is_a_png_however_short_the_run_was(tmp_path: Path, steps: int) -> None:
    entries = [Entry(0, held_out=HeldOut(8, 0.5, 0.02, 31.0, 88.0, 7.0, 0.1))]
    entries += [entry(step, 0.5 + step / 10, 0.6) for step in range(1, steps + 1)]
    picture(entries, "darts_cut", tmp_path / "new" / "training.png")
    data = (tmp_path / "new" / "training.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 20_000


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--seed", "x"]])
def test_invalid_options_are_rejected(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.arguments(argv)
    assert argv[0] in capsys.readouterr().err
