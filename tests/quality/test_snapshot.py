import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from darts_server.exceptions import InvalidRequest, StateDamaged
from darts_server.quality.head import Head
from darts_server.quality.snapshot import CLIP, MEMORY, Floats, Single, Snapshot, Standardiser, assemble_feature
from darts_server.quality.types import HeadSettings
from darts_server.types import PruningStatus
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask, scorer, trained_head

STATE = Head(WIDTH, QUICK).state()
FIRST_LINE = STATE[: STATE.index(b"\n") + 1]


def changed(name: str, values: Floats | Single) -> bytes:
    """The state of a new head with other values in one of its arrays."""
    body = STATE[len(FIRST_LINE) :]
    metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
    return FIRST_LINE + safetensors.save({**safetensors.load(body), name: values}, metadata)


def scores(head: Head) -> list[float]:
    return [scorer(head).score(hidden, 512).value for hidden, _ in SyntheticTask(seed=5).trajectories(20)]


def test_a_restored_head_scores_as_the_saved_one() -> None:
    saved = trained_head(SyntheticTask(), rounds=4)
    restored = Head(WIDTH, QUICK)
    restored.restore(saved.state())
    assert restored.status is PruningStatus.READY
    assert scores(restored) == scores(saved)
    assert restored.steps == saved.steps
    assert restored.state() == saved.state()


def test_a_restored_head_continues_with_the_saved_optimiser() -> None:
    """The examples and their order are the same, so only a lost optimiser could cause a difference."""
    saved = trained_head(SyntheticTask(), rounds=1)
    heads = [Head(WIDTH, QUICK), Head(WIDTH, QUICK)]
    for head in heads:
        head.restore(saved.state())
        for hidden, target in SyntheticTask(seed=2).trajectories(64):
            head.learn(hidden, 512, target)
        head.train(5)
    assert heads[0].state() == heads[1].state()
    arrays = Snapshot.from_bytes(heads[0].state(), WIDTH, QUICK.hidden).arrays
    assert float(arrays["hidden_weight.step"]) == saved.steps + 5
    assert np.abs(arrays["hidden_weight.exp_avg"]).max() > 0


def test_a_restored_head_without_training_is_a_new_head() -> None:
    head = Head(WIDTH, QUICK)
    head.restore(Head(WIDTH, QUICK).state())
    assert head.status is PruningStatus.NO_LABELS
    assert head.state() == Head(WIDTH, QUICK).state()


@pytest.mark.parametrize(
    ("data", "error", "complaint"),
    [
        (b"", StateDamaged, "does not begin"),
        # A pickle.
        (b"\x80\x04cos\nsystem\n(S'false'\ntR.", StateDamaged, "does not begin"),
        (STATE[:200], StateDamaged, "cannot be read"),
        (STATE[:-1], StateDamaged, "cannot be read"),
        *((FIRST_LINE + body, StateDamaged, "cannot be read") for body in (b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]")),
        (STATE.replace(b"head 1", b"head 2", 1), StateDamaged, "of format 1"),
        (STATE.replace(b'steps\\": 0', b'steps\\":-1'), StateDamaged, "negative"),
        (Head(WIDTH + 1, QUICK).state(), InvalidRequest, "state: is of a quality head with 17 inputs and 16 hidden"),
        (Head(WIDTH, HeadSettings(hidden=8)).state(), InvalidRequest, "with 16 inputs and 8 hidden"),
        (changed("mean", np.zeros(3)), StateDamaged, "other shapes"),
        (changed("variance", np.full(WIDTH + 1, -1.0)), StateDamaged, "negative variances"),
        (changed("out_weight", np.full((1, 16), np.nan, np.float32)), StateDamaged, "not finite"),
        (changed("out_weight", np.full((1, 16), 1e7, np.float32)), StateDamaged, "weights above"),
    ],
)
def test_a_state_that_is_no_head_of_this_model_is_refused(data: bytes, error: type[Exception], complaint: str) -> None:
    head = trained_head(SyntheticTask(seed=1), rounds=1)
    before = head.state()
    with pytest.raises(error, match=complaint):
        head.restore(data)
    assert head.state() == before


# --- features -----------------------------------------------------------------


def test_a_feature_is_the_hidden_state_and_the_logarithm_of_its_position() -> None:
    feature = assemble_feature(np.asarray([1.0, -2.0], dtype=np.float16), 512)
    assert feature is not None
    assert feature.dtype == np.float32
    assert feature.tolist() == [1.0, -2.0, 9.0]
    assert assemble_feature(np.asarray([1.0, 1e39]), 2) is None, "it is not finite in float32"


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=40))
def test_mean_and_variance_are_those_of_all_features(rows: list[tuple[float, float]]) -> None:
    standardiser = Standardiser.blank(2)
    for row in rows:
        standardiser = standardiser.with_feature(np.asarray(row, dtype=np.float32))
    assert standardiser.mean == pytest.approx(np.mean(rows, axis=0), abs=1e-6)
    assert standardiser.variance == pytest.approx(np.var(rows, axis=0), rel=1e-6, abs=1e-6)


def test_constant_features_become_0_and_outliers_are_clipped() -> None:
    standardiser = Standardiser.blank(2)
    for x in (1.0, 3.0):
        standardiser = standardiser.with_feature(np.asarray([x, 7.0], dtype=np.float32))
    assert standardiser.apply(np.asarray([[3.0, 7.0], [1e30, 9.0]], dtype=np.float32)).tolist() == [
        [1.0, 0.0],
        [CLIP, 0.0],
    ]


def test_old_features_lose_weight() -> None:
    standardiser = Standardiser(MEMORY, np.zeros(1), np.ones(1))
    for _ in range(5 * MEMORY):
        standardiser = standardiser.with_feature(np.asarray([50.0], dtype=np.float32))
    assert standardiser.mean[0] == pytest.approx(50, abs=0.5)
    assert standardiser.count == MEMORY
