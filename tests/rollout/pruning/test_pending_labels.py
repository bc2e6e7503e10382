import numpy as np

from darts_server.policy.pruning.calibration import Calibration
from darts_server.rollout.learned.documents import BlobStore
from darts_server.rollout.pruning.checkpoints import DetectionPoint
from darts_server.rollout.pruning.pending_labels import PendingLabels, PendingScore, compact
from tests.rollout.helpers import Documents


def test_hidden_states_are_stored_at_half_precision_if_their_values_fit() -> None:
    assert compact(np.asarray([1.5, -2.0], np.float32)).dtype == np.float16
    wide = np.asarray([1.5, 1e6], np.float32)
    assert compact(wide).dtype == np.float32
    assert compact(wide).tolist() == wide.tolist()


def test_memory_is_bounded_and_released() -> None:
    point = DetectionPoint(BlobStore(Documents(), "test"), "head@10", Calibration(), 100)
    pending = PendingLabels(10_000)
    dropped = sum(
        pending.add((None, f"g{i}"), 0, PendingScore(point, 10, np.zeros(100, np.float16))) for i in range(50)
    )
    assert (len(pending), dropped) == (14, 36)
    for i in range(50):
        pending.pop((None, f"g{i}"), 0)
    assert pending._bytes == len(pending) == 0
    assert pending.add((None, "large"), 0, PendingScore(point, 10, np.zeros(100_000, np.float16))) == 0
    assert pending.find((None, "large"), 0) is not None
