"""Lengths of the data set are learned within a moment, and replaced by a restored state."""

import pytest

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Dataset
from darts_server.types import FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents

pytestmark = pytest.mark.anyio


def group(*lengths: int, version: int = 0) -> GroupRecord:
    candidates = tuple(
        CandidateRecord(k, n, FinishReason.STOP, SelectedAs.SHORT, None, False, 0.0, 1.0, version, version)
        for k, n in enumerate(lengths)
    )
    return GroupRecord("g", "p", "uniform", len(lengths), Outcome.COMPLETED, candidates, 0.0, 1.0, 0.5)


def learned(dataset: Dataset, length: int, groups: int = 3) -> Dataset:
    for version in range(groups):
        dataset.learn(group(length - 1, length + 1, version=version), None)
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


async def test_what_is_learned_does_not_depend_on_when_it_is_written() -> None:
    at_once, one_by_one = Documents(), Documents()
    together, apart = Dataset(at_once), Dataset(one_by_one)
    for version in range(40):
        for _ in range(8):
            record = group(10, 20, 40, 80, version=version)
            together.learn(record, None)
            apart.learn(record, None)
            apart.flush()
    together.flush()
    assert at_once.kept == one_by_one.kept
