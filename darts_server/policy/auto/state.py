"""What `auto` has measured: of each option, and of the training between batches. Survives a restart."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from darts_server.policy.auto.options import OFF, rule_of
from darts_server.policy.checks import LARGEST, MIN_MEAN, check_count, check_length, check_number

TRAINED = 32
"""Batches of which the seconds of training are kept."""
LATE = 3.0
"""A pause of more than so many times the usual one is no training: an evaluation, or a person."""
SHRINKAGE = 0.1
"""Spread of returned tokens, relative to their mean, below which a difference in training time is taken for chance."""
MEANS = 256
"""Prompts whose mean lengths stand for those of new ones."""
PRIOR = 0.3
"""Typical error of all forecasts together, in logarithms, or of shares."""
RULES_DIFFER, OPTIONS_DIFFER = 0.1, 0.05
"""By how much the errors of rules typically differ from each other, and those of the options of a rule."""
FIRST_NOISE, FIRST_BATCHES = 0.01, 2
"""Variance that measurements are taken to have before there are any, and the batches that this counts as."""
WEIGHT = 0.15
"""Least weight of the newest measurement among those of the same kind."""
STALE = 32
"""Batches after which a measurement counts half. An option that looks worse than it is, by chance, is tried again."""
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
    ``withdrawals``: how often it was withdrawn; ``until``: the number of batches from which it is no more. ``last``:
    the batches that had begun when it was measured.
    """

    tries: int = 0
    error: float = 0.0
    length_error: float = 0.0
    more_cut: float = 0.0
    against_off: float = 0.0
    withdrawals: int = 0
    until: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        for name in ("tries", "withdrawals", "until", "last"):
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
    newest prompts. ``max_tokens``: at which trajectories were truncated; ``None`` if none was. ``truncated``: share of
    those of ``off`` that were, the newest counting most; ``None`` before it was measured. ``noise``,
    ``length_noise``, ``cut_noise``: variance of an option's ``error``, ``length_error`` and ``more_cut`` from batch to
    batch, from ``repeated`` batches of options that were measured before. ``spare_bias``, ``spare_lost``: by which
    share of the user's limits batches were below them so far, times their groups; negative: above them.
    """

    batches: int = 0
    explored: int = 0
    options: Mapping[str, OptionState] = field(default_factory=dict)
    training: Sequence[tuple[float, float]] = ()
    means: Sequence[float] = ()
    max_tokens: int | None = None
    truncated: float | None = None
    repeated: int = 0
    noise: float = FIRST_NOISE
    length_noise: float = FIRST_NOISE
    cut_noise: float = FIRST_NOISE
    spare_bias: float = 0.0
    spare_lost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batches", "explored", "repeated"):
            check_count(name, getattr(self, name))
        for name in ("noise", "length_noise", "cut_noise"):
            check_number(name, getattr(self, name), 0.0, MOST * MOST)
        for name in ("spare_bias", "spare_lost"):
            check_number(name, getattr(self, name), -LARGEST, LARGEST)
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
        if self.truncated is not None:
            check_number("truncated", self.truncated, 0.0, 1.0)

    def of(self, name: str) -> OptionState:
        return self.options.get(name, OptionState())

    def tries(self, name: str) -> int:
        """Return how many batches were measured under options of the same rule."""
        return sum(option.tries for other, option in self.options.items() if rule_of(other) == rule_of(name))

    def error(self, name: str) -> float:
        """Return the ``error`` that is to be expected of an option.

        What was measured of it, drawn towards what was measured of its rule, and that towards what was measured of all:
        the more so, the fewer batches there were, the more these vary and the longer ago they were.
        """
        return self._expected(name, "error", self.noise)

    def length_error(self, name: str) -> float:
        """Return the ``length_error`` that is to be expected of an option, drawn as `error`.

        Not so that of ``off``: others are compared with it, and what they have in common would not be seen.
        """
        if name == OFF:
            return self._drawn([name], "length_error", self.length_noise, 0.0, PRIOR)
        return self._expected(name, "length_error", self.length_noise)

    def more_cut(self, name: str) -> float:
        """Return the ``more_cut`` that is to be expected of an option, drawn as `error`."""
        return self._expected(name, "more_cut", self.cut_noise)

    def _expected(self, name: str, field: str, noise: float) -> float:
        alike = [other for other in self.options if rule_of(other) == rule_of(name)]
        rule = self._drawn(alike, field, noise, self._drawn(self.options, field, noise, 0.0, PRIOR), RULES_DIFFER)
        return self._drawn([name], field, noise, rule, OPTIONS_DIFFER)

    def _drawn(self, names: Collection[str], field: str, noise: float, prior: float, spread: float) -> float:
        """Return the mean of what was measured of options, drawn towards the ``prior``, from which they differ."""
        weight, total = noise / spread**2, 0.0  # the prior counts as so many batches
        for name in names:
            option, fresh = self.of(name), self._fresh(name)
            weight += (1 - fresh) * option.effective_tries
            total += fresh * option.effective_tries * getattr(option, field)
        count = noise / spread**2 + sum(self.of(name).effective_tries for name in names)
        return (weight * prior + total) / count if count else prior

    def _fresh(self, name: str) -> float:
        """Return how much what was measured of an option still counts, 0 to 1. ``off`` is always as it was."""
        age = 0 if name == OFF else max(0, self.batches - self.of(name).last)
        return float(0.5 ** (age / STALE))

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
