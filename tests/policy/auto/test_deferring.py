"""With how many complete groups `auto` lets a batch end whose caller can defer prompts, and how many run ahead."""

from dataclasses import dataclass, field, replace
from math import exp

import numpy as np
import pytest

from darts_server.policy.auto.chooser import (
    FEWEST_AHEAD,
    Choice,
    MeasuredResuming,
    begin,
    choose,
    choose_resuming,
    learn,
    learn_resuming,
)
from darts_server.policy.auto.options import AHEAD, RESTART, UNSHAPED, Auto, AutoLimits, build_auto
from darts_server.policy.auto.state import AutoState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.forecast import Expectation
from darts_server.types import OFF
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


STRAGGLING = [[94] * 4] * 15 + [[190] * 4]
"""Lengths of 16 groups of 4: 6,400 tokens."""
TOGETHER = [[100] * 4] * 16


@dataclass
class Training:
    """Batches of which 16 of 24 groups of 4 are needed, one after the other.

    A batch that runs what is needed takes as long as the model says for ``returned``, the lengths that all batches
    return. A batch that runs more takes ``ahead`` times as long. Of the returned tokens ``stale`` are of older weights,
    for each prompt that ran ahead.
    """

    ahead: float
    limits: AutoLimits = field(default_factory=AutoLimits)
    stale: int = 0
    noise: float = 0.0
    offered: int = 24
    lost: int = 0
    returned: list[list[int]] = field(default_factory=lambda: STRAGGLING)
    machine: Machine = EMPTY
    state: AutoState = field(default_factory=AutoState)
    choices: list[Choice] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, batches: int) -> str:
        """Return which of the batches ran ahead, as 0 and 1."""
        self.choices.clear()
        for _ in range(batches):
            choice = choose_resuming(Auto(self.limits, ()), self.state, 16, self.offered, self.lost)
            self.choices.append(choice)
            more = int(choice.begun or 0) - 16
            seconds = 0.01 * max(map(max, self.returned)) * exp(self.noise * self.rng.standard_normal())
            seconds *= self.ahead if more else 1.0
            measured = MeasuredResuming(self.returned, 1, self.stale * more, 6400, seconds)
            self.state = learn_resuming(self.state, choice, measured, self.machine)
        return "".join(str(int(choice.begun != 16)) for choice in self.choices)


def test_more_than_are_needed_run_from_the_first_batch_on() -> None:
    training = Training(ahead=0.5)
    assert training.run(4) == "1111"
    assert {choice.begun for choice in training.choices} == {24}
    assert training.choices[-1].reason == "24 of 24 prompts run, and the first 16 groups are returned"
    assert training.run(100) == 100 * "1", "clearly faster than the model says of what is needed alone"
    assert "; running ahead takes 0.5" in training.choices[0].reason


@pytest.mark.parametrize("ahead", [0.9, 1.1])
def test_what_is_not_clearly_faster_is_compared_with_what_is_measured(ahead: float) -> None:
    training = Training(ahead)
    assert training.run(7)[:6] == "111100", "of the second it is known what was carried over"
    assert training.state.count(OFF) == (1 if ahead < 1 else 2)
    assert training.run(5) == 5 * str(int(ahead < 1))


@pytest.mark.parametrize("ahead", [0.45, 0.7, 0.9, 1.08, 1.2, 2.0])
def test_what_is_faster_runs_but_for_what_is_explored(ahead: float) -> None:
    training = Training(ahead, noise=0.02)
    training.run(6)
    assert training.run(60).count("0" if ahead < 1 else "1") <= 4


@pytest.mark.parametrize("ahead", [0.7, 0.97, 1.03])
def test_nothing_runs_ahead_where_groups_end_together_whatever_was_measured(ahead: float) -> None:
    training = Training(ahead, noise=0.03, returned=TOGETHER)
    assert training.run(60) == "1" + 59 * "0"
    reason = "16 of 24 prompts run, and the first 16 groups are returned; 100% of the groups end together, "
    assert training.choices[-1].reason == f"{reason}so that running ahead saves nothing"
    assert not any(choice.explores for choice in training.choices)
    training.returned = STRAGGLING
    training.run(4)
    assert training.run(2) == "11"


