"""The engine's step times are learned, kept, and replaced by a restored state."""

import pytest

from darts_server.rollout.learned.latency import Latency
from tests.rollout.helpers import Documents

pytestmark = pytest.mark.anyio


def taught(latency: Latency, step: float, start: float = 0.002) -> Latency:
    """Steps that all take equally long, and some in which four candidates start."""
    for batch in (4, 16, 64):
        for _ in range(64):
            latency.observe(batch, step)
    for _ in range(20):
        latency.observe(16, step + 4 * start, 4)
    return latency


async def test_step_times_and_starts_are_known_after_a_restart() -> None:
    documents = Documents()
    taught(Latency(documents), 0.01).flush()
    latency = Latency(documents)
    assert latency.step_seconds(16) == pytest.approx(0.01)
    assert latency.start_seconds == pytest.approx(0.002)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_restored_state_replaces_what_was_learned_and_is_not_overwritten(*, reads: bool) -> None:
    documents = Documents()
    taught(Latency(documents), 0.01).flush()
    saved = dict(documents.kept)
    latency = taught(Latency(documents), 5.0, 1.0)
    assert latency.step_seconds(16) == pytest.approx(5.0)
    documents.restore(saved)
    if reads:
        assert latency.step_seconds(16) == pytest.approx(0.01)
        assert latency.start_seconds == pytest.approx(0.002)
    latency.flush()  # steps from before the restore were still to be written
    assert documents.kept == saved
    latency.observe(16, 0.01)
    latency.flush()
    assert documents.kept != saved
    assert latency.step_seconds(16) == pytest.approx(0.01)
