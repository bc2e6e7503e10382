import pytest

from benchmarks.group_cost import POLICIES, cost_per_event


@pytest.mark.parametrize("early", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize(
    "policy", [pytest.param(each, marks=[] if each == "uniform" else pytest.mark.nightly) for each in POLICIES]
)
def test_a_group_costs_n_log_n(policy: str, early: bool) -> None:
    small, large = (min(cost_per_event(policy, size, early, seed) for seed in range(3)) for size in (16, 512))
    assert large < 8 * small, "32 times as much if each event looks at the whole group"
