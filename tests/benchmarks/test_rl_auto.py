"""The last table of `benchmarks.rl`: whether `auto` is as fast as it must be."""

import pytest

from benchmarks.rl_auto import auto_table, best, compare
from benchmarks.rl_methods import AUTOS, SETTINGS, STARTS, choices, fixed, methods
from darts_server.control import Control
from darts_server.policy.auto.options import RULES
from darts_server.settings import load
from darts_server.types import RequestOptions
from examples.tiny_rl.train_log import Entry
from tests.benchmarks.test_rl import trained

RIGHT = [0.5, 0.7, 0.9, 0.94]
Runs = dict[str, dict[int, list[Entry]]]


def runs(**seconds: float) -> Runs:
    """Two seeds of policies that are equally right, with these seconds a step; ten decode steps for each second."""
    return {
        name.replace("_and_", ", ").replace("__", " "): {
            seed: trained(RIGHT, tokens=round(100 * each), seconds=each) for seed in range(2)
        }
        for name, each in seconds.items()
    }


def test_auto_is_compared_with_off_with_the_best_of_its_rules_and_with_the_best_of_all() -> None:
    made = runs(off=2.0, uniform=1.8, darts=1.9, cap=1.0, auto=1.5)
    found = compare("deep", made, "auto", "median step")
    each = (found.with_off, found.with_own, found.with_any)
    assert [ratio.other for ratio in each] == ["off", "uniform", "cap"]
    assert [ratio.median for ratio in each] == pytest.approx([0.75, 1.5 / 1.8, 1.5])
    assert str(found) == "0.75 [0.75, 0.75]; 0.83 [0.83, 0.83] of uniform; 1.50 [1.50, 1.50] of cap"


def test_a_policy_that_is_certainly_less_right_is_not_the_best() -> None:
    made = runs(off=2.0, uniform=1.8, auto=1.5)
    made["cap"] = dict.fromkeys(range(2), trained([0.5, 0.7, 0.8, 0.84], seconds=0.5))
    assert best(made, fixed("deep"), "all steps") == "uniform"
    made["cap"] = dict.fromkeys(range(2), trained([0.5, 0.7, 0.8, 0.95], seconds=0.5))
    assert best(made, fixed("deep"), "all steps") == "cap"


def test_off_is_the_best_where_nothing_is_faster() -> None:
    made = runs(off=2.0, uniform=2.5, auto=2.0)
    assert compare("deep", made, "auto", "decode steps").with_any.other == "off"


def test_what_auto_spends_to_learn_is_in_all_steps_and_not_in_the_median() -> None:
    made = runs(off=2.0)
    slow_first = trained(RIGHT, seconds=2.0)
    slow_first[1:2] = trained(RIGHT, seconds=12.0)[1:2]
    made["auto"] = dict.fromkeys(range(2), slow_first)
    assert compare("deep", made, "auto", "median step").with_off.median == pytest.approx(1.0)
    assert compare("deep", made, "auto", "all steps").with_off.median == pytest.approx((12 + 5 * 2) / 12)


def test_bounds_hold_only_from_every_start_and_the_worst_is_named() -> None:
    fast, slow = runs(off=2.0, uniform=1.0, auto=1.05), runs(off=2.0, uniform=1.5, auto=2.1)
    text = auto_table({"deep": fast, "mixed": slow})
    assert text is not None
    assert "| deep | auto | +0.000 ± 0.000 | 0.53 [0.53, 0.53]; 1.05 [1.05, 1.05] of uniform;" in text
    assert (
        "auto, median step: at most 1.02 of off: no (1.050 from mixed); at most 1.08 of the best of its rules: no"
        in text
    )
    assert "auto, median step: at most 1.02 of off: yes (0.525 from deep)" in (auto_table({"deep": fast}) or "")


def test_an_auto_that_is_less_right_is_named() -> None:
    made = runs(off=2.0)
    made["auto"] = dict.fromkeys(range(2), trained([0.5, 0.7, 0.8, 0.84], seconds=0.5))
    assert (auto_table({"deep": made}) or "").endswith("auto, certainly less right than off: deep.")


def test_there_is_no_table_without_auto() -> None:
    assert auto_table({"deep": runs(off=2.0)}) is None
    assert auto_table({}) is None


def test_auto_is_compared_with_policies_that_are_run() -> None:
    for start in STARTS:
        for auto in AUTOS:
            assert set(choices(auto, start)) <= methods(start).keys()
        assert set(fixed(start)) <= methods(start).keys() - AUTOS.keys()
        assert {"off", "uniform", "darts_cut", "cap, lost 0.1", *SETTINGS} <= set(fixed(start))
        assert not {"off, overlong", "off, tail batching", "uniform, unbiased"} & set(fixed(start))


@pytest.mark.parametrize("name", [name for name, of in methods("deep").items() if not isinstance(of.policy, str)])
def test_settings_of_a_policy_are_ones_that_a_request_may_change(name: str) -> None:
    policy = methods("deep")[name].policy
    assert not isinstance(policy, str)
    planner = Control(load({}, None)).new_planner(policy)
    assert planner.default_policy == policy["name"]
    plan = planner.plan(8, RequestOptions())
    assert plan is not None
    if name == "auto, all rules":
        assert plan.auto is not None
        assert plan.auto.limits.allow == RULES
    if name == "auto, any bias":
        assert plan.auto is not None
        assert plan.auto.limits.most_bias == 1.0
    if name == "cap, lost 0.1":
        assert plan.shaping.deadline is not None
        assert plan.shaping.deadline.max_lost.answers == 0.1
