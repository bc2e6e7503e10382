"""`auto`: choose for each batch what is expected to be the fastest, and correct the expectation by what is measured.

It begins as ``off``. Once a batch was measured, every option is forecast by the model of a rollout, and the fastest
within the user's limits is chosen, if it is faster than ``off``, see `MARGIN`. What a batch measures corrects the
forecasts of its option and, less so, those of the others (see `errors`): so an option that takes longer than forecast
is given up, the sooner the less its batches differ by chance. Where trajectories are longer or shorter than expected,
as the model learns, what that explains does not count for or against an option.

The first batch cannot be forecast before it runs. It is afterwards, by what it taught (`hindsight`).

Where the caller can defer prompts, it also chooses with how many complete groups the batch ends: the number for which
a step takes the least time per group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

import numpy as np

from darts_server.policy.auto.ahead import begin_with
from darts_server.policy.auto.options import (
    CUTTING,
    RESTART,
    RESUME,
    UNSHAPED,
    Auto,
    AutoLimits,
    Option,
    measured_name,
    rule_of,
)
from darts_server.policy.auto.outlook import (
    Outlook,
    below_limit,
    expect,
    expect_deferring,
    share_lost,
    share_truncated,
)
from darts_server.policy.auto.state import MEANS, MOST, TRAINED, AutoState, MeasuredErrors
from darts_server.policy.checks import LARGEST
from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.simulation.batch import Plan
from darts_server.policy.simulation.forecast import MAX_SAMPLES, Expectation, Forecast, forecast, limit_of
from darts_server.policy.simulation.machine import Machine
from darts_server.types import OFF

MIN_OFF = 1
"""Batches of ``off`` that are forecast and measured before anything else is chosen."""
MARGIN = 0.03
"""An option must be expected to be faster than ``off`` by this: forecasts are off by a few per cent. Where something
else was chosen last, exploration aside, it must only not be slower: near the edge one should not go back and forth."""
NEAR = 1.1
"""Only options that are expected to take at most so many times as long as the best are worth a batch to measure."""
UNSURE = 2.0
"""Standard deviations by which ``off`` may be faster than expected, against the best, when it is worth a batch."""
LONGEST_WITHOUT_OFF = 256
"""Batches after which ``off`` is worth a batch whatever is expected of it."""
MOST_DEFERRING = 3
"""Options of which it is forecast what they would do with fewer groups, besides ``off``: those with the least cost for
all groups. Each takes two more forecasts."""
MOST_MOVED = 2.0
"""So many times its share a limit cuts at most of what is forecast, and at least as small a part of it: what other
rules have cut may say little about it, and so may what was cut of other lengths."""
NOTHING_ELSE = "nothing else is within the limits"
RECENT_BATCHES, FEWEST_MEANS = 2, 32
"""Batches whose mean lengths stand for those of new prompts, as training changes lengths, and prompts at least."""
MOST_BEYOND = 1.25
"""Where a rule cuts, the mean length of a prompt is at most so many times the longest candidate of the batch: of one
whose candidates were nearly all cut it is extrapolated, up to many times what was seen."""
MOST_CANDIDATES = 65_536
"""Candidates of a batch for which all options together are forecast in a few seconds, or a quarter of a minute where
the KV cache is full all the time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with a batch, and why.

    ``forecast``: of the model; ``None`` where nothing was forecast. ``seconds``: expected of the rollout, corrected;
    ``None`` likewise. ``off_seconds``: expected of a step under ``off``. ``explores``: whether another option was
    expected to be faster. ``below_bias``, ``below_lost``: by which share of the user's ``limits`` it is expected to be
    below them. ``groups``: of the batch; 0 where nothing was forecast. ``usual_length``: mean length expected of all.
    ``enough``: complete groups with which the batch ends, the others being deferred; ``None`` if this defers none.
    ``usual_length`` is then of the groups that are not deferred. ``truncated``: share expected to reach the limit of
    tokens under ``off``. ``length_error``: logarithm of the mean length, as corrected by what was measured, over the
    one forecast; ``None`` where nothing was measured yet.
    """

    option: Option
    reason: str
    forecast: Forecast | None = None
    seconds: float | None = None
    off_seconds: float | None = None
    explores: bool = False
    below_bias: float = 1.0
    below_lost: float = 1.0
    groups: int = 0
    usual_length: float = 0.0
    truncated: float = 0.0
    limits: AutoLimits = field(default_factory=AutoLimits)
    enough: int | None = None
    length_error: float | None = None

    @property
    def name(self) -> str:
        """Name under which it is measured."""
        return measured_name(self.option, self.enough)

    @property
    def scope(self) -> str:
        """Which groups are waited for, in words; empty if all are."""
        return _scope(self.enough, self.groups)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a batch.

    ``seconds``: of the rollout. ``returned``: tokens. ``mean_length``: of a returned trajectory. ``cut``: share of
    these that the rule cut. ``max_tokens``: at which trajectories were truncated; ``None`` if none was. ``longest``:
    tokens of the longest candidate. ``means``: mean lengths of its prompts, as they are known now. ``truncated``: share
    of the returned trajectories that reached the limit of their tokens, and were not cut.
    """

    seconds: float
    returned: float
    mean_length: float
    cut: float
    max_tokens: int | None
    longest: int
    means: Sequence[float] = ()
    truncated: float = 0.0


