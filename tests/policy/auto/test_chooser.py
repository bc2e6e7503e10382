"""What `auto` chooses, against a world where each option takes its forecast times a factor."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from darts_server.policy.auto.chooser import (
    LONGEST_UNMEASURED,
    MIN_OFF,
    MOST_CANDIDATES,
    Choice,
    Measured,
    begin,
    choose,
    choose_by_size,
    hindsight,
    learn,
    learn_training,
    needs_hindsight,
)
from darts_server.policy.auto.options import RULES, UNSHAPED, Auto, AutoLimits, Option, build_auto, rule_of
from darts_server.policy.auto.state import AutoState, MeasuredErrors
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.policy.simulation.forecast import MAX_SAMPLES, Expectation, Forecast

SIZE, GROUPS = 4, 16
EMPTY = Machine(StepTime(LatencyCurve((1.0,), (0.01,))))
"""A step takes the same time however many sequences run: extra candidates are free."""
FULL = Machine(StepTime(LatencyCurve((1.0, 2.0), (0.01, 0.02), 0.01)))
"""Each sequence takes its own time: extra candidates cost what they generate."""
TAIL = np.exp(np.concatenate([np.linspace(-0.2, 0.2, 90), np.linspace(0.5, 2.5, 10)]))
EQUAL = np.ones(10)
ALL = AutoLimits(allow=RULES, most_lost=1.0, most_bias=1.0, exploration=0.0)


def auto(limits: AutoLimits = ALL, only: str = "") -> Auto:
    """``only``: the one option besides ``off``."""
    made = build_auto(Shaping(), Deadline(exploration=0.0), limits)
    if not only:
        return made
    return Auto(limits, tuple(option for option in auto().options if option.name in ("off", only)))


def expected(ratios: np.ndarray = TAIL, groups: int = GROUPS) -> Expectation:
    return Expectation([100.0] * groups, [10.0] * groups, ratios, max_tokens=2000)


def chosen(
    state: AutoState,
    limits: AutoLimits = ALL,
    machine: Machine | None = EMPTY,
    expectation: Expectation | None = None,
    only: str = "",
    seed: int = 0,
    samples: int = 2,
) -> Choice:
    """``samples``: of the batch. With few a forecast is another one, which most tests do not mind."""
    expectation = expected() if expectation is None else expectation
    rng = np.random.default_rng(seed)
    return choose(auto(limits, only), state, SIZE, expectation, machine, expectation.groups, rng, samples)


exactly = partial(chosen, samples=MAX_SAMPLES)


def measured(choice: Choice, factor: float = 1.0) -> Measured:
    forecast = choice.forecast
    assert forecast is not None
    return Measured(factor * forecast.seconds, forecast.mean_length, forecast.cut, None, 500)


def run(
    batches: int,
    factor: Callable[[str], float] = lambda _: 1.0,
    limits: AutoLimits = ALL,
    machine: Machine = EMPTY,
) -> tuple[list[Choice], AutoState]:
    choices, state = [], AutoState()
    for _ in range(batches):
        choices.append(chosen(state, limits, machine))
        state = learn(begin(state, choices[-1]), choices[-1], measured(choices[-1], factor(choices[-1].option.name)))
    return choices, state


MEASURED = AutoState(
    batches=5,
    measured=[MeasuredErrors(batch, "off", 0.0, 0.0, 0.0) for batch in range(5 - MIN_OFF, 5)],
)


def test_it_is_off_while_nothing_is_known() -> None:
    nothing = choose(auto(), MEASURED, SIZE, None, EMPTY, GROUPS, np.random.default_rng(0))
    assert (nothing.option.name, nothing.forecast) == ("off", None)
    assert "not known" in nothing.reason
    assert chosen(MEASURED, machine=None).option.name == "off"


@pytest.mark.parametrize(
    ("limits", "groups", "reason"),
    [
        (AutoLimits(allow=()), GROUPS, "nothing that shapes groups"),
        (ALL, 7, "fewer than 8"),
        (ALL, MOST_CANDIDATES // (2 * SIZE) + 1, "more than 65536"),
    ],
)
def test_it_is_off_for_a_batch_that_needs_no_forecast_or_is_too_small_or_large_for_one(
    limits: AutoLimits, groups: int, reason: str
) -> None:
    choice = choose_by_size(auto(limits), SIZE, groups)
    assert choice is not None
    assert choice.option.name == "off"
    assert reason in choice.reason
    assert choose_by_size(auto(), SIZE, MOST_CANDIDATES // (2 * SIZE)) is None


def test_off_is_measured_before_anything_else_is_chosen() -> None:
    choices, state = run(MIN_OFF + 1)
    assert [choice.option.name for choice in choices[:MIN_OFF]] == ["off"] * MIN_OFF
    assert choices[-1].option.name != "off"
    assert (state.batches, state.explored) == (MIN_OFF + 1, 0)


def test_a_long_tail_on_empty_engines_is_not_waited_for() -> None:
    choice = chosen(MEASURED)
    assert choice.option.shaping is not None
    assert choice.seconds < 0.7 * choice.off_seconds
    assert "a step, off" in choice.reason


def test_equal_lengths_on_full_engines_are_not_over_generated() -> None:
    choice = chosen(MEASURED, machine=FULL, expectation=expected(EQUAL))
    assert choice.option.name == "off"
    assert "a step, cap" in choice.reason  # the next best


def test_limits_exclude_options() -> None:
    allowed = replace(ALL, most_lost=0.0)
    assert chosen(MEASURED, allowed).option.name.partition(" ")[0] in ("uniform", "darts")
    for before in ("off", "cap at 0.9"):
        choice = chosen(replace(MEASURED, chosen=before), replace(allowed, allow=("cap", "cut")))
        assert choice.reason == "nothing else is within the limits"
    assert chosen(MEASURED, replace(ALL, most_bias=0.0)).option.name == "off"
    assert chosen(MEASURED, replace(ALL, allow=())).option.name == "off"


@pytest.mark.parametrize(
    ("limits", "change"),
    [(replace(ALL, most_lost=0.3), {"cut": 0.9}), (replace(ALL, most_bias=0.6), {"mean_length": 1.0})],
)
def test_options_that_cut_more_or_return_shorter_ones_than_forecast_are_left_out(
    limits: AutoLimits, change: dict[str, Any]
) -> None:
    choice = chosen(MEASURED, limits)
    assert 0 < measured(choice).cut < 0.6
    state = learn(MEASURED, choice, replace(measured(choice), **change))
    assert chosen(state, limits).option.name != choice.option.name


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("factor", "least", "most"),
    [
        pytest.param(1.02, 1.0, 1.0, marks=pytest.mark.nightly),
        (0.98, 0.5, 0.99),
        pytest.param(0.8, 0.0, 0.0, marks=pytest.mark.nightly),
    ],
)
def test_an_option_at_the_edge_of_a_limit_is_chosen_as_often_as_the_average_allows(
    factor: float, least: float, most: float
) -> None:
    """``factor``: the limit, over the bias of the fastest option; ``least``, ``most``: the option's share."""
    cuts = replace(ALL, allow=("cut",))
    fastest = chosen(MEASURED, cuts)
    limits, state, biases, count = replace(cuts, most_bias=factor * (1 - fastest.below_bias)), MEASURED, [], 0
    for _ in range(20):
        choice = chosen(state, limits)
        state = learn(begin(state, choice), choice, measured(choice))
        biases.append(1 - choice.below_bias)
        count += choice.option.name == fastest.option.name
    assert least <= count / 20 <= most
    assert np.mean(biases) <= 1.005  # of the limit


