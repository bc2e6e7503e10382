"""The parts of TRL's example that need neither a server nor a trainer."""

from dataclasses import replace

import pytest

from darts_client.integrations.trl import RewardReport
from examples.tiny_rl.tokenizer import EOS_ID
from examples.tiny_rl.train import problems
from examples.tiny_rl.train_log import HeldOut
from examples.tiny_rl.train_trl import arguments, summary, verifier

pytestmark = pytest.mark.filterwarnings("default")  # of what TRL imports
STEP = {
    "step_time": 2.0,
    "darts/tokens_generated": 30.0,
    "darts/tokens_returned": 20.0,
    "sampling/sampling_logp_difference/max": 2e-6,
}


def test_the_reward_is_the_verifiers_and_0_for_a_truncated_completion() -> None:
    first, second = problems(0, 2)
    texts = [f"#{first.answer}", f"#{first.answer}", f"#{(second.answer + 1) % 10}", ""]
    ids = [[9, EOS_ID], [9, 9], [9, EOS_ID], [EOS_ID]]
    prompts = [first.prompt, first.prompt, second.prompt, second.prompt]
    right = verifier([first, second])
    assert right(prompts=prompts, completions=texts, completion_ids=ids, trainer_state=None) == [1.0, 0.0, 0.0, 0.0]
    assert right.__name__ == "right"  # TRL's log has the name


def test_the_summary_has_both_evaluations_and_the_counts_of_rewards() -> None:
    steps = [STEP | {"reward": reward} for reward in (0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9)]
    before = HeldOut(8, 0.5, 0.01, 40.0, 100.0, 9.0, 0.0, {"easy": [0.5]})
    report = RewardReport(0.0, matched=60, repeated=15, unknown=2, unreported=3)
    text = summary(steps, before, replace(before, right=0.75), report, 31.0)
    assert "0.500 ± 0.010 right, 40.0 tokens before, 0.750" in text
    assert "0.100 in the first 5 steps, 0.900 in the last" in text
    assert "300 generated, 200 trained on" in text
    assert "at most 2e-06" in text
    assert "75 reached their trajectory, 5 did not" in text


def test_prompts_ahead_and_staleness_are_those_of_the_trainer() -> None:
    options = arguments(["--prompts-ahead", "0.5", "--max-staleness", "1"])
    assert (options.prompts_ahead, options.max_staleness) == (0.5, 1)
    assert (arguments([]).prompts_ahead, arguments([]).max_staleness) == (0.0, 0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--prompts-ahead", "-1"], "--prompts-ahead must be at least 0"),
        (["--max-staleness", "2"], "--max-staleness"),
        (["--unbiased", "--max-staleness", "1"], "--unbiased does not go with"),
        (["--unbiased", "--prompts-ahead", "1"], "--unbiased does not go with"),
    ],
)
def test_invalid_options_are_rejected(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err
