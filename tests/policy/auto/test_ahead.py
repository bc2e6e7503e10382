"""How many prompts `auto` starts ahead of a step."""

import pytest

from darts_server.policy.auto.chooser import FEWEST_AHEAD, begin_with, choose_resuming, next_ahead
from darts_server.policy.auto.options import Auto, AutoLimits
from darts_server.policy.auto.state import AutoState


def test_a_share_of_what_is_offered_beyond_the_needed_prompts_is_started() -> None:
    assert [begin_with(16, 24, ahead) for ahead in (0.0, 0.5, 1.0)] == [16, 20, 24]
    assert begin_with(16, 16, 1.0) == begin_with(16, 16, 0.0) == 16
    assert begin_with(16, 10, 1.0) == 10, "no more than there are"


def test_it_follows_the_share_of_older_tokens_to_the_limit_and_back() -> None:
    ahead = 1.0
    for _ in range(20):  # the more are started, the more tokens are old
        ahead = next_ahead(ahead, 0.8 * ahead, 0.4)
    assert ahead == pytest.approx(0.5)
    assert next_ahead(0.5, 0.0, 0.4) > 0.5, "nothing was old"
    assert next_ahead(0.9, 0.1, 0.4) == 1.0
    assert next_ahead(FEWEST_AHEAD, 1.0, 0.4) == FEWEST_AHEAD, "else nothing would be learned any more"
    assert next_ahead(1.0, 0.0, 0.0) == 0.0, "no old token is allowed"


@pytest.mark.parametrize(
    ("limits", "begun"),
    [
        (AutoLimits(), 20),
        (AutoLimits(most_stale=0.0), 16),
        (AutoLimits(allow=()), 24),
    ],
)
def test_what_the_user_allows_says_how_many_run(limits: AutoLimits, begun: int) -> None:
    choice = choose_resuming(Auto(limits, ()), AutoState(ahead=0.5), 16, 24)
    assert (choice.begun, choice.num_groups) == (begun, 16)
    assert choice.option.shaping is None
    assert choice.reason == f"{begun} of 24 prompts run, and the first 16 groups are returned"