@pytest.mark.nightly
def test_near_the_edge_what_was_chosen_goes_on_being_chosen() -> None:
    def choose_with(error: float, before: str) -> Choice:
        measured = [*MEASURED.measured, *(MeasuredErrors(5, "uniform 2.0", error, 0.0) for _ in range(32))]
        return chosen(replace(MEASURED, measured=measured, chosen=before), only="uniform 2.0")

    edge, last = choose_with(0.0, "uniform 2.0"), -1
    while (choice := choose_with(0.005 * (last + 1), "uniform 2.0")).option.name != "off":
        edge, last = choice, last + 1
    assert 0.99 < edge.seconds / edge.off_seconds <= 1
    assert choose_with(0.005 * last, "off").option.name == "off"
    faster = choose_with(0.005 * (last - 8), "off")
    assert faster.option.name == "uniform 2.0"
    assert faster.seconds / edge.off_seconds < 0.97


def test_what_explores_is_not_what_was_chosen() -> None:
    fast = replace(chosen(MEASURED), option=Option("uniform 2.0"))
    state = begin(AutoState(), fast)
    assert state.chosen == "uniform 2.0"
    assert begin(state, replace(fast, option=UNSHAPED, explores=True)).chosen == "uniform 2.0"
    assert begin(state, Choice(UNSHAPED, "no room for more")).chosen == "uniform 2.0"
    assert begin(state, replace(fast, option=UNSHAPED)).chosen == "off"


