"""Scores from log-probs, the survival that follows from qualities, and what is saved, restored and loaded again."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.survival import Pruning
from darts_server.rollout.learned.documents import Blob, BlobStore
from darts_server.rollout.pruning.scoring import (
    FIT_INTERVAL,
    HEAD_KEY,
    HEAD_SAVE_SECONDS,
    LOWEST_WINDOW,
    MAX_CURVES,
    HeadCheckpoint,
    ScoreKind,
    SurvivalEstimator,
    logprob_score,
)
from tests.rollout.helpers import Documents


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=2 * LOWEST_WINDOW))
def test_scores_are_exponentials_of_the_mean_and_of_the_lowest_mean_of_a_window(logprobs: list[float]) -> None:
    width = min(LOWEST_WINDOW, len(logprobs))
    windows = [statistics.fmean(logprobs[i : i + width]) for i in range(len(logprobs) - width + 1)]
    mean, lowest = (logprob_score(kind, tuple(logprobs)) for kind in (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB))
    assert mean == pytest.approx(math.exp(statistics.fmean(logprobs)))
    assert lowest == pytest.approx(math.exp(min(windows)))


@pytest.mark.parametrize("logprobs", [(), (-1.0, math.nan), (-1.0, -math.inf)])
def test_without_finite_log_probs_there_is_no_score(logprobs: tuple[float, ...]) -> None:
    assert logprob_score(ScoreKind.LOGPROB, logprobs) is None


def test_log_probs_that_rounding_put_above_0_count_as_0() -> None:
    assert logprob_score(ScoreKind.LOGPROB, (1e-7,)) == 1.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_head_is_saved_at_intervals_and_at_the_end() -> None:
    blobs, clock = BlobStore(Documents(), "test"), Clock()
    checkpoint = HeadCheckpoint(blobs, clock)
    checkpoint.update(b"1")
    checkpoint.update(b"2")
    checkpoint.update(b"")
    assert blobs.load(HEAD_KEY) == Blob(b"1", {})
    clock.now += HEAD_SAVE_SECONDS
    checkpoint.update(b"3")
    checkpoint.update(b"4")
    assert blobs.load(HEAD_KEY) == Blob(b"3", {})
    checkpoint.save()
    assert blobs.load(HEAD_KEY) == Blob(b"4", {})
    digest = blobs.digest(HEAD_KEY)
    checkpoint.save()
    assert blobs.digest(HEAD_KEY) == digest


def test_a_head_that_a_restore_put_into_the_store_is_loaded_and_not_overwritten() -> None:
    store, clock = Documents(), Clock()
    restored: list[bytes] = []
    checkpoint = HeadCheckpoint(BlobStore(store, "test"), clock)
    checkpoint.reload(restored.append)
    assert restored == []
    checkpoint.update(b"own")
    checkpoint.reload(restored.append)
    assert restored == []
    BlobStore(store, "test").save(HEAD_KEY, b"restored", {})
    clock.now += HEAD_SAVE_SECONDS
    checkpoint.update(b"own, later")
    checkpoint.reload(restored.append)
    checkpoint.save()
    assert restored == [b"restored"]
    assert BlobStore(store, "test").load(HEAD_KEY) == Blob(b"restored", {})
    store.kept.clear()
    checkpoint.reload(restored.append)
    assert restored[-1] == b""


def test_survival_follows_the_recent_qualities_and_the_number_of_curves_is_bounded() -> None:
    estimator, rng = SurvivalEstimator(), np.random.default_rng(0)
    assert estimator.add_quality(0.3, Pruning()) == pytest.approx(0.5), "the first is kept with the keep ratio"
    qualities = rng.random(2000)
    survivals = [estimator.add_quality(float(q), Pruning(keep_ratio=0.4)) for q in qualities]
    assert np.mean(survivals[-1000:]) == pytest.approx(0.4, abs=0.02)
    recent = np.asarray(estimator._recent)
    expected = Pruning(keep_ratio=0.4).fit(recent).survival(float(qualities[-1]))
    assert survivals[-1] == pytest.approx(expected, abs=0.02)
    for i in range(3 * MAX_CURVES):
        estimator.add_quality(0.5, Pruning(keep_ratio=0.3 + i / 1000))
    assert len(estimator._curves) == MAX_CURVES
    assert len(recent) > FIT_INTERVAL
