"""With how many complete groups `auto` lets a batch end whose caller can defer prompts, and how many run ahead."""

from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.auto.chooser import (
    FEWEST_AHEAD,
    Choice,
    begin,
    begin_with,
    choose,
    choose_resuming,
    learn,
    next_ahead,
)
from darts_server.policy.auto.options import RESTART, UNSHAPED, Auto, AutoLimits, build_auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.forecast import Expectation
from tests.policy.auto.test_chooser import EMPTY, EQUAL, FULL, MEASURED, SIZE, TAIL, measured

GROUPS, LEAST = 16, 12
LONG = [100.0] * 14 + [1500.0] * 2
"""Mean lengths of prompts, two of which need much longer answers."""
OFF_ALONE = AutoLimits(allow=(RESTART,), most_lost=1.0, most_bias=1.0, exploration=0.0)
UNIFORM = replace(OFF_ALONE, allow=("uniform", RESTART))


def chosen(
    means: list[float],
    limits: AutoLimits = OFF_ALONE,
    state: AutoState = MEASURED,
    ratios: np.ndarray = EQUAL,
    min_groups: int | None = LEAST,
    machine: Machine = EMPTY,
) -> Choice:
    expectation = Expectation(means, [10.0] * len(means), ratios, max_tokens=4000)
    made: Auto = build_auto(Shaping(), Deadline(exploration=0.0), limits)
    rng = np.random.default_rng(0)
    return choose(made, state, SIZE, expectation, machine, len(means), rng, min_groups=min_groups)


def test_a_few_long_prompts_are_deferred() -> None:
    choice = chosen(LONG)
    assert (choice.option.name, choice.name, choice.enough) == ("off", "off deferring", 14)
    assert "s a step for 14 of 16 groups, off" in choice.reason
    assert choice.scope == " for 14 of 16 groups"
    assert choice.seconds < 0.1 * choice.off_seconds


def test_more_are_deferred_where_more_are_long() -> None:
    assert chosen([100.0] * 12 + [1500.0] * 4).enough == LEAST


def test_a_long_tail_of_each_prompt_is_deferred_under_the_option_that_is_best_for_fewer() -> None:
    choice = chosen([100.0] * GROUPS, replace(UNIFORM, most_bias=0.9), ratios=TAIL)
    assert choice.option.shaping is not None
    assert choice.enough is not None


def test_equal_prompts_are_all_waited_for() -> None:
    choice = chosen([100.0] * GROUPS)
    assert (choice.option.name, choice.enough, choice.scope) == ("off", None, "")
    assert "off 1 s for 14 of 16 groups" in choice.reason


def test_full_engines_generate_too_much_for_those_that_are_deferred() -> None:
    assert chosen([100.0] * GROUPS, UNIFORM, machine=FULL).enough is None


def test_nothing_is_deferred_where_the_caller_or_the_user_does_not_allow_it() -> None:
    for choice in (chosen(LONG, min_groups=None), chosen(LONG, replace(OFF_ALONE, allow=()))):
        assert (choice.option, choice.enough) == (UNSHAPED, None)
        assert choice.reason == "nothing else is within the limits"


def test_the_wasted_tokens_of_deferred_prompts_have_a_price() -> None:
    assert chosen([100.0] * 14 + [140.0] * 2).enough == 14
    assert chosen([100.0] * 14 + [140.0] * 2, replace(OFF_ALONE, tokens_price=5.0)).enough is None


@pytest.mark.parametrize("least", [1, 15])
def test_one_group_may_be_enough_or_all_but_one(least: int) -> None:
    assert chosen([100.0] * 15 + [1500.0], min_groups=least).enough == max(least, 8)


def test_what_is_learned_of_deferring_does_not_change_what_is_expected_of_all_groups() -> None:
    choice = chosen(LONG)
    before = begin(MEASURED, choice)
    state = learn(before, choice, measured(choice, 1.3))
    assert state.measured[-1].name == "off deferring"
    for _ in range(20):
        state = learn(begin(state, choice), choice, measured(choice, 1.3))
    assert [one for one in state.measured if one.name == "off"] == list(MEASURED.measured)
    assert state.expect("error", "off deferring") == pytest.approx(np.log(1.3), abs=0.04)
    assert state.expect("error", "off") < 0.3 * np.log(1.3)
    late = replace(measured(choice), truncated=0.5)
    assert learn(begin(state, choice), choice, late).expect("more_truncated", "off") == 0.0


def test_a_limit_of_lengths_counts_no_deferred_prompt() -> None:
    limits = replace(UNIFORM, most_bias=0.05)
    choice = chosen(LONG, limits)
    assert choice.enough == 14
    whole = chosen(LONG, replace(limits, allow=()))
    assert measured(choice).mean_length < 0.5 * measured(whole).mean_length
    assert choice.below_bias >= 0
    assert choice.usual_length == pytest.approx(measured(choice).mean_length, rel=0.05)
    state = begin(MEASURED, choice)
    assert learn(state, choice, measured(choice)).spare_bias == pytest.approx(state.spare_bias, rel=0.05)


@pytest.mark.untraced
def test_deferring_that_loses_is_given_up_and_all_groups_are_waited_for() -> None:
    """It takes twice as long as waiting for all, of which a twentieth was forecast."""
    whole = chosen(LONG, min_groups=None).forecast
    assert whole is not None
    state, waits = MEASURED, []
    for _ in range(12):
        choice = chosen(LONG, state=state)
        waits.append(choice.enough is None)
        seconds = whole.seconds if choice.enough is None else 2 * whole.seconds
        state = learn(begin(state, choice), choice, replace(measured(choice), seconds=seconds))
    assert not waits[0]
    assert waits.count(False) <= 6
    assert all(waits[-3:])


# --- prompts that go on later from what they have ------------------------------


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
