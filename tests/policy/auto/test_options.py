from dataclasses import replace

import pytest

from darts_server.policy.auto.options import RULES, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping

ALL = AutoLimits(allow=RULES)
BASE = Shaping()
CAPS = ["cap at 0.8", "cap at 0.9", "limit 0.02", "limit 0.05", "limit 0.1", "limit 0.2"]
"""Options that start no more candidates than they return."""


def names(limits: AutoLimits = ALL, base: Shaping = BASE) -> list[str]:
    return [option.name for option in build_auto(base, Deadline(), limits).options]


def test_only_allowed_rules_are_options() -> None:
    for rule in RULES:
        found = names(AutoLimits(allow=(rule,)))
        assert found[0] == "off"
        assert {name.partition(" ")[0] for name in found[1:]} == {rule}
    assert sorted(names()) == sorted({"off", *(name for rule in RULES for name in names(AutoLimits(allow=(rule,))))})


def test_no_option_starts_more_candidates_than_the_maximum() -> None:
    assert names(base=Shaping(redundancy=1.0, max_redundancy=1.0)) == ["off", *CAPS]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, []),
        (1.05, [1.05]),
        (2.0, [1.25, 1.5, 2.0]),
        (2.1, [1.25, 1.5, 2.1]),
        (16.0, [1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]),
    ],
)
def test_redundancies_go_up_to_the_maximum(most: float, expected: list[float]) -> None:
    auto = build_auto(Shaping(max_redundancy=most), Deadline(), AutoLimits(allow=("uniform", "darts")))
    assert auto.max_candidates(8) == max(8, round(8 * most))
    assert [option.name for option in auto.options] == [
        "off",
        *(f"uniform {each}" for each in expected),
        *(f"darts {each}" for each in expected[:-1]),
    ]


def test_each_option_is_its_rule_with_its_own_redundancy_and_quantile() -> None:
    shapings = {option.name: option.shaping for option in build_auto(Shaping(), Deadline(bound=3.0), ALL).options}
    cut, cap = shapings["cut 1.25 at 0.8"], shapings["cap at 0.9"]
    assert cut is not None
    assert (cut.candidates(8), cut.adaptive, cut.deadline) == (10, False, Deadline(0.8, bound=3.0))
    assert cap is not None
    assert (cap.candidates(8), cap.completion_share) == (8, 1 / 1.5)
    uniform, darts = shapings["uniform 2.0"], shapings["darts 1.5"]
    assert uniform is not None
    assert (uniform.candidates(8), uniform.adaptive, uniform.deadline) == (16, False, None)
    assert darts is not None
    assert darts.adaptive


def test_a_limit_ends_every_trajectory_at_its_length() -> None:
    options = {option.name: option for option in build_auto(BASE, Deadline(bound=3.0, stretch=1.5), ALL).options}
    shaping = options["limit 0.1"].at(100).shaping
    assert shaping is not None
    assert shaping.candidates(8) == 8
    assert shaping.deadline == Deadline(bound=1.0, stretch=1.5, tokens=100)
    assert (shaping.deadline.fixed, shaping.deadline.bound_of(150)) == (150, 150)


def test_options_that_do_not_support_the_size_are_left_out() -> None:
    auto = build_auto(Shaping(num_longest=4), Deadline(), ALL)
    assert [option.name for option in auto.of_size(4)] == ["off", *CAPS]
    assert auto.of_size(8) == list(auto.options)


def test_deadlines_can_be_moved_later_in_all_options_that_have_one() -> None:
    auto = build_auto(Shaping(), Deadline(), ALL)
    stretches = {option.name: 2.0 + number for number, option in enumerate(auto.options)}

    def later_rule(shaping: Shaping, option: str) -> Deadline | None:
        return shaping.deadline and replace(shaping.deadline, stretch=stretches[option])

    later = auto.with_deadlines(later_rule)
    for before, after in zip(auto.options, later.options, strict=True):
        if before.shaping is not None and before.shaping.deadline is not None:
            deadline = replace(before.shaping.deadline, stretch=stretches[before.name])
            assert after == replace(before, shaping=replace(before.shaping, deadline=deadline))
        else:
            assert after == before
