from typing import Any

import pytest

from darts_server.exceptions import InvalidRequest
from darts_server.group.sampled_tail import SampledTail
from darts_server.group.selection import DualEnd, InOrder
from darts_server.policy.auto import AutoLimits
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.rollout.plan import UNSHAPED, Limits, Plan, Planner
from darts_server.types import RequestOptions

POLICIES = {
    "uniform": Shaping(),
    "six tails": Shaping(num_longest=6),
    "off": Shaping(redundancy=2.0),
}
LIMITS = AutoLimits()


def planner(group_size: int | None = None, default: str = "uniform") -> Planner:
    return Planner(POLICIES, default, Limits(64, group_size))


# --- the selection rule -----------------------------------------------------------


def test_a_plan_has_the_rule_of_its_policy_and_of_its_size() -> None:
    plan = Plan("uniform", POLICIES["uniform"], 8)
    assert plan.rule is plan.rule_for(saturated=False)
    assert plan.rule == POLICIES["uniform"].selection_rule(8)
    assert plan.shrink_to(3).rule == POLICIES["uniform"].selection_rule(3)
    assert plan.shrink_to(1).rule == InOrder(1)


def test_a_group_of_a_saturated_prompt_has_the_rule_that_returns_the_shortest() -> None:
    plan = Plan("darts", Shaping(adaptive=True), 8)
    assert plan.rule == SampledTail(7, 1)
    assert plan.rule_for(saturated=True) == DualEnd(8)


def test_a_plan_cannot_have_a_size_that_its_policy_does_not_support() -> None:
    with pytest.raises(InvalidRequest, match="the tail alone takes num_longest = 6"):
        Plan("six tails", POLICIES["six tails"], 6)


# --- the number of candidates -----------------------------------------------------


def test_a_plan_gives_up_redundancy_but_never_a_trajectory() -> None:
    plan = Plan("uniform", Shaping(redundancy=2.0), 8)
    assert [plan.candidates_without_statistics(scale) for scale in (1.0, 0.5, 0.0)] == [16, 12, 8]


# --- groups of one request --------------------------------------------------------


def test_a_request_for_several_trajectories_is_a_group() -> None:
    assert planner().plan(4, RequestOptions()) == Plan("uniform", POLICIES["uniform"], 4)
    assert planner(8).plan(8, RequestOptions(policy="six tails")) == Plan("six tails", POLICIES["six tails"], 8)


@pytest.mark.parametrize("n", [1, 8])
def test_off_is_never_shaped_even_if_a_policy_has_that_name(n: int) -> None:
    assert planner(default="off").plan(n, RequestOptions()) is None
    for default in ("uniform", "off"):
        assert planner(8, default).plan(n, RequestOptions(policy="off")) is None
    assert list(planner().policy_names()) == ["off", "uniform", "six tails"]


# --- single requests ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("group_size", "options", "size"),
    [
        (8, RequestOptions(), 8),
        (8, RequestOptions(group_id="step 3"), 8),
        (8, RequestOptions(group_size=8), 8),
        (None, RequestOptions(group_size=4), 4),
        (None, RequestOptions(group_id="step 3", group_size=4), 4),
    ],
)
def test_a_single_request_joins_a_group_if_the_request_or_the_server_gives_a_size(
    group_size: int | None, options: RequestOptions, size: int
) -> None:
    assert planner(group_size).plan(1, options) == Plan("uniform", POLICIES["uniform"], size, single=True)


@pytest.mark.parametrize(
    ("group_size", "options"),
    [
        (None, RequestOptions()),
        (None, RequestOptions(prompt_key="p")),
        *((n, RequestOptions(group_size=1)) for n in (None, 8)),
    ],
)
def test_a_single_request_without_a_group_is_not_shaped(group_size: int | None, options: RequestOptions) -> None:
    assert planner(group_size).plan(1, options) is None


