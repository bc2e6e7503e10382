"""`auto`: choose for each batch what is expected to be the fastest, and correct the expectation by what is measured.

It begins as ``off``. Once some batches were measured, every option is forecast by the model of a rollout, and the
fastest within the user's limits is chosen, if it is faster than ``off`` by more than `MARGIN`. What a batch measures
corrects the forecasts of its option and, less so, those of the others; the more, the less the batches vary. An option
that was slower than ``off`` is expected to be is withdrawn, each time for longer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log, sqrt

import numpy as np

from darts_server.policy.auto.forecast import MAX_SAMPLES, Expectation, Forecast, forecast, limit_of
from darts_server.policy.auto.options import OFF, UNSHAPED, Auto, AutoLimits, Option
from darts_server.policy.auto.state import (
    FIRST_BATCHES,
    FIRST_NOISE,
    MAX_OPTIONS,
    MEANS,
    MOST,
    TRAINED,
    WEIGHT,
    AutoState,
    OptionState,
)
from darts_server.policy.checks import LARGEST
from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.simulation.machine import Machine

MIN_OFF = 2
"""Batches of ``off`` that are measured before anything else is chosen: lengths, step times and their spread."""
MARGIN = 0.03
"""An option must be expected to be faster than ``off`` by this: forecasts are off by a few per cent."""
NEAR = 1.1
"""Only options that are expected to take at most so many times as long as the best are worth a batch to measure."""
MIN_TRIES = 2
"""What explores takes options of rules first that were measured less often: forecasts are off by more between rules
than within one."""
EDGE = 0.1
"""By which share of a limit a batch may be expected to exceed it, as far as those before it were below. Limits hold on
average over batches: an option that is just inside would otherwise be left out in each batch where it is just outside
by chance, or by the error of the forecast."""
OUTLIER, FEW = 3.0, 3
"""Standard deviations by which a measurement counts as different at most, once an option has a few."""
LOSS, FIRST_LOSS = 0.02, 0.2
"""By how much longer than ``off`` an option may take, in logarithms; and how much so in its first batch."""
REST = 16
"""Batches for which an option is withdrawn the first time; twice as long every further time."""
MAX_DOUBLINGS = 8
MOST_CANDIDATES = 65_536
"""Candidates of a batch for which all options together are forecast in a few seconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done with a batch, and why.

    ``forecast``: of the model; ``None`` where nothing was forecast. ``seconds``: expected of the rollout, corrected;
    ``None`` likewise. ``off_seconds``: expected of a step under ``off``. ``explores``: whether another option was
    expected to be faster. ``below_bias``, ``below_lost``: by which share of the user's ``limits`` it is expected to be
    below them. ``groups``: of the batch; 0 where nothing was forecast. ``usual_length``: mean length expected of all.
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
    limits: AutoLimits = field(default_factory=AutoLimits)


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


@dataclass(frozen=True, slots=True)
class _Outlook:
    """An option with its forecast, and the seconds of its rollout and of its step as expected."""

    option: Option
    forecast: Forecast
    seconds: float
    step: float
    cost: float
    below_bias: float = 1.0
    below_lost: float = 1.0

    def is_within(self, state: AutoState, groups: int) -> bool:
        """Whether it is within the user's limits, on average with the batches before it."""
        spares = ((self.below_bias, state.spare_bias), (self.below_lost, state.spare_lost))
        return all(below >= -EDGE and below * groups + spare >= 0 for below, spare in spares)


def choose_by_size(auto: Auto, size: int, groups: int) -> Choice | None:
    """Choose what is done with a batch that has too few groups or too many candidates; ``None`` for all others."""
    if groups < MIN_GROUPS:
        return Choice(UNSHAPED, f"fewer than {MIN_GROUPS} groups say too little about a step")
    if groups * auto.max_candidates(size) > MOST_CANDIDATES:
        return Choice(UNSHAPED, f"more than {MOST_CANDIDATES} candidates take too long to forecast")
    return None