def choose_by_size(auto: Auto, size: int, groups: int) -> Choice | None:
    """Choose what is done with a batch that needs no forecast, or is too small or large for one; else ``None``."""
    if not auto.forecasts:
        return Choice(UNSHAPED, "nothing that shapes groups is allowed")
    if groups < MIN_GROUPS:
        return Choice(UNSHAPED, f"fewer than {MIN_GROUPS} groups say too little about a step")
    if groups * auto.max_candidates(size) > MOST_CANDIDATES:
        return Choice(UNSHAPED, f"more than {MOST_CANDIDATES} candidates take too long to forecast")
    return None


def choose_resuming(auto: Auto, state: AutoState, needed: int, offered: int) -> tuple[int, Choice]:
    """Choose how many of the ``offered`` prompts run, where those that are not ``needed`` go on in a later batch."""
    limits, begun = auto.limits, offered
    if RESUME in limits.allow:
        begun = begin_with(needed, offered, state.ahead if limits.most_stale else 0.0)
    return begun, Choice(UNSHAPED, f"{begun} of {offered} prompts run, and the first {needed} groups are returned")


def choose(
    auto: Auto,
    state: AutoState,
    size: int,
    expectation: Expectation | None,
    machine: Machine | None,
    enough: int,
    rng: np.random.Generator,
    most_samples: int = MAX_SAMPLES,
    min_groups: int | None = None,
) -> Choice:
    """Choose what is done with a batch of groups of ``size``, for which `choose_by_size` chooses nothing.

    ``expectation``, ``machine``: ``None`` while nothing is known. ``enough``: complete groups with which it ends.
    ``most_samples``: of the batch, by which each option is forecast. ``min_groups``: complete groups with which it may
    end where ``enough`` are all; ``None`` if the caller can defer no prompts.
    """
    if expectation is None or machine is None:
        return Choice(UNSHAPED, "lengths and step times are not known yet")
    options = auto.of_size(size)
    batches = expectation.sample(auto.max_candidates(size), rng, most_samples)
    groups, stds = expectation.groups, expectation.stds

    def foresee(option: Option, enough: int) -> Forecast:
        plan = Plan.of(option.shaping, size, stds, enough=enough if enough < groups else None)
        return forecast(plan, batches, machine)

    off = expect(UNSHAPED, foresee(UNSHAPED, enough), state, auto.limits, groups)
    usual_length = off.forecast.mean_length * exp(state.length_error(OFF))
    truncated = share_truncated(off.forecast, state)

    def chosen(one: Outlook, reason: str, *, explores: bool = False) -> Choice:
        return Choice(
            one.option,
            reason,
            one.forecast,
            one.seconds,
            off.step,
            explores,
            one.below_bias,
            one.below_lost,
            groups,
            usual_length * one.length_share,
            truncated,
            auto.limits,
            one.enough,
            state.length_error(one.name) if state.measured else None,
        )

    def may_be_within(one: Outlook) -> bool:
        """Whether an option that is beyond the limits is within them if ``off`` truncates as many as is expected."""
        found = expect(one.option, one.forecast, state, auto.limits, groups, off.forecast, bounded=False)
        return found.is_within(state, groups)

    if state.count(OFF) < MIN_OFF:
        return chosen(off, "is measured before anything else, in a batch without pauses and weight updates")
    outlooks, beyond = [off], list[Outlook]()
    for option in options[1:]:
        if option.cut_share is not None:
            option = option.at(limit_of(_share_to_cut(option.name, option.cut_share, state), batches))
        outlook = expect(option, foresee(option, enough), state, auto.limits, groups, off.forecast)
        (outlooks if outlook.is_within(state, groups) else beyond).append(outlook)
    if min_groups is not None and RESTART in auto.limits.allow:
        outlooks += list(_deferring(outlooks, state, auto.limits, groups, min_groups, foresee))
    best = min(outlooks[1:], key=lambda one: one.cost, default=off)
    margin = MARGIN if state.chosen == OFF else 0.0
    if best is off or best.cost > (1 - margin) * off.cost:
        reason = f"{_step(off, groups)}, {_named(best, groups)}" if best is not off else NOTHING_ELSE
        best = off
    else:
        reason = f"{_step(best, groups)}, {_named(off, groups)}"
    if state.explored + 1 <= auto.limits.exploration * (state.batches + 1):
        others = [one for one in outlooks if one is not best and one.cost <= NEAR * best.cost]
        if best is not off and any(one.cost < best.cost and may_be_within(one) for one in beyond):
            others = [off]  # it says how many are truncated anyway, and so how many of what is cut are lost
        elif best is not off and off not in others and _may_be_faster(off, best, state):
            others.append(off)
        least = min(others, key=lambda one: _by_age(one, state), default=None)
        if least is not None:
            reason = f"explored: {_step(least, groups)}, {_named(best, groups)}, {_named(off, groups)}"
            return chosen(least, reason, explores=True)
    return chosen(best, reason)


