"""How trajectories are judged, and what is said of it."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from darts_server.policy.pruning.calibration import Calibration, label_from_reward
from darts_server.policy.pruning.logprob_scores import logprob_to_score, lowest_window_logprob, mean_logprob
from darts_server.quality.evaluation import WINDOW
from darts_server.rollout.pruning.pending_labels import MOST_BYTES
from darts_server.types import PruningStatus

STATUS_REASONS = {
    PruningStatus.READY: "trajectories are pruned by their chance to end correct",
    PruningStatus.UNUSED: "no trajectory was scored yet",
    PruningStatus.NO_LABELS: "no reward was reported for a scored trajectory yet",
    PruningStatus.COLD: "it learns in its first steps, see --cold-steps",
    PruningStatus.FEW_LABELS: "rewards are still too few, see --cold-labels",
    PruningStatus.UNTRAINED: "the quality head is not trained yet",
    PruningStatus.ONE_CLASS: "all rewarded trajectories that are remembered are right, or all are wrong",
    PruningStatus.DIVERGED: "the quality head's last training went wrong and was undone",
    PruningStatus.TRAINER_LOST: "the process that trains the quality head died too often; restart the server",
    PruningStatus.PROBE_LOST: "the engine does not tell hidden states any more; restart the server",
}


class ScoreKind(StrEnum):
    """What scores are made from: hidden states, log-probs, or both; of all tokens, or of those it was least sure of."""

    HEAD = "head"
    HEAD_LOGPROB = "head+logprob"
    LOGPROB = "logprob"
    LOWEST_LOGPROB = "lowest_logprob"

    @property
    def trained(self) -> bool:
        """Whether a head makes them, which has to be trained and is told hidden states."""
        return self in (ScoreKind.HEAD, ScoreKind.HEAD_LOGPROB)


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """``detect_at``: numbers of tokens, ascending. ``kind``: of score. ``fallback``: what is used where ``kind`` needs
    the head, and the engine cannot tell hidden states; ``None`` scores nothing then. ``reward_threshold``: rewards from
    it on are right; without one, ``soft`` takes the reward itself for the target, and else the trainer's word counts.
    ``most_bytes``: of hidden states that wait for a reward. ``window``: labels that figures are taken over.
    """

    detect_at: tuple[int, ...] = (512,)
    kind: ScoreKind = ScoreKind.HEAD
    fallback: ScoreKind | None = None
    calibration: Calibration = field(default_factory=Calibration)
    reward_threshold: float | None = None
    soft: bool = False
    most_bytes: int = MOST_BYTES
    window: int = WINDOW

    def target(self, reward: float, correct: bool) -> float:
        if self.reward_threshold is None and not self.soft:
            return float(correct)
        return label_from_reward(reward, self.reward_threshold)


def features(kind: ScoreKind, state: NDArray[np.float32], logprobs: tuple[float, ...]) -> NDArray[np.float32]:
    """What the head sees: the hidden state and, if scores are made from both, the mean and the least log-prob, in nats.

    Where log-probs are no finite numbers, or there is none, these are not finite either.
    """
    if kind is not ScoreKind.HEAD_LOGPROB:
        return state
    rounded = _rounded(logprobs)
    both = (math.nan, math.nan) if rounded is None else (mean_logprob(rounded), min(rounded))
    return np.append(state, np.asarray(both, dtype=np.float32))


def width_of(kind: ScoreKind, width: int) -> int:
    """Of what the head sees, for hidden states of that width."""
    return width + 2 if kind is ScoreKind.HEAD_LOGPROB else width


def logprob_score(kind: ScoreKind, logprobs: tuple[float, ...]) -> float | None:
    """A score of that kind, in [0, 1]; ``None`` if the log-probs are no finite numbers, or there is none."""
    rounded = _rounded(logprobs)
    if rounded is None:
        return None
    return logprob_to_score(
        lowest_window_logprob(rounded) if kind is ScoreKind.LOWEST_LOGPROB else mean_logprob(rounded)
    )


def _rounded(logprobs: tuple[float, ...]) -> list[float] | None:
    rounded = [min(x, 0.0) for x in logprobs]  # a log-softmax may round to just above 0
    return rounded if rounded and all(map(math.isfinite, rounded)) else None
