"""Scores from log-probs, without training: how certain the model was of its own tokens (as DeepConf does).

They need no reward, and separate right from wrong less well than a trained head. `logprob_to_score` maps them to [0,
1], as `calibration` expects.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 64
"""In tokens: a few sentences. A detection point at some hundred tokens sees several windows."""


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Compute the mean log-prob of the tokens generated so far, in nats.

    Raises:
        ValueError: there is no token, or a log-prob is above 0 or not a number.
    """
    return float(_checked(logprobs).mean())


def lowest_window_logprob(logprobs: Sequence[float], window: int = WINDOW) -> float:
    """Compute the mean log-prob, in nats, of the ``window`` consecutive tokens with the lowest one.

    Of fewer tokens it is the mean of all.

    Raises:
        ValueError: as `mean_logprob`, or ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    x = _checked(logprobs)
    return float(np.lib.stride_tricks.sliding_window_view(x, min(window, x.size)).mean(axis=1).min())


def logprob_to_score(logprob: float) -> float:
    """Map a mean log-prob to a score in [0, 1]: its exponential, the geometric mean of the tokens' probabilities."""
    return math.exp(logprob)


def _checked(logprobs: Sequence[float]) -> NDArray[np.float64]:
    x = np.asarray(logprobs, dtype=np.float64)
    if not x.size:
        raise ValueError("logprobs must hold at least one token's")
    if not (x <= 0).all():
        raise ValueError("logprobs must be at most 0")
    return x
