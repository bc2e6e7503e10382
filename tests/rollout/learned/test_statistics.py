"""Lengths of the data set and step times are learned within a moment, kept, and replaced by a restored state."""

import pytest

from darts_server.estimates.lengths import Observation, estimate_lengths
from darts_server.rollout.learned.statistics import Dataset, Latency
from tests.rollout.helpers import Documents

pytestmark = pytest.mark.anyio


def learned(dataset: Dataset, length: int, groups: int = 3) -> Dataset:
    for version in range(groups):
        observed = [Observation(length - 1), Observation(length + 1)]
        dataset.learn(observed, estimate_lengths(observed), version, None)
    return dataset


async def test_groups_that_ended_before_a_restore_are_not_written_into_the_restored_state() -> None:
    documents = Documents()
    learned(Dataset(documents), 100).flush()
    saved = dict(documents.kept)
    dataset = learned(Dataset(documents), 900)  # not written yet
    documents.restore(saved)
    dataset.flush()
    assert documents.kept == saved
    assert dataset.stats.mean == pytest.approx(100)


async def test_groups_that_end_after_a_restore_are_learned_without_those_before() -> None:
    documents = Documents()
    dataset = learned(Dataset(documents), 900)
    documents.restore({})
    learned(dataset, 100, groups=4)
    assert dataset.stats.mean == pytest.approx(100)
    assert dataset.stats.steps == 3  # the fourth goes on


async def test_learned_values_do_not_depend_on_the_time_of_writing() -> None:
    at_once, one_by_one = Documents(), Documents()
    together, apart = Dataset(at_once), Dataset(one_by_one)
    for version in range(6):
        for _ in range(8):
            observed = [Observation(tokens) for tokens in (10, 20, 40, 80)]
            estimate = estimate_lengths(observed)
            together.learn(observed, estimate, version, None)
            apart.learn(observed, estimate, version, None)
            apart.flush()
    together.flush()
    assert at_once.kept == one_by_one.kept


# --- step times ----------------------------------------------------------------


def taught(latency: Latency, step: float, start: float = 0.002) -> Latency:
    """Steps that all take equally long, and some in which four candidates start."""
    for batch in (4, 16, 64):
        for _ in range(64):
            latency.observe(batch, step)
    for _ in range(20):
        latency.observe(16, step + 4 * start, 4)
    return latency


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
