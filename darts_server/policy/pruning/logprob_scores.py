"""Scores without training: how sure the model was of its own tokens (the idea of DeepConf).

They need no reward, and tell right from wrong less well than a trained head does. `as_score` puts them in [0, 1], where
`calibration` takes them.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

WINDOW = 64
"""Tokens: some sentences. A detection point of some hundred tokens has several of them."""


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Mean log-prob of the tokens generated so far, in nats.

    Raises:
        ValueError: there is no token, or a log-prob is above 0 or not a number.
    """
    return float(_checked(logprobs).mean())


def lowest_window_logprob(logprobs: Sequence[float], window: int = WINDOW) -> float:
    """Mean log-prob, in nats, of the ``window`` tokens in a row that the model was least sure of.

    Of fewer tokens it is their mean.

    Raises:
        ValueError: as `mean_logprob`, or ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    x = _checked(logprobs)
    return float(np.lib.stride_tricks.sliding_window_view(x, min(window, x.size)).mean(axis=1).min())


def logprob_to_score(logprob: float) -> float:
    """A mean log-prob as a score in [0, 1]: its exponential, the geometric mean of the tokens' probabilities."""
    return math.exp(logprob)


def _checked(logprobs: Sequence[float]) -> NDArray[np.float64]:
    x = np.asarray(logprobs, dtype=np.float64)
    if not x.size:
        raise ValueError("logprobs must hold at least one token's")
    if not (x <= 0).all():
        raise ValueError("logprobs must be at most 0")
    return x