@pytest.mark.parametrize(("long", "ahead"), [(5, "1"), (6, "0")])
def test_groups_that_end_last_are_stragglers_while_enough_others_are_complete_before(long: int, ahead: str) -> None:
    """Of 24 groups that run, 16 are needed: so at most a third may end last."""
    training = Training(0.5, returned=[[50] * 4] * (16 - long) + [[50, 50, 50, 100]] * long)
    training.run(12)
    assert training.run(4) == 4 * ahead


def test_groups_of_the_same_length_do_not_end_together_where_they_queue() -> None:
    training = Training(0.5, returned=TOGETHER, machine=replace(EMPTY, max_num_seqs=16))
    assert training.run(8) == 8 * "1"


def test_what_is_near_is_measured_again_in_two_batches_of_which_the_second_counts() -> None:
    training = Training(1.05, AutoLimits(exploration=0.1), noise=0.02)
    training.run(10)
    explored = training.run(60)
    assert explored == "".join(str(int(choice.explores)) for choice in training.choices)
    assert set(explored.rstrip("1").replace("0", " ").split()) == {"11"}
    assert 0 < explored.count("1") <= 0.1 * 70
    measured = [one.batch for one in training.state.measured if one.name == AHEAD]
    assert measured[3] == 10 + explored.index("1") + 2


def test_without_exploration_nothing_is_tried_again() -> None:
    training = Training(1.2, AutoLimits(exploration=0.0))
    assert training.run(80) == "1111" + 76 * "0", "also where what was measured first is no longer kept"


def test_nothing_is_learned_of_batches_that_return_nothing_or_whose_seconds_do_not_count() -> None:
    choice = choose_resuming(Auto(AutoLimits(), ()), AutoState(), 16, 24)
    for lengths, seconds, machine in (([], 1.0, EMPTY), ([[5]], 0.0, EMPTY), ([[5]], 1.0, None)):
        state = learn_resuming(AutoState(), choice, MeasuredResuming(lengths, 1, 0, 5, seconds), machine)
        assert (state.batches, state.measured) == (1, ())


def test_tokens_that_nothing_can_go_on_from_do_not_count_as_generated() -> None:
    training = Training(0.9, lost=1600)
    training.run(4)
    training.lost = 0  # of what was needed alone
    assert training.run(30) == 30 * "0"


def test_batches_in_which_nothing_can_be_chosen_change_no_choice() -> None:
    training = Training(0.97)
    training.run(12)
    training.offered = 16
    assert training.run(3) == "000"
    training.offered = 24
    assert training.run(3) == "111"


def test_what_runs_no_more_than_it_needs_does_not_say_how_many_older_tokens_more_would_bring() -> None:
    training = Training(1.3, AutoLimits(most_stale=0.25), stale=400)
    training.run(4)
    ahead = training.state.ahead
    training.run(20)
    assert training.state.ahead == ahead


def test_it_follows_the_share_of_older_tokens_to_the_limit_and_back() -> None:
    training = Training(0.5, AutoLimits(most_stale=0.25), stale=400)  # of 6,400 that are returned
    training.run(40)
    assert [choice.begun for choice in training.choices[-3:]] == [20] * 3
    training.limits = AutoLimits(most_stale=0.01)
    training.run(30)
    assert FEWEST_AHEAD <= training.state.ahead < 0.2
    training.stale = 0
    training.run(30)
    assert training.state.ahead == 1.0


@pytest.mark.parametrize(
    ("limits", "begun"), [(AutoLimits(), 20), (AutoLimits(most_stale=0.0), 16), (AutoLimits(allow=()), 24)]
)
def test_what_the_user_allows_says_how_many_run(limits: AutoLimits, begun: int) -> None:
    choice = choose_resuming(Auto(limits, ()), AutoState(batches=1, ahead=0.5), 16, 24)
    assert (choice.begun, choice.num_groups) == (begun, 16)
    assert choice.option.shaping is None
    more = [choose_resuming(Auto(limits, ()), AutoState(batches=1), 16, offered).begun for offered in (10, 16)]
    assert more == [10, 16], "no more than there are"
