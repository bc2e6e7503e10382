import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest, StateDamaged, StateTooNew
from darts_server.quality.head import Head
from darts_server.quality.snapshot import CLIP, MEMORY, Standardiser, assemble_feature, pack, unpack
from darts_server.quality.types import HeadSettings, HeadStatus
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask, scorer, trained_head


def scores(head: Head) -> list[float]:
    return [scorer(head).score(hidden, 512).value for hidden, _ in SyntheticTask(seed=5).trajectories(20)]


def test_a_restored_head_scores_as_the_saved_one() -> None:
    saved = trained_head(SyntheticTask(), rounds=4)
    restored = Head(WIDTH, QUICK)
    restored.restore(saved.state())
    assert restored.status is HeadStatus.READY
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
    arrays, _ = unpack(heads[0].state())
    assert float(arrays["hidden_weight.step"]) == saved.steps + 5
    assert np.abs(arrays["hidden_weight.exp_avg"]).max() > 0


def test_a_restored_head_without_training_is_a_new_head() -> None:
    head = Head(WIDTH, QUICK)
    head.restore(Head(WIDTH, QUICK).state())
    assert head.status is HeadStatus.NO_LABELS
    assert head.state() == Head(WIDTH, QUICK).state()


@pytest.mark.parametrize("kept", [0, 10, 50, 200, 2000, -1])
def test_a_truncated_state_is_refused(kept: int) -> None:
    data = trained_head(SyntheticTask(), rounds=1).state()
    head = trained_head(SyntheticTask(seed=1), rounds=1)
    before = head.state()
    with pytest.raises(StateDamaged, match="nothing was changed"):
        head.restore(data[:kept])
    assert head.state() == before


def test_a_changed_byte_anywhere_is_detected() -> None:
    data = Head(WIDTH, QUICK).state()
    for at in range(0, len(data), 97):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((StateDamaged, StateTooNew)):
            Head(WIDTH, QUICK).restore(changed)


def test_a_pickle_is_refused_unread() -> None:
    with pytest.raises(StateDamaged, match="does not begin"):
        unpack(b"\x80\x04cos\nsystem\n(S'false'\ntR.")


def test_a_newer_format_is_not_reported_as_damage() -> None:
    with pytest.raises(StateTooNew, match="format 2"):
        unpack(pack({}, {}).replace(b"darts-quality-head 1", b"darts-quality-head 2"))


@pytest.mark.parametrize("other", [Head(WIDTH + 1, QUICK), Head(WIDTH, HeadSettings(hidden=8))])
def test_a_head_of_another_model_is_refused(other: Head) -> None:
    with pytest.raises(InvalidRequest, match="state: is of a quality head with 16 inputs and 16 hidden units"):
        other.restore(Head(WIDTH, QUICK).state())


def test_arrays_that_are_not_of_a_head_are_refused() -> None:
    arrays, numbers = unpack(Head(WIDTH, QUICK).state())
    nan, negative = dict(arrays), dict(arrays)
    nan["out_weight"] = np.full_like(arrays["out_weight"], np.nan)
    negative["variance"] = np.full_like(arrays["variance"], -1)
    lacking = {name: x for name, x in arrays.items() if name != "mean"}
    for wrong, complaint in [
        (pack({}, {}), "lacks a number"),
        (pack(arrays, {**numbers, "steps": -1}), "not integers in"),
        (pack(lacking, numbers), "other shapes"),
        (pack(nan, numbers), "not finite"),
        (pack(negative, numbers), "negative variances"),
    ]:
        with pytest.raises(StateDamaged, match=complaint):
            Head(WIDTH, QUICK).restore(wrong)


def test_a_body_that_is_not_safetensors_is_refused() -> None:
    for body in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"):
        line = b"darts-quality-head 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n"
        with pytest.raises(StateDamaged, match="cannot be read"):
            unpack(line + body)


# --- features -----------------------------------------------------------------


def test_a_feature_is_the_hidden_state_and_the_logarithm_of_its_position() -> None:
    feature = assemble_feature(np.asarray([1.0, -2.0], dtype=np.float16), 2, 512)
    assert feature is not None
    assert feature.dtype == np.float32
    assert feature.tolist() == [1.0, -2.0, 9.0]


def test_a_feature_that_is_not_finite_in_float32_is_none() -> None:
    assert assemble_feature(np.asarray([1.0, 1e39]), 2, 512) is None


@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=40))
def test_mean_and_variance_are_those_of_all_features(rows: list[tuple[float, float]]) -> None:
    standardiser = Standardiser.blank(2)
    for row in rows:
        standardiser = standardiser.after(np.asarray(row, dtype=np.float32))
    assert standardiser.mean == pytest.approx(np.mean(rows, axis=0), abs=1e-6)
    assert standardiser.variance == pytest.approx(np.var(rows, axis=0), rel=1e-6, abs=1e-6)


def test_constant_features_become_0_and_outliers_are_clipped() -> None:
    standardiser = Standardiser.blank(2)
    for x in (1.0, 3.0):
        standardiser = standardiser.after(np.asarray([x, 7.0], dtype=np.float32))
    assert standardiser.apply(np.asarray([[3.0, 7.0], [1e30, 9.0]], dtype=np.float32)).tolist() == [
        [1.0, 0.0],
        [CLIP, 0.0],
    ]


def test_old_features_lose_weight() -> None:
    standardiser = Standardiser(MEMORY, np.zeros(1), np.ones(1))
    for _ in range(5 * MEMORY):
        standardiser = standardiser.after(np.asarray([50.0], dtype=np.float32))
    assert standardiser.mean[0] == pytest.approx(50, abs=0.5)
    assert standardiser.count == MEMORY