def needs_hindsight(state: AutoState, choice: Choice) -> bool:
    """Return whether a batch must be forecast after it has ended, see `hindsight`."""
    return choice.forecast is None and state.count(OFF) < MIN_OFF


def hindsight(
    choice: Choice,
    size: int,
    expectation: Expectation | None,
    machine: Machine | None,
    enough: int,
    rng: np.random.Generator,
) -> Choice:
    """Return the choice of a batch of ``off`` that could not be forecast, with what is forecast now that it has ended.

    ``expectation``: of its prompts, as they are known by now. Others as in `choose`.
    """
    if expectation is None or machine is None:
        return choice
    batches = expectation.sample(size, rng)
    plan = Plan.of(None, size, expectation.stds, enough=enough if enough < expectation.groups else None)
    return replace(choice, forecast=forecast(plan, batches, machine))


def begin(state: AutoState, choice: Choice) -> AutoState:
    """Count a batch that begins, with what is expected of it."""
    batches, explored = min(state.batches + 1, LARGEST), min(state.explored + choice.explores, LARGEST)
    state = _book(state, choice.groups, choice.below_bias, choice.below_lost)
    chosen = state.chosen if choice.explores or choice.forecast is None else choice.name
    return replace(state, batches=batches, explored=explored, chosen=chosen)


def learn(state: AutoState, choice: Choice, measured: Measured) -> AutoState:
    """Learn from a batch that has ended."""
    limit = state.max_tokens if measured.max_tokens is None else measured.max_tokens
    if limit is not None and measured.longest > limit:
        limit = None
    if measured.means:
        recent = min(max(RECENT_BATCHES * len(measured.means), FEWEST_MEANS), MEANS)
        extrapolates = rule_of(choice.name) in CUTTING and measured.longest > 0
        most = MOST_BEYOND * measured.longest if extrapolates else LARGEST
        state = replace(state, means=(*state.means, *(min(mean, most) for mean in measured.means))[-recent:])
    state = replace(state, max_tokens=limit)
    if choice.forecast is None or measured.seconds <= 0 or measured.mean_length <= 0:
        return state
    name = choice.name
    state = _learn_limits(state, choice, choice.forecast, measured)
    length_error = log(measured.mean_length / choice.forecast.mean_length)
    longer = 0.0 if choice.length_error is None else length_error - choice.length_error
    expected = state.error(name)
    error = expected + _unexplained(log(measured.seconds / choice.forecast.seconds) - expected, longer)
    more_cut = measured.cut - choice.forecast.cut if rule_of(name) in CUTTING else None
    more_truncated = measured.truncated - choice.forecast.truncated if name == OFF else None
    found = MeasuredErrors(state.batches, name, _clip(error), _clip(length_error), more_cut, more_truncated)
    state = state.with_measured(found)
    if name == OFF:
        known = state.truncated if state.count(OFF) > 1 else measured.truncated
        state = replace(state, truncated=(known + measured.truncated) / 2)
    return state


