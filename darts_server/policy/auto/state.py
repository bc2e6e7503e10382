"""What `auto` has measured: of each option, and of the training between batches. Survives a restart."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from darts_server.policy.auto.options import rule_of
from darts_server.policy.checks import MIN_MEAN, check_count, check_length, check_number

TRAINED = 32
"""Batches of which the seconds of training are kept."""
LATE = 3.0
"""A pause of more than so many times the usual one is no training: an evaluation, or a person."""
SHRINKAGE = 0.1
"""Spread of returned tokens, relative to their mean, below which a difference in training time is taken for chance."""
MEANS = 256
"""Prompts whose mean lengths stand for those of new ones."""
PRIOR = 0.3
"""Typical error of all forecasts together, in logarithms."""
RULES_DIFFER, OPTIONS_DIFFER = 0.1, 0.05
"""By how much the errors of rules typically differ from each other, and those of the options of a rule."""
FIRST_NOISE, FIRST_BATCHES = 0.01, 2
"""Variance that measurements are taken to have before there are any, and the batches that this counts as."""
WEIGHT = 0.15
"""Least weight of the newest measurement among those of the same kind."""
MOST_TRIES = (2 - WEIGHT) / WEIGHT
"""Independent measurements whose plain mean varies as much as one in which the newest always has `WEIGHT`."""
MAX_OPTIONS = 256
MOST = 5.0
"""Largest logarithm of a ratio that is accepted."""


@dataclass(frozen=True, slots=True)
class OptionState:
    """What was measured of one option. Plain fields: ``OptionState(**json)`` restores it.

    ``tries``: batches. ``error``: logarithm of measured over forecast seconds of a rollout, the newest counting most;
    ``length_error``: the same for the mean length of what is returned. ``more_cut``: share of cut trajectories,
    measured less forecast. ``against_off``: logarithm of a step's measured seconds over those expected of ``off``.
    ``withdrawals``: how often it was withdrawn; ``until``: the number of batches from which it is no more.
    """

    tries: int = 0
    error: float = 0.0
    length_error: float = 0.0
    more_cut: float = 0.0
    against_off: float = 0.0
    withdrawals: int = 0
    until: int = 0

    def __post_init__(self) -> None:
        for name in ("tries", "withdrawals", "until"):
            check_count(name, getattr(self, name))
        for name in ("error", "length_error", "more_cut", "against_off"):
            check_number(name, getattr(self, name), -MOST, MOST)

    @property
    def effective_tries(self) -> float:
        """Independent measurements whose plain mean varies as much as what is kept, in which newer ones count more."""
        return min(self.tries, MOST_TRIES)


@dataclass(frozen=True, slots=True)
class AutoState:
    """All that was measured. Plain fields: ``AutoState(**json)`` restores it.

    ``batches``, ``explored``: how many there were, and how many of them explored. ``options``: by name. ``training``:
    returned tokens and the seconds until the next batch, of the newest batches. ``means``: mean lengths of the
    newest prompts. ``max_tokens``: at which trajectories were truncated; ``None`` if none was. ``noise``,
    ``length_noise``: variance of an option's ``error`` and ``length_error`` from batch to batch, from ``repeated``
    batches of options that were measured before. ``spare_bias``, ``spare_lost``: by which share of the user's limits
    batches were below them so far, and the next one may be above them.
    """

    batches: int = 0
    explored: int = 0
    options: Mapping[str, OptionState] = field(default_factory=dict)
    training: Sequence[tuple[float, float]] = ()
    means: Sequence[float] = ()
    max_tokens: int | None = None
    repeated: int = 0
    noise: float = FIRST_NOISE
    length_noise: float = FIRST_NOISE
    spare_bias: float = 0.0
    spare_lost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batches", "explored", "repeated"):
            check_count(name, getattr(self, name))
        for name in ("noise", "length_noise"):
            check_number(name, getattr(self, name), 0.0, MOST * MOST)
        for name in ("spare_bias", "spare_lost"):
            check_number(name, getattr(self, name), -1.0, 1.0)
        check_length("options", self.options, MAX_OPTIONS)
        check_length("training", self.training, TRAINED)
        options = {
            name: option if isinstance(option, OptionState) else OptionState(**option)
            for name, option in self.options.items()
        }
        object.__setattr__(self, "options", options)
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

    def of(self, name: str) -> OptionState:
        return self.options.get(name, OptionState())

    def tries(self, name: str) -> int:
        """Return how many batches were measured under options of the same rule."""
        return sum(option.tries for other, option in self.options.items() if rule_of(other) == rule_of(name))

    def errors(self, name: str) -> tuple[float, float]:
        """Return the ``error`` and the ``length_error`` that are to be expected of an option.

        What was measured of it, drawn towards what was measured of its rule, and that towards what was measured of all:
        the more so, the fewer batches there were and the more these vary.
        """
        return self._expected(name, "error", self.noise), self._expected(name, "length_error", self.length_noise)

    def _expected(self, name: str, field: str, noise: float) -> float:
        def mean(options: Iterable[OptionState], prior: float, spread: float) -> float:
            tries = [(option.effective_tries, getattr(option, field)) for option in options]
            weight = noise / spread**2  # the prior counts as so many batches
            total = weight + sum(number for number, _ in tries)
            return (weight * prior + sum(number * value for number, value in tries)) / total if total else prior

        alike = [option for other, option in self.options.items() if rule_of(other) == rule_of(name)]
        rule = mean(alike, mean(self.options.values(), 0.0, PRIOR), RULES_DIFFER)
        return mean([self.of(name)], rule, OPTIONS_DIFFER)

    def training_seconds(self, tokens: float) -> float:
        """Return the expected seconds from the end of a batch with so many returned tokens to the next; 0 if unknown.

        A line through the measured ones. Its slope is drawn towards 0 where tokens have hardly differed.
        """
        if not self.training:
            return 0.0
        seconds = np.asarray([seconds for _, seconds in self.training])
        usual = seconds <= LATE * float(np.median(seconds))
        x, y = np.asarray([tokens for tokens, _ in self.training])[usual], seconds[usual]
        mean, typical = float(x.mean()), float(y.mean())
        covariance = float(((x - mean) * (y - typical)).mean())
        slope = covariance / (float(x.var()) + (SHRINKAGE * mean) ** 2) if mean else 0.0
        most = typical / mean if mean else 0.0
        return max(0.0, typical + min(max(slope, 0.0), most) * (tokens - mean))
