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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf, log, sqrt

import numpy as np

from darts_server.policy.auto.options import (
    AHEAD,
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
from darts_server.policy.auto.state import MEANS, MOST, TRAINED, AutoState, MeasuredErrors
from darts_server.policy.checks import LARGEST
from darts_server.policy.deadline import MIN_GROUPS
from darts_server.policy.simulation.batch import Batch, BatchPlan
from darts_server.policy.simulation.engines import Machine
from darts_server.policy.simulation.forecast import LONGEST, MAX_SAMPLES, Expectation, Forecast, forecast, limit_of
from darts_server.policy.simulation.rollout import simulate
from darts_server.types import OFF

MIN_OFF = 1
"""Batches of ``off`` that are forecast and measured before anything else is chosen."""
MIN_AHEAD = 3
"""Batches that run more than they need and are measured before fewer may be chosen: one alone says little, and the
first ones have not yet carried over as many long prompts as later ones."""
CLEAR = 0.8
"""Where these take at most such a part of the time that the model of a rollout says of `OFF`, that is not measured: the
model is wrong by less."""
MARGIN = 0.03
"""An option must be expected to be faster than ``off`` by this: forecasts are off by a few per cent. Where something
else was chosen last, exploration aside, it must only not be slower: near the edge one should not go back and forth."""
NEAR = 1.1
"""Only options that are expected to take at most so many times as long as the best are worth a batch to measure."""
UNSURE = 2.0
"""Standard deviations by which ``off`` may be faster than expected, against the best, when it is worth a batch."""
LONGEST_UNMEASURED = 256
"""Batches after which ``off``, or what is compared with it, is worth a batch whatever is expected of it."""
MOST_DEFERRING = 3
"""Options of which it is forecast what they would do with fewer groups, besides ``off``: those with the least cost for
all groups. Each takes two more forecasts."""
MOST_MOVED = 2.0
"""So many times its share a limit cuts at most of what is forecast, and at least as small a part of it: what other
rules have cut may say little about it, and so may what was cut of other lengths."""
RECENT_BATCHES, FEWEST_MEANS = 2, 32
"""Batches whose mean lengths stand for those of new prompts, as training changes lengths, and prompts at least."""
MOST_BEYOND = 1.25
"""Where a rule cuts, the mean length of a prompt is at most so many times the longest candidate of the batch: of one
whose candidates were nearly all cut it is extrapolated, up to many times what was seen."""
MOST_CANDIDATES = 65_536
"""Candidates of a batch for which all options together are forecast in a few seconds, or a quarter of a minute where
the KV cache is full all the time."""
EDGE = 0.1
"""By which share of a limit a batch may be expected to exceed it, as far as those before it were below. Limits hold on
average over batches: an option that is just inside would otherwise be left out in each batch where it is just outside
by chance, or by the error of the forecast."""
MORE_TRUNCATED = 0.03
"""Share of trajectories by which `OFF` is taken to truncate more than was measured, at most. Where a rule cuts, what
lies beyond is extrapolated from what was cut: without this, what is cut would justify cutting more."""
LEAST_CHANGE, MOST_CHANGE = 0.5, 1.25
"""By which factor the share of prompts that is started ahead of a step may change from one batch to the next."""
FEWEST_AHEAD = 1 / 64
"""Of the prompts that are offered: with none nothing would be learned any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An option for a batch: what is expected of it and, where it was chosen, why.

    ``forecast``: of the model; ``None`` where nothing was forecast, and all numbers of seconds are 0 then. ``seconds``:
    expected of the rollout, corrected; ``step``: of the step. ``cost``: by which options are compared, in seconds.
    ``off_seconds``: expected of a step under ``off``. ``explores``: whether another option was expected to be faster.
    ``below_bias``, ``below_lost``: by which share of the user's ``limits`` it is expected to be below them. ``groups``:
    of the batch; 0 where nothing was forecast. ``usual_length``: mean length expected of all. ``enough``: complete
    groups with which the batch ends, the others being deferred; ``None`` if this defers none. ``usual_length`` is then
    of the groups that are not deferred. ``truncated``: share expected to reach the limit of tokens under ``off``.
    ``length_error``: logarithm of the mean length, as corrected by what was measured, over the one forecast; ``None``
    where nothing was measured yet. ``num_groups``: complete groups with which the batch ends, also where its caller
    says so; ``None`` for all. ``begun``: prompts that run at once, where the others go on in a later batch from what
    they have; ``None`` where they do not. ``lost``: see `choose_resuming`.
    """

    option: Option
    reason: str = ""
    forecast: Forecast | None = None
    seconds: float = 0.0
    step: float = 0.0
    cost: float = 0.0
    off_seconds: float = 0.0
    explores: bool = False
    below_bias: float = 1.0
    below_lost: float = 1.0
    groups: int = 0
    usual_length: float = 0.0
    truncated: float = 0.0
    limits: AutoLimits = field(default_factory=AutoLimits)
    enough: int | None = None
    length_error: float | None = None
    num_groups: int | None = None
    begun: int | None = None
    lost: int = 0

    @property
    def name(self) -> str:
        """Name under which it is measured."""
        return measured_name(self.option, self.enough)

    @property
    def scope(self) -> str:
        """Which groups are waited for, in words; empty if all are."""
        return "" if self.enough is None else f" for {self.enough} of {self.groups} groups"

    def is_within(self, state: AutoState) -> bool:
        """Whether it is within the user's limits, on average with the batches before it."""
        spares = ((self.below_bias, state.spare_bias), (self.below_lost, state.spare_lost))
        return all(below >= -EDGE and below * self.groups + spare >= 0 for below, spare in spares)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a batch.

    ``seconds``: of the rollout. ``mean_length``: of a returned trajectory. ``cut``: share of these that the rule cut.
    ``max_tokens``: at which trajectories were truncated; ``None`` if none was. ``longest``: tokens of the longest
    candidate. ``means``: mean lengths of its prompts, as they are known now. ``truncated``: share of the returned
    trajectories that reached the limit of their tokens, and were not cut.
    """

    seconds: float
    mean_length: float
    cut: float
    max_tokens: int | None
    longest: int
    means: Sequence[float] = ()
    truncated: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredResuming:
    """What came of a batch whose prompts go on later. ``returned``: lengths of the trajectories of each returned group.

    ``prompt_tokens``: of a prompt, on average. ``stale``: tokens of older weights among the returned ones.
    ``generated``: tokens that candidates have generated in this batch. ``seconds``: 0 if they do not count.
    """

    returned: Sequence[Sequence[int]]
    prompt_tokens: int
    stale: int
    generated: int
    seconds: float


def choose_by_size(auto: Auto, size: int, groups: int) -> Choice | None:
    """Choose what is done with a batch that needs no forecast, or is too small or large for one; else ``None``."""
    if not auto.forecasts:
        return Choice(UNSHAPED, "nothing that shapes groups is allowed")
    if groups < MIN_GROUPS:
        return Choice(UNSHAPED, f"fewer than {MIN_GROUPS} groups say too little about a step")
    if groups * auto.max_candidates(size) > MOST_CANDIDATES:
        return Choice(UNSHAPED, f"more than {MOST_CANDIDATES} candidates take too long to forecast")
    return None


def choose_resuming(auto: Auto, state: AutoState, needed: int, offered: int, lost: int = 0) -> Choice:
    """Choose how many of the ``offered`` prompts run, where those that are not ``needed`` go on in a later batch.

    Nothing that is generated is lost then, and the more run at once the fewer steps wait for a long one. What it costs
    are tokens of older weights among those that are returned, and larger batches with more to prefill, which brings
    nothing where nearly all trajectories are of the same length. So a few batches run more than are needed, and if they
    are not clearly faster than the model says of `OFF`, that is measured, too, and the faster chosen: `learn_resuming`.

    Where so many groups end together with the last one that the needed groups are not complete before, as where nearly
    all have an answer that is truncated, no group is a straggler. Then nothing runs ahead, whatever was measured.
    ``state``: of batches of this kind alone. ``lost``: tokens that earlier batches have generated for these prompts,
    and that none can go on from.
    """
    limits, begun, explores, why = auto.limits, offered, False, ""
    if RESUME in limits.allow:
        ahead = state.ahead if limits.most_stale else 0.0
        begun = min(offered, needed + round(ahead * max(0, offered - needed)))
        if begun > needed and (1 - state.ending_last) * offered < needed:
            begun = needed
            why = f"; {state.ending_last:.0%} of the groups end together, so that running ahead saves nothing"
        elif begun > needed:
            best = AHEAD
            if state.count(AHEAD) >= MIN_AHEAD:
                longer = state.expect("error", AHEAD) - (state.expect("error", OFF) if state.count(OFF) else 0.0)
                best = AHEAD if longer < (-MARGIN if state.chosen == OFF else 0.0) else OFF
                why = f"; running ahead takes {exp(longer):.2f} of the time"
                other = OFF if best == AHEAD else AHEAD
                is_near = abs(longer) < log(NEAR) or state.batches - state.last(other) >= LONGEST_UNMEASURED
                # In the first batch after a change prompts are carried over from the other kind: the second one tells.
                explores = (
                    bool(state.explored % 2)
                    or (best == AHEAD and not state.count(OFF) and longer > log(CLEAR))
                    or (is_near and state.explored + 2 <= limits.exploration * (state.batches + 1))
                )
                if explores:
                    best, why = other, f"{why}; explored"
            begun = begun if best == AHEAD else needed
    reason = f"{begun} of {offered} prompts run, and the first {needed} groups are returned{why}"
    return Choice(
        UNSHAPED, reason, explores=explores, limits=limits, groups=offered, num_groups=needed, begun=begun, lost=lost
    )


def learn_resuming(state: AutoState, choice: Choice, measured: MeasuredResuming, machine: Machine | None) -> AutoState:
    """Learn from a batch of `choose_resuming` that has ended.

    ``ahead``, the share to start of what the next batch offers beyond the needed prompts, follows the share of older
    tokens, so that it stays below the user's limit on average over batches. All are started at first.

    ``ending_last`` follows the share of groups that are complete together with the last one, within `MARGIN`, where all
    returned groups start and end in one batch, as the model says.

    The seconds of a generated token are compared with those that the model says for the same trajectories where their
    groups start and end in one batch: batches differ by much more in what they return than in that ratio. What a start
    costs is left out of the model, as it is learned later than the rest.
    """
    assert choice.begun is not None
    assert choice.num_groups is not None
    name, ran = AHEAD if choice.begun > choice.num_groups else OFF, state.ran
    more, most_stale = round(state.ahead * (choice.groups - choice.num_groups)), choice.limits.most_stale
    batches, explored = min(state.batches + 1, LARGEST), min(state.explored + choice.explores, LARGEST)
    state = replace(state, batches=batches, explored=explored, ran=name)
    if more > 0 and not choice.explores:
        state = replace(state, chosen=name)
    if not measured.returned:
        return state
    tokens, stale = sum(map(sum, measured.returned)), measured.stale
    if name == AHEAD or not more:
        factor = min(max(most_stale * tokens / stale, LEAST_CHANGE), MOST_CHANGE) if stale else MOST_CHANGE
        state = replace(state, ahead=min(max(state.ahead * factor, FEWEST_AHEAD), 1.0))
    if machine is None:
        return state
    lengths = np.asarray(sorted(measured.returned, key=sum, reverse=True))
    prompts, size = np.full(len(lengths), measured.prompt_tokens), lengths.shape[1]
    batch = Batch(prompts, lengths, np.zeros_like(lengths, np.float64), LONGEST)
    machine = replace(machine, step_time=replace(machine.step_time, per_start=0.0))
    off = simulate(batch, BatchPlan(size, [size] * len(lengths)), machine)
    ending_last = float((off.completed_at >= (1 - MARGIN) * off.seconds).mean())
    state = replace(state, ending_last=(state.ending_last + ending_last) / 2)
    # What was carried over makes a batch quick that runs no more than it needs, and the first that runs more has none.
    if ran != name or not (measured.seconds and measured.generated):
        return state
    error = log(measured.seconds / max(1, measured.generated - choice.lost) * tokens / off.seconds)
    return state.with_measured(MeasuredErrors(state.batches, name, min(max(error, -MOST), MOST), 0.0))


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
    batches = expectation.sample(auto.max_candidates(size), rng, most_samples)
    groups, limits = expectation.groups, auto.limits

    def foresee(option: Option, enough: int) -> Forecast:
        plan = BatchPlan.of(option.shaping, size, expectation.stds, enough=enough if enough < groups else None)
        return forecast(plan, batches, machine)

    unshaped = foresee(UNSHAPED, enough)
    expect = partial(_expect, state, limits, groups, unshaped)
    off = expect(UNSHAPED, unshaped)
    if state.count(OFF) < MIN_OFF:
        return replace(off, reason="is measured before anything else, in a batch without pauses and weight updates")

    # What may be done with the whole batch, within the limits and beyond, and with a part of it.
    within, beyond = [off], list[tuple[Choice, Forecast]]()
    for option in auto.of_size(size)[1:]:
        if option.cut_share is not None:
            # Where more are cut than forecast, the limit is that of fewer, and the other way round.
            share, most = option.cut_share - state.expect("more_cut", option.name), option.cut_share * MOST_MOVED
            option = option.at(limit_of(min(max(share, option.cut_share / MOST_MOVED), most, 1.0), batches))
        found = foresee(option, enough)
        choice = expect(option, found)
        if choice.is_within(state):
            within.append(choice)
        else:
            beyond.append((choice, found))
    if min_groups is not None and RESTART in limits.allow:
        for whole in (off, *sorted(within[1:], key=lambda one: one.cost)[:MOST_DEFERRING]):
            for part in sorted({min_groups, (min_groups + groups) // 2}):
                within.append(expect(whole.option, foresee(whole.option, part), whole, part))

    def named(one: Choice) -> str:
        return f"{one.option.name} {one.step:.3g} s{one.scope}"

    best = min(within[1:], key=lambda one: one.cost, default=off)
    if best is off:
        reason = "nothing else is within the limits"
    elif best.cost > (1 - (MARGIN if state.chosen == OFF else 0.0)) * off.cost:
        best, reason = off, f"{off.step:.3g} s a step, {named(best)}"
    else:
        reason = f"{best.step:.3g} s a step{best.scope}, {named(off)}"

    # Now and then another one is worth a batch, to measure it.
    if state.explored + 1 <= limits.exploration * (state.batches + 1):
        others = [one for one in within if one is not best and one.cost <= NEAR * best.cost]
        if best is not off and any(
            one.cost < best.cost and expect(one.option, found, bounded=False).is_within(state) for one, found in beyond
        ):
            others = [off]  # it says how many are truncated anyway, and so how many of what is cut are lost
        elif best is not off and off not in others:
            fastest = off.cost - (1 - exp(-UNSURE * state.uncertainty(best.name))) * off.seconds
            if fastest <= best.cost or state.batches - state.last(OFF) >= LONGEST_UNMEASURED:
                others.append(off)
        # What was measured the longest ago, or never, comes first.
        oldest = min(others, key=lambda one: (state.last(one.name), one.cost), default=None)
        if oldest is not None:
            reason = f"explored: {oldest.step:.3g} s a step{oldest.scope}, {named(best)}, {named(off)}"
            return replace(oldest, reason=reason, explores=True)
    return replace(best, reason=reason)


def _expect(
    state: AutoState,
    limits: AutoLimits,
    groups: int,
    off: Forecast,
    option: Option,
    found: Forecast,
    whole: Choice | None = None,
    enough: int | None = None,
    *,
    bounded: bool = True,
) -> Choice:
    """Correct what was forecast of an option for a batch of so many ``groups`` by what was measured.

    ``off``: forecast of `OFF`. ``whole``: where the batch ends with ``enough`` of its groups, what is expected of the
    option for all groups. Its limits are the same: deferred prompts are returned later, so that only quick groups come
    first takes nothing away. They cost a later batch their share of a step. ``bounded``: whether `OFF` is taken to
    truncate at most `MORE_TRUNCATED` more than was measured of it.
    """

    def times(name: str, found: Forecast) -> tuple[float, float]:
        """Return the expected seconds of the rollout and of the step."""
        seconds = found.seconds * exp(state.expect("error", name))
        return seconds, seconds + state.training_seconds(found.returned)

    name = measured_name(option, enough)
    seconds, step = times(name, found)
    _, off_step = times(OFF, off)
    usual_length = off.mean_length * exp(state.expect("length_error", OFF))
    truncated = off.truncated + state.expect("more_truncated", OFF)
    truncated = min(max(truncated, 0.0), state.truncated + MORE_TRUNCATED if bounded else 1.0, 1.0)
    cost, below_bias, below_lost = step, 1.0, 1.0
    if option is not UNSHAPED or whole is not None:
        # What the tokens cost that are not returned.
        cost += limits.tokens_price * off_step * max(0.0, found.generated - found.returned) / off.generated
    if whole is not None and whole.forecast is not None and enough is not None:
        cost = cost * groups / enough
        below_bias, below_lost = whole.below_bias, whole.below_lost
        usual_length *= found.mean_length / whole.forecast.mean_length
    elif option is not UNSHAPED:
        length = found.mean_length * exp(state.expect("length_error", name))
        more_cut = state.expect("more_cut", name) if rule_of(name) in CUTTING else 0.0
        below_bias = below_limit(1 - length / usual_length, limits.most_bias)
        below_lost = below_limit(share_lost(found, more_cut, truncated, groups), limits.most_lost)
    return Choice(
        option,
        forecast=found,
        seconds=seconds,
        step=step,
        cost=cost,
        off_seconds=off_step,
        below_bias=below_bias,
        below_lost=below_lost,
        groups=groups,
        usual_length=usual_length,
        truncated=truncated,
        limits=limits,
        enough=enough,
        length_error=state.expect("length_error", name) if state.measured else None,
    )


def share_lost(found: Forecast, more_cut: float, truncated: float, groups: int) -> float:
    """Return the share that is lost where more or fewer are cut than forecast; all of the former would have ended.

    ``truncated``: share that ``off`` is expected to truncate. Of what is cut no more than that can be taken for not
    lost, and what a batch of ``groups`` usually has more: which of them would have ended does not show.
    """
    expected = max(0.0, found.lost + max(more_cut, more_cut * found.lost / found.cut if found.cut else 0.0))
    anyway = truncated + sqrt(truncated * (1 - truncated) / max(groups, 1))
    return max(expected, (found.cut + more_cut - anyway) / (1 - anyway)) if anyway < 1 else expected


def below_limit(value: float, limit: float) -> float:
    """Return by which share of a limit a value is below it."""
    if limit == 0:
        return 0.0 if value <= 0 else -inf
    return 1 - value / limit


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
    plan = BatchPlan.of(None, size, expectation.stds, enough=enough if enough < expectation.groups else None)
    return replace(choice, forecast=forecast(plan, batches, machine))


# --- what is learned from a batch --------------------------------------------


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
    name, expected, limits = choice.name, choice.forecast, choice.limits
    more_cut = measured.cut - expected.cut
    if choice.option.shaping is not None:
        # Correct what `begin` has counted as below the limits, so that these hold for what was measured.
        bias = below_limit(1 - measured.mean_length / choice.usual_length, limits.most_bias)
        lost = below_limit(share_lost(expected, more_cut, choice.truncated, choice.groups), limits.most_lost)
        state = _book(state, choice.groups, bias - choice.below_bias, lost - choice.below_lost)
    length_error = log(measured.mean_length / expected.mean_length)
    longer = 0.0 if choice.length_error is None else length_error - choice.length_error
    # Training changes lengths from batch to batch: a batch that is slow as its trajectories are longer should not count
    # against its option. So what other lengths than expected explain is left out: at most all of it, nothing if the
    # signs differ. In logarithms.
    usual = state.expect("error", name)
    slower = log(measured.seconds / expected.seconds) - usual
    error = usual + (slower - min(max(longer, min(slower, 0.0)), max(slower, 0.0)))
    found = MeasuredErrors(
        state.batches,
        name,
        min(max(error, -MOST), MOST),
        min(max(length_error, -MOST), MOST),
        more_cut if rule_of(name) in CUTTING else None,
        measured.truncated - expected.truncated if name == OFF else None,
    )
    state = state.with_measured(found)
    if name != OFF:
        return state
    known = state.truncated if state.count(OFF) > 1 else measured.truncated
    return replace(state, truncated=(known + measured.truncated) / 2)


def learn_training(state: AutoState, returned: float, seconds: float) -> AutoState:
    """Learn how long it took from the end of a batch with so many returned tokens to the next batch."""
    pair = (min(max(returned, 0.0), LARGEST), min(max(seconds, 0.0), LARGEST))
    return replace(state, training=(*state.training, pair)[-TRAINED:])


def _book(state: AutoState, groups: int, bias: float, lost: float) -> AutoState:
    """Add to what batches were below the limits. One batch changes that by no more than as many groups as it has."""

    def spare(before: float, change: float) -> float:
        return min(max(before + change * groups, min(before, -groups)), max(before, groups)) if groups else before

    return replace(state, spare_bias=spare(state.spare_bias, bias), spare_lost=spare(state.spare_lost, lost))