def run_only(
    name: str, limits: AutoLimits, batches: int, measure: Callable[[Choice, np.random.Generator], Measured]
) -> list[tuple[Choice, Measured]]:
    """Run batches of which only one option besides ``off`` may be chosen, from when ``off`` was measured."""
    rng, state, done = np.random.default_rng(1), MEASURED, []
    for number in range(batches):
        choice = chosen(state, limits, only=name, seed=number)
        found = measured(choice) if choice.option.name == "off" else measure(choice, rng)
        state = learn(begin(state, choice), choice, found)
        done.append((choice, found))
    return done


def forecast_of(name: str) -> Forecast:
    forecast = chosen(MEASURED, only=name).forecast
    assert forecast is not None
    return forecast


CUT = "cut 2.0 at 0.8"


@pytest.mark.nightly
@pytest.mark.untraced
@pytest.mark.parametrize("ratio", [1.1, 1.3])
def test_no_option_is_locked_out_by_chance(ratio: float) -> None:
    """``ratio``: the limit over the option's true share of lost trajectories, which is as forecast."""
    forecast = forecast_of(CUT)

    def measure(choice: Choice, rng: np.random.Generator) -> Measured:
        return replace(measured(choice), cut=measured(choice).cut + 0.2 * rng.standard_normal())

    done = run_only(CUT, replace(ALL, most_lost=ratio * forecast.lost), 160, measure)
    assert sum(choice.option.name == CUT for choice, _ in done[80:]) > 8


@pytest.mark.nightly
@pytest.mark.untraced
def test_what_is_lost_is_within_the_limit_on_average_as_measured() -> None:
    limits = replace(ALL, most_lost=1.2 * forecast_of(CUT).lost)

    def measure(choice: Choice, rng: np.random.Generator) -> Measured:
        return replace(measured(choice), cut=measured(choice).cut + limits.most_lost + 0.2 * rng.standard_normal())

    done = run_only(CUT, limits, 200, measure)
    lost = [choice.forecast.lost + found.cut - choice.forecast.cut for choice, found in done if choice.forecast]
    assert 0 < sum(choice.option.name == CUT for choice, _ in done) < 100
    for first in (0, 50, 100):
        assert np.mean(lost[first : first + 100]) < 1.05 * limits.most_lost


@pytest.mark.parametrize("outlier", [15.0, 1 / 15])
def test_one_batch_that_is_off_does_not_erase_what_was_learned(outlier: float) -> None:
    off, cut = chosen(AutoState(), only=CUT), chosen(MEASURED, only=CUT)
    assert off.option.name == "off"
    assert cut.option.name == CUT
    state, factor = MEASURED, float(np.exp(0.3))
    for number in range(20):
        for choice, times in ((off, 1.0), (cut, factor)):
            length = measured(choice).mean_length / times
            vary = 1 + 0.05 * (-1) ** number
            state = learn(state, choice, replace(measured(choice, times * vary), mean_length=length * vary))
    once = learn(state, off, replace(measured(off, outlier), mean_length=measured(off).mean_length / outlier))
    assert once.expect("error", CUT) > 0.8 * state.expect("error", CUT) > 0.2
    assert once.expect("length_error", CUT) < 0.8 * state.expect("length_error", CUT) < -0.2
    assert once.expect("length_error", CUT) - once.expect("length_error", "off") < -0.2


def test_a_batch_counts_for_a_limit_by_its_groups_and_none_repays_what_others_exceeded() -> None:
    choice = replace(chosen(MEASURED), groups=256, below_bias=-0.5, below_lost=0.5)
    large = begin(MEASURED, choice)
    assert (large.spare_bias, large.spare_lost) == (-128, 128)
    small = begin(large, replace(choice, groups=8, below_bias=1.0, below_lost=1.0))
    assert (small.spare_bias, small.spare_lost) == (-120, 128)
    twice = begin(begin(small, choice), choice)
    assert (twice.spare_bias, twice.spare_lost) == (-256, 256)
    assert begin(MEASURED, Choice(UNSHAPED, "")).spare_bias == 0


