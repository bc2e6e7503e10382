"""The status of pruning, as it is logged and exported."""

import logging

from darts_server.policy.pruning.calibration import CalibrationStatus
from darts_server.quality.types import HeadStatus
from darts_server.types import PruningStatus

logger = logging.getLogger(__name__)

STATUS_REASONS = {
    PruningStatus.READY: "trajectories are pruned by their probability of being correct",
    PruningStatus.UNUSED: "no trajectory was scored yet",
    PruningStatus.NO_LABELS: "no reward was reported for a scored trajectory yet",
    PruningStatus.COLD: "the first steps only learn, see --cold-steps",
    PruningStatus.FEW_LABELS: "there are too few rewards yet, see --cold-labels",
    PruningStatus.UNTRAINED: "the quality head is not trained yet",
    PruningStatus.ONE_CLASS: "all labels in memory are of correct trajectories, or all are of wrong ones",
    PruningStatus.DIVERGED: "the quality head's last training diverged and was undone",
    PruningStatus.TRAINER_LOST: "the process that trains the quality head died too often; restart the server",
    PruningStatus.PROBE_LOST: "the engine no longer sends hidden states; restart the server",
}


class StatusLog:
    """Logs each change of the status."""

    def __init__(self) -> None:
        self._last: PruningStatus | None = None

    def update(self, status: PruningStatus) -> None:
        if status is not self._last:
            neutral = "" if status is PruningStatus.READY else " and all are kept"
            # A warning, since vLLM's default logging shows nothing below of loggers other than its own.
            logger.warning("pruning by quality is %s%s: %s", status, neutral, STATUS_REASONS[status])
        self._last = status


def point_status(calibration: CalibrationStatus, head: HeadStatus | None = None, labels: int = 0) -> PruningStatus:
    """Combine the statuses of a detection point's calibration and of the head whose scores it calibrates.

    ``head``: ``None`` for scores without a head. ``labels``: those that the head's trainer has received.
    """
    if head is not None and head is not HeadStatus.READY:
        return PruningStatus(head.value)
    if head is not None and calibration is CalibrationStatus.NO_LABELS and labels:
        return PruningStatus.FEW_LABELS  # all labels are from before the head's first training, and had no score
    return PruningStatus(calibration.value)