def choose(
    auto: Auto,
    state: AutoState,
    size: int,
    expectation: Expectation | None,
    machine: Machine | None,
    enough: int,
    rng: np.random.Generator,
    most_samples: int = MAX_SAMPLES,
) -> Choice:
    """Choose what is done with a batch of groups of ``size``, for which `choose_by_size` chooses nothing.

    ``expectation``, ``machine``: ``None`` while nothing is known. ``enough``: complete groups with which it ends.
    ``most_samples``: of the batch, by which each option is forecast.
    """
    if expectation is None or machine is None:
        return Choice(UNSHAPED, "lengths and step times are not known yet")
    options = auto.of_size(size)
    batches = expectation.sample(auto.max_candidates(size), rng, most_samples)
    groups = expectation.groups
    unshaped = forecast(UNSHAPED, size, expectation.stds, batches, machine, enough)
    off = _look(UNSHAPED, unshaped, state, auto.limits, groups)
    usual_length = off.forecast.mean_length * exp(state.length_error(OFF))

    def chosen(one: _Outlook, reason: str, *, explores: bool = False) -> Choice:
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
            usual_length,
            auto.limits,
        )

    if state.of(UNSHAPED.name).tries < MIN_OFF:
        return chosen(off, f"is measured {MIN_OFF} times before anything else, without pauses and weight updates")
    outlooks = [off]
    for option in options[1:]:
        if state.of(option.name).until > state.batches:
            continue
        if option.cut_share is not None:
            option = option.at(limit_of(option.cut_share, batches))
        found = forecast(option, size, expectation.stds, batches, machine, enough)
        outlook = _look(option, found, state, auto.limits, groups, off.forecast)
        if outlook.is_within(state, groups):
            outlooks.append(outlook)
    best = min(outlooks[1:], key=lambda one: one.cost, default=off)
    if best.cost > (1 - MARGIN) * off.cost:
        reason = f"{_seconds(off)} a step, {_named(best)}" if best is not off else "nothing else is within the limits"
        best = off
    else:
        reason = f"{_seconds(best)} a step, {_named(off)}"
    if state.explored + 1 <= auto.limits.exploration * (state.batches + 1):
        others = [one for one in outlooks if one is not best and one.cost <= NEAR * best.cost]
        least = min(others, key=lambda one: _by_tries(one, state), default=None)
        if least is not None:
            reason = f"explored: {_seconds(least)} a step, {_named(best)}, {_named(off)}"
            return chosen(least, reason, explores=True)
    return chosen(best, reason)


def begin(state: AutoState, choice: Choice) -> AutoState:
    """Count a batch that begins, with what is expected of it."""
    batches, explored = min(state.batches + 1, LARGEST), min(state.explored + choice.explores, LARGEST)
    state = _book(state, choice.groups, choice.below_bias, choice.below_lost)
    return replace(state, batches=batches, explored=explored)


def learn(state: AutoState, choice: Choice, measured: Measured) -> AutoState:
    """Learn from a batch that has ended."""
    limit = state.max_tokens if measured.max_tokens is None else measured.max_tokens
    if limit is not None and measured.longest > limit:
        limit = None
    state = replace(state, max_tokens=limit, means=(*state.means, *measured.means)[-MEANS:])
    if choice.forecast is None or measured.seconds <= 0 or measured.mean_length <= 0:
        return state
    name, before = choice.option.name, state.of(choice.option.name)
    state = _learn_limits(state, choice, choice.forecast, measured)
    weight = max(1 / (before.tries + 1), WEIGHT)
    found = {
        "error": _clip(log(measured.seconds / choice.forecast.seconds)),
        "length_error": _clip(log(measured.mean_length / choice.forecast.mean_length)),
        "more_cut": _clip(measured.cut - choice.forecast.cut),
    }
    usual = {key: _without_outlier(state, before, key, value) for key, value in found.items()}
    kept = found if before.tries < FEW else usual
    after = replace(
        before,
        tries=min(before.tries + 1, LARGEST),
        last=state.batches,
        error=_mix(before.error, kept["error"], weight),
        length_error=_mix(before.length_error, kept["length_error"], weight),
        more_cut=_mix(before.more_cut, kept["more_cut"], weight),
    )
    state = _learn_noise(state, before, usual, cuts=choice.forecast.cut > 0)
    if choice.option.shaping is None:
        known = measured.truncated if state.truncated is None else state.truncated
        state = replace(state, truncated=_mix(known, measured.truncated, weight))
    if choice.option.shaping is not None and choice.off_seconds is not None:
        step = measured.seconds + state.training_seconds(measured.returned)
        after = _judge(after, log(step / choice.off_seconds), state.batches)
    # Without those that were measured the longest ago, where a restored state has as many as it may have.
    others = [(other, option) for other, option in state.options.items() if other != name][1 - MAX_OPTIONS :]
    return replace(state, options=dict([*others, (name, after)]))


def learn_training(state: AutoState, returned: float, seconds: float) -> AutoState:
    """Learn how long it took from the end of a batch with so many returned tokens to the next batch."""
    pair = (min(max(returned, 0.0), LARGEST), min(max(seconds, 0.0), LARGEST))
    return replace(state, training=(*state.training, pair)[-TRAINED:])


def _judge(option: OptionState, against_off: float, batches: int) -> OptionState:
    """Withdraw an option that takes longer than ``off``, once for all batches that are in flight."""
    if option.until > batches:
        return option
    first = option.tries == 1
    against_off = _mix(option.against_off, against_off, 1.0 if first else 0.5)
    if against_off <= (FIRST_LOSS if first else LOSS):
        return replace(option, against_off=against_off)
    rest = REST * 2 ** min(option.withdrawals, MAX_DOUBLINGS)
    withdrawals = min(option.withdrawals + 1, LARGEST)
    return replace(option, against_off=0.0, withdrawals=withdrawals, until=min(batches + rest, LARGEST))