def test_fewer_cut_trajectories_than_forecast_are_believed() -> None:
    forecast = forecast_of(CUT)
    state = replace(MEASURED, measured=[*MEASURED.measured, *[MeasuredErrors(5, CUT, 0.0, 0.0, -forecast.cut)] * 12])
    limits = replace(ALL, most_lost=0.7 * forecast.lost)
    assert [chosen(each, limits, only=CUT).option.name for each in (MEASURED, state)] == ["off", CUT]


def test_a_price_of_tokens_makes_it_start_fewer_candidates() -> None:
    free = chosen(MEASURED, replace(ALL, allow=("uniform",)))
    assert free.option.name != "off"
    assert chosen(MEASURED, replace(ALL, allow=("uniform",), tokens_price=100.0)).option.name == "off"


@pytest.mark.untraced
@pytest.mark.parametrize(("slower", "most"), [(10.0, 5), pytest.param(2.5, 10, marks=pytest.mark.nightly)])
def test_a_choice_that_loses_is_given_up(slower: float, most: int) -> None:
    """Each of three options must be measured, and what is forecast to be half as slow as ``off`` some more times."""
    choices, _ = run(MIN_OFF + 40, lambda name: 1.0 if name == "off" else slower, replace(ALL, allow=("uniform",)))
    shaped = [batch for batch, choice in enumerate(choices) if choice.option.name != "off"]
    assert shaped[0] == MIN_OFF
    assert 1 <= len(shaped) <= most
    assert shaped[-1] < 30


@pytest.mark.parametrize(
    ("slower", "longer", "counted"),
    [
        (1.15, 1.15, 1.0),
        (1.15, 1.05, 1.15 / 1.05),
        (1.15, 4.0, 1.0),
        (1.15, 0.5, 1.15),
        (0.25, 0.5, 0.5),
        (0.25, 0.1, 1.0),
        (0.25, 2, 0.25),
    ],
)
def test_what_other_lengths_explain_does_not_count_for_or_against_an_option(
    slower: float, longer: float, counted: float
) -> None:
    choice = chosen(MEASURED)
    state = learn(MEASURED, choice, changed(choice, slower, longer))
    assert np.exp(state.measured[-1].error) == pytest.approx(counted)


def changed(choice: Choice, slower: float, longer: float) -> Measured:
    found = measured(choice, slower)
    return replace(found, mean_length=longer * found.mean_length)


def test_lengths_that_stay_longer_are_expected() -> None:
    state, choice = MEASURED, chosen(MEASURED)
    for _ in range(30):
        now = replace(choice, length_error=state.expect("length_error", choice.option.name))
        state = learn(begin(state, now), now, changed(now, 2.0, 2.0))
    assert np.exp(state.expect("error", choice.option.name)) == pytest.approx(2.0, rel=0.1)
    first = chosen(AutoState())
    assert np.exp(learn(AutoState(), first, changed(first, 2.0, 2.0)).measured[0].error) == pytest.approx(2.0)


@pytest.mark.untraced
def test_forecasts_are_corrected_by_what_was_measured() -> None:
    choices, state = run(10, lambda _: 3.0, replace(ALL, allow=("uniform",)))
    for choice in choices[4:]:
        assert choice.seconds == pytest.approx(3 * measured(choice).seconds, rel=0.1)
    assert [one.error for one in state.measured] == pytest.approx([np.log(3)] * 10)


