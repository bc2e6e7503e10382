"""The parts of the training loop without a server: rewards, batches, log and picture."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal

import pytest
import torch

from darts_client import Group, Trajectory
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import MODEL
from examples.tiny_rl import train
from examples.tiny_rl.grpo import Learner, Trained, Update, log_probs
from examples.tiny_rl.method import Method
from examples.tiny_rl.remote import Rollouts
from examples.tiny_rl.train_log import Entry, HeldOut, Seconds, Training, read_log

PROBLEM = sample_problem(Random(1))
RIGHT = f"#{PROBLEM.answer}"
SECONDS = Seconds(rollout=1.5, train=0.5, push=0.25)


def answer(text: str, length: int = 3, truncated: bool = False) -> Trajectory:
    reason: Literal["length", "stop"] = "length" if truncated else "stop"
    return Trajectory(0, text, (5,) * length, (-0.5,) * length, reason, weight_version_start=0)


def group(*trajectories: Trajectory) -> Group:
    return Group("g", None, trajectories)


def entry(step: int, right: float, held_out: float | None = None) -> Entry:
    training = Training(right, 0.1, 30.0, 90.0, 0.0, 5000, 3000, 300, -0.1, 0.2, 1e-5, step, SECONDS)
    return Entry(step, training, None if held_out is None else evaluation(held_out))


def evaluation(right: float) -> HeldOut:
    return HeldOut(8, right, 0.02, 31.0, 88.0, 7.0, 0.0, {"easy": [right], "hard": [right]})


def test_a_truncated_trajectory_is_trained_on_as_a_wrong_answer_with_all_its_tokens() -> None:
    answers = [answer(RIGHT), answer(RIGHT), answer("a-5=2", length=48, truncated=True)]
    rewards = [[train.score(PROBLEM, each) for each in answers]]
    batch = train.graded(
        [[7, 8]], Rollouts([group(*answers)], generated=100, decode_steps=40), rewards, Method("darts_cut")
    )
    assert [len(each.tokens) for each in batch] == [5, 5, 50]
    assert [len(each.logprobs) for each in batch] == [3, 3, 48]
    assert [each.prompt_length for each in batch] == [2, 2, 2]
    assert [each.advantage for each in batch] == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])


def test_held_out_problems_are_not_trained_on() -> None:
    held_out = train.problems(1, 50)
    pool = train.problems(1, 50, avoid=held_out)
    assert len({problem.prompt for problem in held_out + pool}) == 100


def test_the_same_seed_gives_the_same_order_and_each_epoch_all_problems_in_another() -> None:
    def epochs(seed: int) -> list[list[int]]:
        numbers = list(islice(train.endless(32, Random(seed)), 64))
        return [numbers[:32], numbers[32:]]

    first, second = epochs(3)
    assert [first, second] == epochs(3) != epochs(4)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(32))


def test_a_penalty_changes_advantages_and_not_the_rewards_that_are_reported() -> None:
    answers = group(answer(RIGHT, length=10), answer(RIGHT, length=72), answer(RIGHT, length=96, truncated=True))
    method = Method("off", max_tokens=96, overlong=48)
    rewards = [train.score(PROBLEM, each) for each in answers.trajectories]
    assert rewards == [1.0, 1.0, 0.0], "a truncated answer is a wrong one"
    assert train.penalized(answers, rewards, method) == [1.0, 0.5, -1.0]
    batch = train.graded([[7]], Rollouts([answers], generated=178, decode_steps=40), [rewards], method)
    assert batch[0].advantage > batch[1].advantage > batch[2].advantage


def weighted(truncated_long: bool) -> Group:
    """A group of the two shortest and a sample of three others, with correct and wrong answers."""
    trajectories = [
        replace(answer(RIGHT, 3), weight=1.0, selected_as="short"),
        replace(answer("#", 4), weight=1.0, selected_as="short"),
        replace(answer(RIGHT, 48, truncated_long), weight=3.0, selected_as="long"),
    ]
    return replace(group(*trajectories), num_eligible=5, num_shortest=2)


def test_unbiased_advantages_follow_weights_and_have_one_scale_for_the_whole_step() -> None:
    groups = [weighted(truncated_long=False), weighted(truncated_long=True)]
    rewards = [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    method = Method("uniform", unbiased=True)
    batch = train.graded([[7], [8]], Rollouts(groups, generated=200, decode_steps=40), rewards, method)
    expected = [1.0, -1.0, 0.0, 1.0, -1.0, -3.0]  # w (r - the mean of the shortest other)
    scale = (sum(value**2 for value in expected) / 6) ** 0.5
    assert [each.advantage for each in batch] == pytest.approx([value / scale for value in expected])


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_group_that_ran_by_chance_counts_more(unbiased: bool) -> None:
    always = weighted(truncated_long=False)
    groups = [always, replace(always, run_probability=0.25)]
    first, second = train.step_advantages(groups, [[1.0, 0.0, 1.0]] * 2, Method("uniform", unbiased=unbiased))
    assert second == pytest.approx([4 * value for value in first])


def test_tokens_of_other_weights_than_the_served_weights_are_stale() -> None:
    resumed = replace(answer("#", 5), version_spans=((6, 2), (7, 3)))
    groups = [group(resumed, replace(answer("#", 4), version_spans=((6, 4),))), group(replace(resumed))]
    shaped = Rollouts(groups, generated=14, decode_steps=4)
    stale = train.stale_tokens(shaped, 7)
    assert stale == [[2, 4], [2]]
    rewards = [[1.0, 0.0], [0.0]]
    graded = train.graded([[7], [8]], shaped, rewards, Method("off", started=1.5, carry="resume"), stale)
    assert [each.stale for each in graded] == [2, 4, 2]
    assert train.summary(shaped, rewards, Update(-0.1, 0.2, 1e-5), SECONDS, stale).off_policy == 8 / 14
    assert train.summary(shaped, rewards, Update(-0.1, 0.2, 1e-5), SECONDS).off_policy == 0.0


def test_a_learner_continues_where_another_was() -> None:
    tokens = [7, 8, 20, 21, 1]
    with torch.no_grad():
        logprobs = log_probs(Learner(MODEL).model, torch.tensor([tokens]), torch.tensor([tokens]))[0, 1:].tolist()
    batch = [Trained(tokens, 2, logprobs, 1.0)]
    first, second = Learner(MODEL), Learner(MODEL)
    first.update(batch)
    second.load_state(first.state())
    assert second.weights() == first.weights() != Learner(MODEL).weights()
    moments = [learner.state()["optimizer"]["state"][0]["exp_avg"] for learner in (first, second)]
    assert torch.equal(*moments)


def test_held_out_error_counts_prompts_not_samples() -> None:
    difficulties = ["hard", "easy", "hard"]
    rewards = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    held_out = HeldOut.of(difficulties, rewards, [[2, 2, 2, 2], [8, 4, 4, 8], [3, 3, 3, 3]], 3)
    assert held_out.rights == {"easy": [0], "hard": [1, 1]}
    assert held_out.samples == 12
    assert held_out.right == pytest.approx(2 / 3)
    assert held_out.standard_error == pytest.approx(1 / 3)
    assert held_out.length_std == pytest.approx(16**0.5 / 3**0.5 / 3)
    assert held_out.truncated == 0.25


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [Entry(0, held_out=evaluation(0.5)), entry(1, 0.5), entry(2, 0.6, 0.7)]
    path = tmp_path / "log.jsonl"
    with path.open("w") as log:
        assert train.run(iter(entries), 2, log) == entries
    assert len(path.read_text().splitlines()) == 3
    assert read_log(path) == entries


@pytest.mark.parametrize(
    "argv", [["--steps", "0"], ["--prompts-ahead", "-1"], ["--max-staleness", "1", "--prompts-ahead", "0.5"]]
)
def test_invalid_options_are_rejected(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.arguments(argv)
    assert argv[0] in capsys.readouterr().err
