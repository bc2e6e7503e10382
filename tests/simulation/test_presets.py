"""Machines computed from public figures, against what was measured."""

import pytest

from darts_server.simulation import presets


def test_a_decode_step_of_an_8b_model_on_an_h200_takes_about_as_long_as_reading_its_weights() -> None:
    machine = presets.machine(presets.QWEN_8B, presets.H200, 1, 1, 0.0)
    assert 0.004 < machine.step_time.decode.step_seconds(1) < 0.007


def test_a_card_with_little_arithmetic_bends_early() -> None:
    slow, fast = (presets.machine(presets.QWEN_32B, gpu, 8, 1, 0.0) for gpu in (presets.H20, presets.H200))
    assert slow.step_time.decode.batches[1] < fast.step_time.decode.batches[1] / 4
    assert slow.step_time.decode.step_seconds(256) > 2 * fast.step_time.decode.step_seconds(256)


def test_twice_the_engines_train_twice_as_fast() -> None:
    one = presets.machine(presets.QWEN_7B, presets.H100, 1, 4, 1.0)
    two = presets.with_engines(one, 8)
    assert (two.replicas, two.training_per_token, two.between_rollouts) == (8, one.training_per_token / 2, 1.0)


def test_kv_blocks_fill_what_the_weights_leave() -> None:
    machine = presets.machine(presets.QWEN_32B, presets.H100, 4, 1, 0.0)
    assert machine.kv_blocks is not None
    bytes_used = machine.kv_blocks * 16 * (2 * 64 * 8 * 128 * 2) + 32.8e9 * 2
    assert bytes_used == pytest.approx(0.9 * 80e9 * 4, rel=0.01)