def _learn_limits(state: AutoState, choice: Choice, forecast: Forecast, measured: Measured) -> AutoState:
    """Correct by what was measured what `begin` has counted as below the limits, so that these hold for the former."""
    if choice.option.shaping is None:
        return state
    limits = choice.limits
    bias = _below(1 - measured.mean_length / choice.usual_length, limits.most_bias)
    share = _lost(forecast, measured.cut - forecast.cut, state.truncated, choice.groups)
    lost = _below(share, limits.most_lost)
    return _book(state, choice.groups, bias - choice.below_bias, lost - choice.below_lost)


def _book(state: AutoState, groups: int, bias: float, lost: float) -> AutoState:
    """Add to what batches were below the limits. One batch changes that by no more than as many groups as it has."""

    def spare(before: float, change: float) -> float:
        return min(max(before + change * groups, min(before, -groups)), max(before, groups)) if groups else before

    return replace(state, spare_bias=spare(state.spare_bias, bias), spare_lost=spare(state.spare_lost, lost))


_NOISES = {"error": "noise", "length_error": "length_noise", "more_cut": "cut_noise"}


def _without_outlier(state: AutoState, before: OptionState, key: str, value: float) -> float:
    """Return a measurement, or the nearest value that differs from those before by no more than is usual."""
    mean: float = getattr(before, key)
    most = OUTLIER * sqrt(max(getattr(state, _NOISES[key]), FIRST_NOISE))
    return min(max(value, mean - most), mean + most)


def _learn_noise(state: AutoState, before: OptionState, found: Mapping[str, float], *, cuts: bool) -> AutoState:
    """Learn how much measurements of an option differ from those of the same one before; ``cuts``: if it cuts any."""
    if not before.tries:
        return state
    weight = max(1 / (FIRST_BATCHES + state.repeated + 1), WEIGHT)
    share = before.effective_tries / (before.effective_tries + 1)  # the mean of those before varies, too
    noises = {
        _NOISES[key]: (1 - weight) * getattr(state, _NOISES[key]) + weight * share * (value - getattr(before, key)) ** 2
        for key, value in found.items()
        if key != "more_cut" or cuts
    }
    return replace(state, repeated=min(state.repeated + 1, LARGEST), **noises)


def _mix(old: float, new: float, weight: float) -> float:
    return (1 - weight) * old + weight * _clip(new)


def _clip(value: float) -> float:
    return min(max(value, -MOST), MOST)


def _by_tries(one: _Outlook, state: AutoState) -> tuple[bool, int, float]:
    """Return a sort key by which what was measured the least comes first, rules before their options."""
    name = one.option.name
    return state.tries(name) >= MIN_TRIES, state.of(name).tries, one.cost


def _look(
    option: Option, found: Forecast, state: AutoState, limits: AutoLimits, groups: int, off: Forecast | None = None
) -> _Outlook:
    seconds = found.seconds * exp(state.error(option.name))
    step = seconds + state.training_seconds(found.returned)
    if off is None:
        return _Outlook(option, found, seconds, step, step)
    off_step = off.seconds * exp(state.error(OFF)) + state.training_seconds(off.returned)
    price = limits.tokens_price * off_step * max(0.0, found.generated - found.returned) / off.generated
    length = found.mean_length * exp(state.length_error(option.name))
    bias = 1 - length / (off.mean_length * exp(state.length_error(OFF)))
    lost = _lost(found, state.more_cut(option.name), state.truncated, groups)
    below = _below(bias, limits.most_bias), _below(lost, limits.most_lost)
    return _Outlook(option, found, seconds, step, step + price, *below)


def _lost(found: Forecast, more_cut: float, truncated: float | None, groups: int) -> float:
    """Return the share that is lost where more or fewer are cut than forecast; all of the former would have ended.

    ``truncated``: share that ``off`` truncates. Of what is cut no more than that can be taken for not lost, and what a
    batch of ``groups`` usually has more: which of them would have ended does not show, and lengths that are cut in each
    batch are taken for longer and longer ones.
    """
    expected = max(0.0, found.lost + max(more_cut, more_cut * found.lost / found.cut if found.cut else 0.0))
    if truncated is None:
        return expected
    anyway = truncated + sqrt(truncated * (1 - truncated) / max(groups, 1))
    return max(expected, (found.cut + more_cut - anyway) / (1 - anyway)) if anyway < 1 else expected


def _below(value: float, limit: float) -> float:
    """Return by which share of a limit a value is below it."""
    if limit == 0:
        return 0.0 if value <= 0 else -inf
    return 1 - value / limit


def _seconds(one: _Outlook) -> str:
    return f"{one.step:.3g} s"


def _named(one: _Outlook) -> str:
    return f"{one.option.name} {_seconds(one)}"
