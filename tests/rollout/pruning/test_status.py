from darts_server.policy.pruning.calibration import CalibrationStatus
from darts_server.quality.types import HeadStatus
from darts_server.rollout.pruning.status import STATUS_REASONS, point_status
from darts_server.types import PruningStatus


def test_each_status_of_a_head_or_a_calibration_is_a_status_of_pruning_with_a_reason() -> None:
    for calibration in CalibrationStatus:
        assert point_status(calibration) in STATUS_REASONS
    for head in HeadStatus:
        if head is not HeadStatus.BAD_FEATURE:
            assert point_status(CalibrationStatus.READY, head) in STATUS_REASONS
    assert set(STATUS_REASONS) == set(PruningStatus)


def test_labels_that_came_before_the_first_scores_count_as_few() -> None:
    assert point_status(CalibrationStatus.NO_LABELS, HeadStatus.READY, 64) is PruningStatus.FEW_LABELS
    assert point_status(CalibrationStatus.NO_LABELS, HeadStatus.READY, 0) is PruningStatus.NO_LABELS
