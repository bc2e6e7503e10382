"""The kinds of scores, what each is computed from, and the settings of scoring."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import Calibration, label_from_reward
from darts_server.policy.pruning.score_metrics import WINDOW
from darts_server.rollout.pruning.pending_labels import MAX_BYTES

LOWEST_WINDOW = 64
"""In tokens: a few sentences. A detection point at some hundred tokens sees several windows."""


class ScoreKind(StrEnum):
    """The inputs of a score: hidden states, log-probs, or both."""

    HEAD = "head"
    HEAD_LOGPROB = "head+logprob"
    LOGPROB = "logprob"
    """The mean log-prob of all tokens."""
    LOWEST_LOGPROB = "lowest_logprob"
    """The lowest mean log-prob of any `LOWEST_WINDOW` tokens in a row (the idea of DeepConf); of fewer, that of all."""

    @property
    def uses_head(self) -> bool:
        """Whether a quality head computes it, which must be trained and needs hidden states."""
        return self in (ScoreKind.HEAD, ScoreKind.HEAD_LOGPROB)


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """``detect_at``: numbers of tokens, ascending. ``kind``: of the scores. ``fallback``: kind of the scores where
    ``kind`` needs hidden states and the engine cannot provide them; ``None`` scores nothing then.
    ``reward_threshold``: a trajectory is correct if its reward reaches it; without one, ``soft`` uses the reward itself
    as target, and otherwise the trainer's ``correct`` does. ``max_bytes``: of hidden states that wait for a reward.
    ``window``: labels that metrics are taken over.
    """

    detect_at: tuple[int, ...] = (512,)
    kind: ScoreKind = ScoreKind.HEAD
    fallback: ScoreKind | None = None
    calibration: Calibration = field(default_factory=Calibration)
    reward_threshold: float | None = None
    soft: bool = False
    max_bytes: int = MAX_BYTES
    window: int = WINDOW

    def target(self, reward: float, correct: bool) -> float:
        if self.reward_threshold is None and not self.soft:
            return float(correct)
        return label_from_reward(reward, self.reward_threshold)


def head_input(kind: ScoreKind, state: NDArray[np.float32], logprobs: tuple[float, ...]) -> NDArray[np.float32]:
    """Assemble the head's input: the hidden state and, if the kind uses both, the mean and lowest log-prob, in nats.

    The two are NaN where there are no log-probs, or some are not finite.
    """
    if kind is not ScoreKind.HEAD_LOGPROB:
        return state
    usable = _usable_logprobs(logprobs)
    both = (math.nan, math.nan) if usable is None else (usable.mean(), usable.min())
    return np.append(state, np.asarray(both, dtype=np.float32))


def head_width(kind: ScoreKind, width: int) -> int:
    """Return the width of the head's input for hidden states of ``width``."""
    return width + 2 if kind is ScoreKind.HEAD_LOGPROB else width


def logprob_score(kind: ScoreKind, logprobs: tuple[float, ...]) -> float | None:
    """Compute a score in [0, 1] from log-probs; ``None`` if there are none, or some are not finite.

    It is the exponential of a mean log-prob: the geometric mean of the tokens' probabilities. It needs no reward, and
    separates right from wrong less well than a trained head.
    """
    usable = _usable_logprobs(logprobs)
    if usable is None:
        return None
    if kind is ScoreKind.LOWEST_LOGPROB:
        windows = np.lib.stride_tricks.sliding_window_view(usable, min(LOWEST_WINDOW, usable.size))
        return math.exp(windows.mean(axis=1).min())
    return math.exp(usable.mean())


def _usable_logprobs(logprobs: tuple[float, ...]) -> NDArray[np.float64] | None:
    clipped = np.minimum(np.asarray(logprobs, dtype=np.float64), 0.0)  # rounding can put a log-softmax slightly above 0
    return clipped if clipped.size and np.isfinite(clipped).all() else None