@pytest.mark.parametrize("default", ["off", "auto"])
def test_where_nothing_is_shaped_a_group_of_single_requests_is_only_counted(default: str) -> None:
    idle = Planner(POLICIES, default, Limits(64), LIMITS)
    counted = Plan("off", UNSHAPED, 4, single=True)
    assert idle.plan(1, RequestOptions(group_id="g", group_size=4)) == counted
    assert planner(4, "off").plan(1, RequestOptions()) == counted
    assert idle.plan(1, RequestOptions("off", group_id="g", group_size=4)) is None, "an evaluation"
    assert idle.plan(1, RequestOptions()) is None
    assert planner(4, "off").plan(1, RequestOptions(), in_batch=True) is None
    assert planner(4, "off").plan(4, RequestOptions()) is None


# --- refusals -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, "off"])
@pytest.mark.parametrize(
    ("group_size", "n", "options", "field", "message"),
    [
        (None, 8, {"group_id": "a"}, "n", "must be 1 .* joins a group, got 8; leave out the group, or n"),
        (8, 8, {"group_size": 8}, "n", "must be 1 for a request that joins a group, got 8"),
        (None, 1, {"group_id": "a"}, "group size", "is unknown for group 'a'; add size=INT"),
        (None, 1, {"group_size": 65}, "group size", "must be at most 64, got 65; lower it"),
        (65, 1, {}, "group size", "at most 64, got 65"),
        (None, 65, {}, "n", "must be at most 64, got 65; lower it"),
    ],
)
def test_contradictory_options_are_refused_under_every_policy(
    policy: str | None, group_size: int | None, n: int, options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        planner(group_size).plan(n, RequestOptions(policy, **options))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("group_size", "n", "options", "field", "message"),
    [
        (8, 4, RequestOptions(), "n", r"must be 8, the size of .* \(--group-size\), got 4; request that many, or use"),
        (8, 1, RequestOptions(group_size=4), "group size", r"must be 8, the size of .* \(--group-size\), got 4"),
        (None, 4, RequestOptions("six tails"), "n", "n must be larger than that, got 4"),
        (None, 8, RequestOptions("sideways"), "policy", "'sideways' is unknown; choose one of off, uniform, six tails"),
        (None, 1, RequestOptions("sideways"), "policy", "'sideways' is unknown"),
    ],
)
def test_unsupported_sizes_are_refused_and_off_is_always_available(
    group_size: int | None, n: int, options: RequestOptions, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        planner(group_size).plan(n, options)
    assert refused.value.field == field
    assert planner(group_size).plan(n, RequestOptions("off", group_size=options.group_size)) is None


# --- groups that got fewer requests -----------------------------------------------


@pytest.mark.parametrize(
    ("plan", "size", "shrunk"),
    [
        (Plan("uniform", POLICIES["uniform"], 8, single=True), 3, Plan("uniform", POLICIES["uniform"], 3, single=True)),
        (
            Plan("six tails", POLICIES["six tails"], 8, single=True),
            8,
            Plan("six tails", POLICIES["six tails"], 8, single=True),
        ),
        (Plan("six tails", POLICIES["six tails"], 8, single=True), 5, Plan("six tails", UNSHAPED, 5, single=True)),
        (Plan("auto", UNSHAPED, 8, True, LIMITS), 2, Plan("auto", UNSHAPED, 2, True, LIMITS)),
        (Plan("auto", UNSHAPED, 8, True, LIMITS), 1, Plan("auto", UNSHAPED, 1, True)),
    ],
)
def test_a_group_with_missing_requests_is_shaped_by_its_actual_size_if_the_policy_supports_it(
    plan: Plan, size: int, shrunk: Plan
) -> None:
    assert plan.shrink_to(size) == shrunk


@pytest.mark.parametrize("shaping", [Shaping(), Shaping(num_longest=0, adaptive=True), Shaping(deadline=Deadline())])
def test_one_request_alone_is_never_shaped(shaping: Shaping) -> None:
    assert Plan("any", shaping, 8, single=True).shrink_to(1) == Plan("any", UNSHAPED, 1, single=True)