def tied(ratio: float, tries: int, exploration: float, last: int = 5) -> tuple[Choice, Choice, Choice]:
    """Return what is chosen of two rules, and the best option of each: the first is the fastest, measured five times.

    ``ratio``: seconds of the first over those of the second, which was measured ``tries`` times, in batch ``last``.
    """
    known, other = (exactly(MEASURED, replace(ALL, allow=(rule,))) for rule in ("cut", "cap"))
    state, error = MEASURED, 0.0
    alike = [option.name for option in auto().options if rule_of(option.name) == rule_of(known.option.name)]
    for _ in range(100):  # what is measured of the first rule changes what is expected of both
        own = {known.option.name: -0.05}  # so that it is the fastest of its rule
        of_known = [
            MeasuredErrors(5 if name in own else 4, name, error + own.get(name, 0.0), 0.0, 0.0) for name in alike
        ] * 5
        of_other = [MeasuredErrors(last, other.option.name, 0.0, 0.0, 0.0)] * tries
        rows = sorted([*MEASURED.measured, *of_known, *of_other], key=lambda one: one.batch)
        state = replace(state, measured=rows)
        found = measured(known).seconds * np.exp(state.expect("error", known.option.name))
        wanted = ratio * measured(other).seconds * np.exp(state.expect("error", other.option.name))
        error += float(np.log(wanted / found))
    return exactly(state, replace(ALL, allow=("cut", "cap"), exploration=exploration)), known, other


@pytest.mark.untraced
@pytest.mark.parametrize(("ratio", "tries"), [(0.99, 0), (0.97, 1), (0.9, 1)])
def test_without_exploration_the_fastest_is_chosen_however_rarely_others_were_measured(
    ratio: float, tries: int
) -> None:
    choice, known, _ = tied(ratio, tries, 0.0)
    assert (choice.option.name, choice.explores) == (known.option.name, False)
    assert "a step, off" in choice.reason


@pytest.mark.untraced
@pytest.mark.parametrize(("ratio", "last", "is_older"), [(0.97, 3, True), (0.97, 5, False), (0.8, 3, False)])
def test_what_was_measured_the_longest_ago_is_explored_if_it_is_near(ratio: float, last: int, is_older: bool) -> None:
    choice, known, other = tied(ratio, 1, 1.0, last)
    assert rule_of(choice.option.name) == rule_of((other if is_older else known).option.name)
    assert choice.explores
    assert choice.reason.startswith("explored: ")


@pytest.mark.nightly
def test_it_explores_no_more_than_its_share_and_tries_what_is_near_the_best() -> None:
    choices, state = run(60, limits=replace(ALL, allow=("cut",), exploration=0.1))
    explored = [choice for choice in choices if choice.explores]
    assert 3 <= len(explored) <= 6
    assert state.explored == len(explored)
    assert {choice.option.name for choice in choices if not choice.explores}.isdisjoint(
        choice.option.name for choice in explored
    )
    assert all("explored" in choice.reason for choice in explored)


@pytest.mark.nightly
def test_off_is_measured_again_while_it_may_be_faster_although_it_is_not_near() -> None:
    """Of an option that gets slower from batch to batch it does not show by itself that ``off`` does not."""
    state, names = AutoState(), []
    for batch in range(45):
        choice = exactly(state, replace(ALL, allow=("uniform",), exploration=0.05))
        slower = 1.0 if choice.option.name == "off" else float(np.exp(0.02 * batch))
        state = learn(begin(state, choice), choice, measured(choice, slower))
        names.append(choice.option.name)
    assert names[:10].count("off") <= 2
    assert names[25:].count("off") >= 15  # without measuring it again, none


@pytest.mark.parametrize(
    ("last", "name"), [(401 - LONGEST_UNMEASURED, "uniform 2.0"), (400 - LONGEST_UNMEASURED, "off")]
)
def test_off_is_measured_now_and_then_whatever_is_expected(last: int, name: str) -> None:
    errors = {"off": 0.0, "uniform 2.0": -1.0}
    in_turns = [
        MeasuredErrors(batch, of, error, 0.0, None)
        for batch in range(last - 9, last + 1)
        for of, error in errors.items()
    ]
    alone = [MeasuredErrors(batch, "uniform 2.0", -1.0, 0.0, None) for batch in range(last + 1, 400, 8)]
    rows = [*in_turns, *alone]
    state = AutoState(batches=400, measured=rows)
    limits = replace(ALL, allow=("uniform",), exploration=1.0)
    assert chosen(state, limits, only="uniform 2.0").option.name == name


def test_the_training_between_batches_counts() -> None:
    state = MEASURED
    for tokens in (1000.0, 4000.0, 8000.0):
        state = learn_training(state, tokens, tokens / 100)
    short, none = chosen(state), chosen(MEASURED)
    assert short.off_seconds > none.off_seconds
    for _ in range(100):
        state = learn_training(state, -1.0, float("inf"))
    assert len(state.training) == 32
    AutoState(training=state.training)


