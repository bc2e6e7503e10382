"""Roulette: survival with which weighted groups teach most per token, unbiased.

At checkpoints, numbers c of generated tokens, a candidate goes on with a probability that depends on what it may still
cost and contribute. All that has a chance to go on is then represented by those that did, weighted by 1 / probability.
(Monte Carlo methods call it Russian roulette.) Survival up to checkpoint c is

    S(c) = min(S(c before), max(p_min, sqrt(V(c) G(c) / (V(0) G(0))))),          at the checkpoint S(c) / S(c before).

V(c) is the expected squared advantage with baseline b, the prompt's pass rate:

    V = q (1 - b)^2 + (1 - q) b^2,        V(0) = b (1 - b),

with q its probability to end correct. Where q or b is unknown V does not change.

G(c) says how soon tokens are turned into finished trajectories. Over all further budgets it is the largest

    G(c) = max over e > c of E[g(length); length <= e | length > c] / E[min(length, e) - c | length > c],

where g is how the squared gradient of a trajectory grows with its length (`Loss`). For g = 1 it is the Gittins index of
the distribution of lengths and, with e unbounded, 1 / (expected number of tokens to come).

Why it is this: a gradient's variance is the sum of V g / S(length) over trajectories, its cost the sum of S over all
tokens that may be generated. Their product is least, among all S that do not rise, for S proportional to the square
root of the isotonic regression of V g times the hazard, which is the running minimum of V G. So if g = 1 nothing is
stopped for its length where the hazard never falls (light tails). If g is the length, G(c) is never below G(0) = 1, and
nothing is ever stopped for its length alone.

With nothing known of the prompt all candidates are kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.survival import RecentQualities

Floats = NDArray[np.float64]

RATIOS = 512
"""Quantiles that represent the distribution of lengths."""
FEWEST_LONGER = 16
"""Of these quantiles, as many must be longer than c to say something of the tail beyond it. Further out the chance to
end per token is taken to stay the same (an exponential tail), and nothing more is decided by length."""
LEAST_SHARE = 0.25
"""Least share of the trajectories that go on for which a further budget is considered: within a smaller one the chance
to end is noise."""
STEPS_PER_OCTAVE = 4
"""Checkpoints by length, while the number of tokens doubles."""
FIRST_CHECKPOINT = 0.25
"""Of the prompt's mean length."""
LEAST_RATE = 0.02
"""A pass rate of 0 or 1 would mean that nothing can be learned of the prompt, whatever the few trajectories that it was
estimated from; it is taken to be this far from both."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptForecast:
    """What is known of a prompt before its group starts.

    ``mean_length``: in tokens. ``ratios``: `RATIOS` equally likely ratios of length to mean length, ascending.
    ``pass_rate``: b. Each ``None`` while it is unknown.
    """

    mean_length: float | None = None
    ratios: Floats | None = None
    pass_rate: float | None = None

    @property
    def lengths(self) -> Floats | None:
        """Equally likely lengths in tokens, ascending; ``None`` while they are unknown."""
        return None if self.mean_length is None or self.ratios is None else self.ratios * self.mean_length


class Loss(StrEnum):
    """What the trainer's loss weighs alike, which decides how a trajectory's squared gradient grows with its length."""

    TOKEN = "token"
    """All tokens, as in the policy gradient itself: gradients of a trajectory's tokens add up like independent ones, so
    their squared sum grows in proportion to its length. On the tiny model it grows faster."""
    SEQUENCE = "sequence"
    """All trajectories: the gradients are taken to be equally large."""


@dataclass(frozen=True, slots=True)
class Roulette:
    """Parameters. ``min_survival``: p_min, which bounds a weight by 1 / p_min. ``loss``: the trainer's."""

    min_survival: float = 0.1
    loss: Loss = Loss.TOKEN
    needs_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.min_survival <= 1:
            raise ValueError(f"min_survival must be in (0, 1], got {self.min_survival}")

    def for_prompt(self, forecast: Callable[[], PromptForecast]) -> "GroupRoulette":
        """Start the roulette of one group."""
        return GroupRoulette(self, forecast())


class GroupRoulette:
    """The survival of the candidates of one group, by index. Implements `survival.SurvivalRule`."""

    def __init__(self, roulette: Roulette, forecast: PromptForecast) -> None:
        self._least = roulette.min_survival
        self._loss = roulette.loss
        self._lengths = forecast.lengths
        rate = forecast.pass_rate
        self._pass_rate = None if rate is None else min(max(rate, LEAST_RATE), 1 - LEAST_RATE)
        self._end_rates: dict[int, float] = {}  # by tokens: few, as all candidates come to the same checkpoints
        self._start = self._end_rate(0)
        self._survival: dict[int, float] = {}
        self._value: dict[int, float] = {}
        self.checkpoints = self._choose_checkpoints()
        """Numbers of tokens, ascending, at which survival falls by length alone."""

    def at_checkpoint(self, index: int, tokens: int) -> float:
        """Return the probability with which to keep a candidate that has generated ``tokens`` tokens."""
        before = self._survival.get(index, 1.0)
        value = self._value.get(index, 1.0)
        wanted = sqrt(value * self._end_rate(tokens) / self._start)
        self._survival[index] = min(before, max(self._least, wanted))
        return self._survival[index] / before

    def at_score(self, index: int, tokens: int, quality: float | None, recent: RecentQualities) -> float:
        """Return the probability with which to keep a candidate that is scored. ``quality``: q, ``None`` if unknown."""
        if quality is not None:
            self._value[index] = self._relative_value(quality)
        return self.at_checkpoint(index, tokens)

    def _relative_value(self, quality: float) -> float:
        """Return V(c) / V(0)."""
        b = self._pass_rate
        return 1.0 if b is None else (quality * (1 - b) ** 2 + (1 - quality) * b**2) / (b * (1 - b))

    def _end_rate(self, tokens: int) -> float:
        """Return G; 1 where lengths are unknown."""
        if self._lengths is None:
            return 1.0
        if (rate := self._end_rates.get(tokens)) is None:
            rate = self._end_rates[tokens] = end_rate(self._lengths, tokens, self._loss)
        return rate

    def _choose_checkpoints(self) -> tuple[int, ...]:
        if self._lengths is None:
            return ()
        mean, last = float(self._lengths.mean()), float(self._lengths[-FEWEST_LONGER])
        chosen, lowest, step = [], self._start, 0
        while (tokens := round(mean * FIRST_CHECKPOINT * 2 ** (step / STEPS_PER_OCTAVE))) <= last:
            if tokens > 0 and (rate := self._end_rate(tokens)) < lowest:
                chosen.append(tokens)
                lowest = rate
            step += 1
        return tuple(chosen)


def end_rate(lengths: Floats, tokens: int, loss: Loss = Loss.SEQUENCE) -> float:
    """Return G(``tokens``) of more than `FEWEST_LONGER` equally likely ``lengths``, ascending.

    Where fewer than `FEWEST_LONGER` are longer, it is that of the last place where so many are.
    """
    longer = lengths[lengths > tokens]
    further = longer - tokens
    if longer.size < FEWEST_LONGER:
        longer = lengths[-FEWEST_LONGER:]
        further = longer - lengths[-FEWEST_LONGER - 1]
    ended = np.arange(1, longer.size + 1)
    spent = np.maximum(np.cumsum(further) + further * (longer.size - ended), ended)  # an end takes a token at least
    gained = np.cumsum(longer) if loss is Loss.TOKEN else ended
    first = int(LEAST_SHARE * longer.size)
    return float((gained[first:] / spent[first:]).max())