def learn_training(state: AutoState, returned: float, seconds: float) -> AutoState:
    """Learn how long it took from the end of a batch with so many returned tokens to the next batch."""
    pair = (min(max(returned, 0.0), LARGEST), min(max(seconds, 0.0), LARGEST))
    return replace(state, training=(*state.training, pair)[-TRAINED:])


def _unexplained(slower: float, longer: float) -> float:
    """Return ``slower`` without the part that ``longer`` explains: at most all of it, nothing if the signs differ.

    Logarithms, of the seconds of a batch and of its mean length over what was expected. Training changes lengths from
    batch to batch: a batch that is slow as its trajectories are longer should not count against its option.
    """
    return slower - min(max(longer, min(slower, 0.0)), max(slower, 0.0))


def _learn_limits(state: AutoState, choice: Choice, forecast: Forecast, measured: Measured) -> AutoState:
    """Correct by what was measured what `begin` has counted as below the limits, so that these hold for the former."""
    if choice.option.shaping is None:
        return state
    limits = choice.limits
    bias = below_limit(1 - measured.mean_length / choice.usual_length, limits.most_bias)
    share = share_lost(forecast, measured.cut - forecast.cut, choice.truncated, choice.groups)
    lost = below_limit(share, limits.most_lost)
    return _book(state, choice.groups, bias - choice.below_bias, lost - choice.below_lost)


def _book(state: AutoState, groups: int, bias: float, lost: float) -> AutoState:
    """Add to what batches were below the limits. One batch changes that by no more than as many groups as it has."""

    def spare(before: float, change: float) -> float:
        return min(max(before + change * groups, min(before, -groups)), max(before, groups)) if groups else before

    return replace(state, spare_bias=spare(state.spare_bias, bias), spare_lost=spare(state.spare_lost, lost))


def _clip(value: float) -> float:
    return min(max(value, -MOST), MOST)


def _deferring(
    outlooks: Sequence[Outlook],
    state: AutoState,
    limits: AutoLimits,
    groups: int,
    min_groups: int,
    foresee: Callable[[Option, int], Forecast],
) -> Iterator[Outlook]:
    """Yield what is expected of the likeliest of the options, and of the first, ``off``, if prompts are deferred."""
    off, *others = outlooks
    likely = sorted(others, key=lambda one: one.cost)[:MOST_DEFERRING]
    for whole in (off, *likely):
        for enough in sorted({min_groups, (min_groups + groups) // 2}):
            found = foresee(whole.option, enough)
            yield expect_deferring(whole, found, enough, state, limits, groups, off.forecast)


def _share_to_cut(name: str, share: float, state: AutoState) -> float:
    """Return which share of what is forecast a limit must cut, so that ``share`` of what comes is."""
    wanted = share - state.more_cut(name)
    return min(max(wanted, share / MOST_MOVED), share * MOST_MOVED, 1.0)


def _may_be_faster(off: Outlook, best: Outlook, state: AutoState) -> bool:
    """Return whether ``off`` may be faster than what is expected to be the best, or was not measured for long."""
    most = exp(-UNSURE * state.uncertainty(best.name))
    is_old = state.batches - state.last(OFF) >= LONGEST_WITHOUT_OFF
    return is_old or off.cost - (1 - most) * off.seconds <= best.cost


def _by_age(one: Outlook, state: AutoState) -> tuple[int, float]:
    """Return a sort key: what was measured the longest ago, or never, first."""
    return state.last(one.name), one.cost


def _step(one: Outlook, groups: int) -> str:
    return f"{one.step:.3g} s a step{_scope(one.enough, groups)}"


def _named(one: Outlook, groups: int) -> str:
    return f"{one.option.name} {one.step:.3g} s{_scope(one.enough, groups)}"


def _scope(enough: int | None, groups: int) -> str:
    return "" if enough is None else f" for {enough} of {groups} groups"