@pytest.mark.parametrize(
    ("truncated", "lost"),
    [
        (0.9, 0.2),  # as forecast
        (1.0, 0.2),
        (0.0, 0.6),  # all that is cut would have ended
        (0.2, (0.6 - 0.3) / 0.7),  # a batch of 16 groups may have a tenth more
    ],
)
def test_no_more_of_what_is_cut_counts_as_truncated_anyway_than_off_truncates(truncated: float, lost: float) -> None:
    limits = replace(ALL, most_lost=0.5)
    choice = replace(chosen(MEASURED), limits=limits, below_lost=0.0, below_bias=0.0, truncated=truncated)
    forecast = Forecast(1.0, 1.0, 1.0, choice.usual_length, cut=0.6, lost=0.2, truncated=0.0)
    learned = learn(MEASURED, replace(choice, forecast=forecast), replace(measured(choice), cut=0.6))
    assert learned.spare_lost == pytest.approx(GROUPS * (1 - lost / 0.5))


def test_trajectories_count_for_the_limit_of_lengths_as_they_are_measured() -> None:
    choice = replace(chosen(MEASURED), limits=replace(ALL, most_bias=0.5), below_bias=0.0, below_lost=0.0)
    learned = learn(MEASURED, choice, replace(measured(choice), mean_length=0.7 * choice.usual_length))
    assert learned.spare_bias == pytest.approx(GROUPS * (1 - 0.3 / 0.5))


def test_an_option_is_left_out_that_cuts_more_than_the_limit_by_what_off_truncates() -> None:
    """Of 180 tokens at most, the model expects many to be truncated."""
    expectation = Expectation([150.0] * GROUPS, [10.0] * GROUPS, TAIL * 1.2, max_tokens=180)
    limits = replace(ALL, allow=("limit",), most_lost=0.2)
    assert exactly(replace(MEASURED, truncated=0.5), limits, expectation=expectation).option.name == "limit 0.2"
    assert exactly(replace(MEASURED, truncated=0.0), limits, expectation=expectation).option.name != "limit 0.2"


def test_what_is_cut_does_not_justify_cutting_more() -> None:
    """By lengths that are extrapolated from what was cut a ninth would be truncated: ``off`` must confirm that."""
    longer = replace(expected(), means=[1000.0] * GROUPS)
    limits = replace(ALL, allow=("limit",), most_lost=0.21)
    never, often = (replace(MEASURED, truncated=share, batches=40) for share in (0.0, 0.1))
    assert exactly(never, limits, expectation=longer).truncated == pytest.approx(0.03)
    assert exactly(often, limits, expectation=longer).truncated == pytest.approx(0.11, abs=0.01)
    explores = replace(limits, exploration=0.05)
    assert exactly(never, explores, expectation=longer).option.name == "off"
    assert exactly(often, explores, expectation=longer).option.name != "off", "it is known"
    none_left_out = replace(explores, most_lost=1.0)
    assert exactly(never, none_left_out, expectation=longer).option.name != "off"


def test_a_limit_is_moved_until_its_share_is_cut() -> None:
    """Where 5 % more are cut than forecast, the limit is that of 5 % fewer, and the other way round."""
    limits = replace(ALL, allow=("limit",), most_lost=0.2)

    def tokens(more_cut: float) -> int:
        rows = [*MEASURED.measured, *(MeasuredErrors(5, "limit 0.1", 0.0, 0.0, more_cut) for _ in range(32))]
        state = replace(MEASURED, measured=rows)
        choice = exactly(state, limits, only="limit 0.1")
        assert choice.option.shaping is not None
        assert choice.option.shaping.deadline is not None
        assert choice.option.shaping.deadline.tokens is not None
        assert measured(choice).cut + state.expect("more_cut", "limit 0.1") == pytest.approx(0.1, abs=0.015)
        return choice.option.shaping.deadline.tokens

    assert tokens(-0.05) < tokens(0.0) < tokens(0.05)
    assert tokens(0.05) < 2000


