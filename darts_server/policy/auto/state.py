"""What `auto` has measured: of batches, and of the training between them. Survives a restart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from darts_server.policy.auto.errors import Errors
from darts_server.policy.auto.options import AHEAD
from darts_server.policy.checks import LARGEST, MIN_MEAN, check_count, check_length, check_number
from darts_server.types import OFF

TRAINED = 32
"""Batches of which the seconds of training are kept."""
LATE = 3.0
"""A pause of more than so many times the usual one is no training: an evaluation, or a person."""
SLOPE = 0.5
"""Typical share of the training time that grows with the tokens, before it was measured."""
TRAINING_NOISE, NOISE_WEIGHT = 0.05, 4
"""Relative noise of training times before it was measured, which counts as so many batches."""
MEANS = 256
"""Prompts whose mean lengths stand for those of new ones, at most."""
MEASURED, KEPT_COMPARED = 64, 4
"""Newest batches that show by how much forecasts are wrong; the last few of ``off``, with which all others are
compared, and of `AHEAD`, which is compared with it, are among them however old they are."""
OUTLIER, FEW = 3.0, 3
"""Standard deviations by which a measurement counts as different at most, once there are a few."""
MOST = 5.0
"""Largest logarithm of a ratio that is accepted."""
KINDS = {"error": MOST, "length_error": MOST, "more_cut": 1.0, "more_truncated": 1.0}
"""What is measured of a batch, with the largest value that is accepted."""


@dataclass(frozen=True, slots=True)
class MeasuredErrors:
    """By how much forecasts of a batch were wrong. Plain fields: ``MeasuredErrors(**json)`` restores it.

    ``batch``: of how many that had begun. ``name``: of what was measured. ``error``: logarithm of measured over
    forecast seconds of the rollout, without what other lengths than expected explain; ``length_error``: the same for
    the mean length of what is returned, all of it. ``more_cut``: share of cut trajectories, measured less forecast;
    ``None`` of a rule that cuts none. ``more_truncated``: the same of those that reached the limit of their tokens;
    ``None`` of all but ``off``.
    """

    batch: int
    name: str
    error: float
    length_error: float
    more_cut: float | None = None
    more_truncated: float | None = None

    def __post_init__(self) -> None:
        check_count("batch", self.batch)
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a string, got {self.name!r}")
        for name, most in KINDS.items():
            if getattr(self, name) is not None or not name.startswith("more"):
                check_number(name, getattr(self, name), -most, most)


@dataclass(frozen=True, slots=True)
class AutoState:
    """All that was measured. Plain fields: ``AutoState(**json)`` restores it.

    ``batches``, ``explored``: how many there were, and how many of them explored. ``chosen``: name of what was done in
    the last one that did not, by its forecast. ``training``: returned tokens and the seconds until the next batch, of
    the newest batches. ``means``: mean lengths of the newest prompts. ``max_tokens``: at which trajectories were
    truncated; ``None`` if none was. ``truncated``: share of those of ``off`` that were, each batch counting half as
    much as the next. ``measured``: `MEASURED` batches at most, oldest first. ``spare_bias``, ``spare_lost``: by which
    share of the user's limits batches were below them so far, times their groups; negative: above them. ``ahead``: of
    the prompts that are offered beyond those that are needed, the share to start, see `chooser.learn_resuming`.
    ``ran``: whether the last of these batches was `AHEAD` or `OFF`. ``ending_last``: share of a batch's groups that end
    together with its last one, each batch counting half as much as the next.
    """

    batches: int = 0
    explored: int = 0
    chosen: str = OFF
    training: Sequence[tuple[float, float]] = ()
    means: Sequence[float] = ()
    max_tokens: int | None = None
    truncated: float = 0.0
    measured: Sequence[MeasuredErrors] = ()
    spare_bias: float = 0.0
    spare_lost: float = 0.0
    ahead: float = 1.0
    ran: str = OFF
    ending_last: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batches", "explored"):
            check_count(name, getattr(self, name))
        for name in ("spare_bias", "spare_lost"):
            check_number(name, getattr(self, name), -LARGEST, LARGEST)
        for name in ("chosen", "ran"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        check_length("training", self.training, TRAINED)
        check_length("measured", self.measured, MEASURED)
        measured = (one if isinstance(one, MeasuredErrors) else MeasuredErrors(**one) for one in self.measured)
        object.__setattr__(self, "measured", tuple(measured))
        if self.measured and max(one.batch for one in self.measured) > self.batches:
            raise ValueError(f"batches that were measured must be among the {self.batches} that have begun")
        for tokens, seconds in self.training:
            check_number("tokens", tokens)
            check_number("seconds", seconds)
        object.__setattr__(self, "training", tuple((tokens, seconds) for tokens, seconds in self.training))
        check_length("means", self.means, MEANS)
        for mean in self.means:
            check_number("means", mean, MIN_MEAN)
        object.__setattr__(self, "means", tuple(self.means))
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 1)
        check_number("truncated", self.truncated, 0.0, 1.0)
        check_number("ahead", self.ahead, 0.0, 1.0)
        check_number("ending_last", self.ending_last, 0.0, 1.0)

    def count(self, name: str) -> int:
        """Return how many of the batches in `measured` were under an option."""
        return sum(one.name == name for one in self.measured)

    def last(self, name: str) -> int:
        """Return how many batches had begun when an option was measured last.

        Of one that is not in `measured`, at most: 0 if nothing was left out of it yet.
        """
        first = self.measured[KEPT_COMPARED].batch if len(self.measured) == MEASURED else 0
        return max((one.batch for one in self.measured if one.name == name), default=first)

    def expect(self, kind: str, name: str) -> float:
        """Return what is to be expected of an option in the next batch, one of `KINDS`."""
        return _errors(self.measured, kind).expect(name, self.batches + 1)

    def uncertainty(self, name: str) -> float:
        """Return the standard deviation of how an option's ``error`` differs from that of ``off``."""
        return _errors(self.measured, "error").differ(name, OFF, self.batches + 1)

    def with_measured(self, found: MeasuredErrors) -> "AutoState":
        """Return the state with another batch. What differs from what was expected by far counts as less so."""
        if len(self.measured) >= FEW:
            usual = {}
            for key, largest in KINDS.items():
                errors, value = _errors(self.measured, key), getattr(found, key)
                if value is not None:
                    expected = errors.expect(found.name, found.batch)
                    most = OUTLIER * errors.spread(found.name, found.batch)
                    usual[key] = min(max(value, expected - most, -largest), expected + most, largest)
            found = replace(found, **usual)
        measured = [*self.measured, found]
        if len(measured) > MEASURED:
            compared = [
                [i for i, one in enumerate(measured) if one.name == name][-KEPT_COMPARED:] for name in (OFF, AHEAD)
            ]
            kept = {i for each in compared for i in each}
            del measured[next(index for index in range(len(measured)) if index not in kept)]
        return replace(self, measured=measured)

    def training_seconds(self, tokens: float) -> float:
        """Return the expected seconds from the end of a batch with so many returned tokens to the next; 0 if unknown.

        A line through the measured ones, by Bayesian regression: between a constant and a proportion, and a constant
        as far as the tokens have differed too little, for the noise of the seconds, to tell.
        """
        if not self.training:
            return 0.0
        seconds = np.asarray([seconds for _, seconds in self.training])
        usual = seconds <= LATE * float(np.median(seconds))
        x, y = np.asarray([tokens for tokens, _ in self.training])[usual], seconds[usual]
        mean, typical = float(x.mean()), float(y.mean())
        if mean < MIN_MEAN or not typical:
            return typical
        # Over the means: the slope is 0 for a constant and 1 for a proportion.
        x, y = x / mean - 1, y / typical - 1
        spread, together = float(x @ x), float(x @ y)
        residuals = y - x * (min(max(together / spread, 0.0), 1.0) if spread else 0.0)
        noise = (NOISE_WEIGHT * TRAINING_NOISE**2 + float(residuals @ residuals)) / (NOISE_WEIGHT + x.size)
        slope = min(max(together / (spread + noise / SLOPE**2), 0.0), 1.0)
        return max(0.0, typical * (1 + slope * (tokens / mean - 1)))


@lru_cache(maxsize=16)
def _errors(measured: Sequence[MeasuredErrors], key: str) -> Errors:
    """Fit one of `KINDS`, once for all options of a choice."""
    known = [one for one in measured if getattr(one, key) is not None]
    return Errors([one.batch for one in known], [one.name for one in known], [getattr(one, key) for one in known])
