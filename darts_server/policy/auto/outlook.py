"""What is expected of an option: its forecast, corrected by what was measured, with its cost and the user's limits."""

from dataclasses import dataclass
from math import exp, inf, sqrt

from darts_server.policy.auto.options import CUTTING, AutoLimits, Option, measured_name, rule_of
from darts_server.policy.auto.state import AutoState
from darts_server.policy.simulation.forecast import Forecast
from darts_server.types import OFF

EDGE = 0.1
"""By which share of a limit a batch may be expected to exceed it, as far as those before it were below. Limits hold on
average over batches: an option that is just inside would otherwise be left out in each batch where it is just outside
by chance, or by the error of the forecast."""

MORE_TRUNCATED = 0.03
"""Share of trajectories by which `OFF` is taken to truncate more than was measured, at most. Where a rule cuts, what
lies beyond is extrapolated from what was cut: without this, what is cut would justify cutting more."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """An option with its forecast, and the seconds of its rollout and of its step as expected.

    ``cost``: by which options are compared, in seconds. ``below_bias``, ``below_lost``: by which share of the user's
    limits it is expected to be below them. ``enough``: complete groups with which the batch ends, if prompts are
    deferred; ``None`` if none is. ``length_share``: mean length of what these groups return, over that of all groups.
    """

    option: Option
    forecast: Forecast
    seconds: float
    step: float
    cost: float
    below_bias: float = 1.0
    below_lost: float = 1.0
    enough: int | None = None
    length_share: float = 1.0

    @property
    def name(self) -> str:
        """Name under which it is measured."""
        return measured_name(self.option, self.enough)

    def is_within(self, state: AutoState, groups: int) -> bool:
        """Whether it is within the user's limits, on average with the batches before it."""
        spares = ((self.below_bias, state.spare_bias), (self.below_lost, state.spare_lost))
        return all(below >= -EDGE and below * groups + spare >= 0 for below, spare in spares)


def expect(
    option: Option,
    found: Forecast,
    state: AutoState,
    limits: AutoLimits,
    groups: int,
    off: Forecast | None = None,
    *,
    bounded: bool = True,
) -> Outlook:
    """Expect of an option what is forecast of it for all groups.

    ``off``: forecast of `OFF`; ``None`` for that one. ``bounded``: see `share_truncated`.
    """
    seconds, step = _times(option.name, found, state)
    if off is None:
        return Outlook(option, found, seconds, step, step)
    length = found.mean_length * exp(state.length_error(option.name))
    bias = 1 - length / (off.mean_length * exp(state.length_error(OFF)))
    more_cut = state.more_cut(option.name) if rule_of(option.name) in CUTTING else 0.0
    lost = share_lost(found, more_cut, share_truncated(off, state, bounded=bounded), groups)
    limited = below_limit(bias, limits.most_bias), below_limit(lost, limits.most_lost)
    return Outlook(option, found, seconds, step, step + _price(found, state, limits, off), *limited)


def expect_deferring(
    whole: Outlook, found: Forecast, enough: int, state: AutoState, limits: AutoLimits, groups: int, off: Forecast
) -> Outlook:
    """Expect of an option what is forecast of it if its batch ends with ``enough`` of its groups.

    ``whole``: what is expected of it for all groups. Its limits are the same: deferred prompts are returned later, so
    that only quick groups come first takes nothing away. They cost a later batch their share of a step.
    """
    seconds, step = _times(measured_name(whole.option, enough), found, state)
    cost = (step + _price(found, state, limits, off)) * groups / enough
    length_share = found.mean_length / whole.forecast.mean_length
    limited = whole.below_bias, whole.below_lost
    return Outlook(whole.option, found, seconds, step, cost, *limited, enough, length_share)


def share_truncated(off: Forecast, state: AutoState, *, bounded: bool = True) -> float:
    """Return which share of trajectories is expected to reach the limit of tokens under `OFF`.

    ``bounded``: at most `MORE_TRUNCATED` more than was measured of it.
    """
    expected = off.truncated + state.more_truncated()
    most = state.truncated + MORE_TRUNCATED if bounded else 1.0
    return min(max(expected, 0.0), most, 1.0)


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


def _times(name: str, found: Forecast, state: AutoState) -> tuple[float, float]:
    """Return the expected seconds of the rollout and of the step."""
    seconds = found.seconds * exp(state.error(name))
    return seconds, seconds + state.training_seconds(found.returned)


def _price(found: Forecast, state: AutoState, limits: AutoLimits, off: Forecast) -> float:
    """Return what the tokens cost that are not returned, in seconds."""
    _, off_step = _times(OFF, off, state)
    return limits.tokens_price * off_step * max(0.0, found.generated - found.returned) / off.generated