@pytest.mark.parametrize(("more_cut", "factor"), [(-1.0, 2.0), (1.0, 0.5)])
def test_a_limit_is_moved_to_half_or_twice_its_share_at_most(more_cut: float, factor: float) -> None:
    measured = [*MEASURED.measured, *(MeasuredErrors(5, "cap at 0.8", 0.0, 0.0, more_cut) for _ in range(32))]
    state, limits = replace(MEASURED, measured=measured), replace(ALL, allow=("limit",), most_lost=1.0)
    choice = exactly(state, limits, only="limit 0.1")
    assert choice.forecast is not None
    assert choice.forecast.lost == pytest.approx(0.1 * factor, abs=0.015)


def test_how_many_are_truncated_is_learned_from_off_alone() -> None:
    off = chosen(AutoState())
    assert off.option.name == "off"
    assert off.truncated == 0.0, "as forecast"
    state = AutoState()
    for _ in range(8):
        state = learn(begin(state, off), off, replace(measured(off), truncated=0.2))
    assert chosen(state).truncated == pytest.approx(0.2, abs=0.01)
    other = replace(chosen(state), option=Option("uniform 2.0"))
    after = learn(state, other, replace(measured(other), truncated=0.9))
    assert after.expect("more_truncated", "off") == state.expect("more_truncated", "off")
    assert after.truncated == state.truncated == pytest.approx(0.2)
    assert learn(state, off, replace(measured(off), truncated=0.4)).truncated == pytest.approx(0.3)


def test_limits_and_means_of_prompts_are_learned() -> None:
    choice = chosen(MEASURED)
    state = learn(MEASURED, choice, replace(measured(choice), max_tokens=300, longest=300, means=[10.0, 30.0]))
    assert state.max_tokens == 300
    assert state.means == (10.0, 30.0)
    more = learn(state, choice, replace(measured(choice), means=[20.0] * 300))
    assert more.means == (20.0,) * 256
    same = learn(state, choice, replace(measured(choice), longest=200))
    assert (same.max_tokens, same.means) == (300, state.means)
    assert learn(state, choice, replace(measured(choice), longest=400)).max_tokens is None


def test_new_prompts_are_expected_to_be_like_those_of_the_last_batches() -> None:
    state, choice = MEASURED, chosen(MEASURED)
    for mean in (10.0, 20.0, 30.0, 40.0):
        state = learn(state, choice, replace(measured(choice), means=[mean] * 24))
    assert state.means == (30.0,) * 24 + (40.0,) * 24
    for mean in (50.0, 60.0, 70.0):
        state = learn(state, choice, replace(measured(choice), means=[mean] * 8))
    assert state.means == (40.0,) * 8 + (50.0,) * 8 + (60.0,) * 8 + (70.0,) * 8


def test_a_batch_without_a_forecast_or_a_duration_corrects_nothing() -> None:
    choice = chosen(MEASURED)
    assert learn(MEASURED, replace(choice, forecast=None), measured(choice)).measured == MEASURED.measured
    assert learn(MEASURED, choice, measured(choice, 0.0)).measured == MEASURED.measured
    assert learn(MEASURED, choice, replace(measured(choice), mean_length=0.0)).measured == MEASURED.measured


def test_the_first_batch_is_forecast_after_it_has_ended() -> None:
    first = choose(auto(), AutoState(), SIZE, None, None, GROUPS, np.random.default_rng(0))
    off = chosen(AutoState())
    state = learn(begin(AutoState(), first), first, measured(off, 1.5))
    assert needs_hindsight(state, first)
    late = hindsight(first, SIZE, expected(), EMPTY, GROUPS, np.random.default_rng(0))
    assert measured(late).seconds == pytest.approx(measured(off).seconds, rel=0.2)
    state = learn(state, late, measured(late, 1.5))
    [found] = state.measured
    assert (found.batch, found.name, found.length_error) == (1, "off", 0.0)
    assert np.exp(found.error) == pytest.approx(1.5)
    assert chosen(state).option.name != "off"
    assert not needs_hindsight(state, first)
    assert not needs_hindsight(AutoState(), off)
    for known, machine in ((None, EMPTY), (expected(), None)):
        assert hindsight(first, SIZE, known, machine, GROUPS, np.random.default_rng(0)) is first


def test_it_explores_nothing_where_nothing_is_near_the_best() -> None:
    choices, _ = run(10, limits=replace(ALL, allow=(), exploration=1.0))
    assert not any(choice.explores for choice in choices)
