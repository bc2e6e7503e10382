import pytest

from examples.tiny_rl.tokenizer import EOS_ID
from examples.tiny_rl.train import problems
from examples.tiny_rl.train_trl import arguments, verifier

pytestmark = pytest.mark.filterwarnings("default")  # of what TRL imports


def test_the_reward_is_the_verifiers_and_0_for_a_truncated_completion() -> None:
    first, second = problems(0, 2)
    texts = [f"#{first.answer}", f"#{first.answer}", f"#{(second.answer + 1) % 10}", ""]
    ids = [[9, EOS_ID], [9, 9], [9, EOS_ID], [EOS_ID]]
    prompts = [first.prompt, first.prompt, second.prompt, second.prompt]
    right = verifier([first, second])
    assert right(prompts=prompts, completions=texts, completion_ids=ids, trainer_state=None) == [1.0, 0.0, 0.0, 0.0]
    assert right.__name__ == "right"  # TRL's log has the name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--prompts-ahead", "-1"], "--prompts-ahead must be at least 0"),
        (["--unbiased", "--max-staleness", "1"], "--unbiased does not go with"),
        (["--unbiased", "--prompts-ahead", "1"], "--unbiased does not go with"),
    ],
)
def test_invalid_options_are_rejected(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err
