"""The curves of docs/scaling.md, on the tiny preset."""

from dataclasses import replace

import pytest

from benchmarks.scaling import COMPARED, CURVES, Curve, speedups
from darts_server.simulation.presets import PRESETS

TINY = replace(PRESETS["tiny"], prompts=10)


def test_each_compared_policy_has_a_speedup() -> None:
    found = speedups(TINY)
    assert found.keys() == COMPARED.keys()
    assert all(0.2 < value < 10 for value in found.values())


@pytest.mark.parametrize("curve", CURVES)
def test_a_curve_changes_one_thing(curve: Curve) -> None:
    presets = list(curve.presets(TINY))
    assert len({repr((preset.machine, preset.prompts, preset.workload)) for _, preset in presets}) == len(presets)
