from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from darts_server.control import Control, make_planner
from darts_server.exceptions import InvalidRequest, InvalidSetting
from darts_server.offline.simulation.policies import NAMES
from darts_server.policy.auto import AutoLimits
from darts_server.policy.shaping import BudgetKind, Shaping, Tail
from darts_server.policy.survival import Pruning
from darts_server.rollout.plan import Limits, Planner
from darts_server.settings import load
from darts_server.types import POLICIES, MaxLost, RequestOptions


def shaping(planner: Planner, policy: str) -> Shaping:
    found = planner.shaping(policy)
    assert found is not None
    return found


def test_the_planner_follows_the_settings() -> None:
    flags = {"redundancy": "2", "num_longest": "3", "tail": "longest", "group_size": "16", "policy": "off"}
    planner = make_planner(load(flags, None))
    uniform = shaping(planner, "uniform")
    assert (uniform.redundancy, uniform.num_longest) == (2, 3)
    assert uniform.tail is Tail.LONGEST
    assert [shaping(planner, name).adaptive for name in ("uniform", "darts")] == [False, True]
    assert (planner.default_policy, planner.limits) == ("off", Limits(group_size=16))
    assert make_planner(load({"group_pattern": "(.+)_[0-9]+"}, None)).limits.group_name_of_session("17_3") == "17"


def test_auto_has_the_limits_of_the_settings() -> None:
    planner = make_planner(load({"policy": "auto", "most_stale": "0.3", "exploration": "0.2"}, None))
    plan = planner.plan(8, RequestOptions(), in_batch=True)
    assert plan is not None
    assert plan.auto == AutoLimits(most_stale=0.3, exploration=0.2)
    assert planner.plan(8, RequestOptions()) is None, "other requests run as under off"


@pytest.mark.anyio
async def test_a_change_reaches_the_rollouts_with_all_settings_in_force() -> None:
    control = Control(load({"num_longest": "2"}, None))
    room: Any = SimpleNamespace(planner=control.planner)
    control.connect(room)
    assert await control.change({"redundancy": 3.0, "policy": "off"}) == control.current_settings()
    assert room.planner is control.planner
    uniform = shaping(room.planner, "uniform")
    assert (uniform.redundancy, uniform.num_longest, room.planner.default_policy) == (3, 2, "off")


@pytest.mark.anyio
async def test_speculation_is_changed_in_the_engines_and_shown() -> None:
    control = Control(load({"speculate": "auto"}, None))
    calls: list[bool] = []

    async def speculate(is_on: bool) -> None:
        calls.append(is_on)

    room: Any = SimpleNamespace(planner=control.planner)
    control.connect(room, speculate)
    assert control.current_settings()["speculate"] == "auto"
    for value in ("off", "off", "auto"):
        assert (await control.change({"speculate": value}))["speculate"] == value
    await control.change({"redundancy": 1.0})
    assert calls == [False, True]


@pytest.mark.anyio
async def test_a_server_without_a_drafter_cannot_speculate_later() -> None:
    control = Control(load({}, None))
    with pytest.raises(InvalidRequest, match="start the server with --speculate auto") as refused:
        await control.change({"speculate": "auto", "policy": "off"})
    assert refused.value.field == "speculate"
    assert control.current_settings()["policy"] == "auto", "nothing was changed"
    assert (await control.change({"speculate": "off"}))["speculate"] == "off"


def test_speculation_is_not_changed_for_a_batch() -> None:
    control = Control(load({"speculate": "auto"}, None))
    with pytest.raises(InvalidRequest, match="PATCH /darts/v1/policy"):
        control.new_planner({"speculate": "off"})


@pytest.mark.anyio
async def test_pruning_follows_the_settings_and_their_changes() -> None:
    control = Control(load({"keep_ratio": "0.4"}, None))
    arrol = shaping(control.planner, "arrol")
    assert arrol.pruning == Pruning(keep_ratio=0.4)
    names = control.planner.policy_names()[1:]
    assert [name for name in names if shaping(control.planner, name).prunes] == ["arrol", "darts+arrol"]
    await control.change({"keep_ratio": 0.25})
    changed = shaping(control.planner, "arrol")
    assert changed.pruning == Pruning(keep_ratio=0.25)
    assert changed.candidates(8) == 32


@pytest.mark.parametrize("keep_ratio", ["0.1", "0.9", "1"])
def test_every_keep_ratio_that_the_settings_allow_can_be_used(keep_ratio: str) -> None:
    pruning = shaping(Control(load({"keep_ratio": keep_ratio}, None)).planner, "arrol").pruning
    assert pruning is not None
    assert pruning.prunes == (keep_ratio != "1")


def test_redundancy_auto_is_the_papers_formula_and_starts_with_the_default() -> None:
    control = Control(load({"redundancy": "auto"}, None))
    uniform = shaping(control.planner, "uniform")
    assert (uniform.budget, uniform.redundancy) == (BudgetKind.CV_LOG, 1.5)
    assert shaping(control.new_planner({"max_redundancy": 1.25}), "darts").redundancy == 1.25
    fixed = shaping(control.new_planner({"redundancy": 1.75}), "uniform")
    assert (fixed.budget, fixed.redundancy) == (BudgetKind.FIXED, 1.75)
    assert shaping(Control(load({}, None)).new_planner({"redundancy": "auto"}), "uniform") == uniform


def test_a_batch_names_its_policy_once() -> None:
    control = Control(load({}, None))
    assert (
        control.new_planner({"name": "cap"}).default_policy
        == control.new_planner({"policy": "cap"}).default_policy
        == "cap"
    )
    with pytest.raises(InvalidRequest, match="both 'name' and 'policy'") as error:
        control.new_planner({"name": "cap", "policy": "darts"})
    assert error.value.field == "policy"


@pytest.mark.parametrize(("share", "limits"), [("0.1", MaxLost(0.1, 0.005)), ("1", MaxLost(1.0, 1.0))])
def test_a_lost_share_of_one_never_moves_the_deadline(share: str, limits: MaxLost) -> None:
    deadline = shaping(Control(load({"max_lost_share": share}, None)).planner, "cap").deadline
    assert deadline is not None
    assert deadline.max_lost == limits


def test_the_settings_the_simulator_and_the_schema_name_every_policy() -> None:
    assert list(Control(load({}, None)).planner.policy_names()) == list(POLICIES)
    assert [name for name in POLICIES if name not in NAMES] == ["arrol", "darts+arrol", "informative"]
    policy = Control(load({}, None)).schema()["properties"]["policy"]  # type: ignore[index]
    assert policy["enum"] == list(POLICIES)
    assert all(f"{name}: {about}." in policy["description"] for name, about in POLICIES.items())


def test_the_page_of_policies_names_every_policy() -> None:
    page = Path("docs/policies.md").read_text(encoding="utf-8")
    first_cells = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")}
    assert {f"`{name}`" for name in POLICIES} <= {cell.removesuffix(" (default)") for cell in first_cells}


@pytest.mark.anyio
async def test_informative_starts_twice_as_many_candidates_unless_the_redundancy_is_set() -> None:
    control = Control(load({"verifier": "boxed"}, None))
    assert shaping(control.planner, "informative").redundancy == 2.0
    assert shaping(control.planner, "uniform").redundancy == 1.5
    await control.change({"advantage_std": True, "select": "max_variance"})
    changed = shaping(control.planner, "informative")
    assert (changed.redundancy, changed.advantage_std, changed.select) == (2.0, True, "max_variance")
    assert shaping(control.new_planner({"name": "informative", "redundancy": 3}), "informative").redundancy == 3.0
    # A redundancy that is the default of other policies counts, too, once it is set.
    await control.change({"redundancy": 1.5})
    assert shaping(control.planner, "informative").redundancy == 1.5
    assert shaping(Control(load({"redundancy": "auto"}, None)).planner, "informative").redundancy == 2.0


@pytest.mark.parametrize("redundancy", [4.0, 16.0])
def test_a_batch_under_informative_may_have_any_redundancy(redundancy: float) -> None:
    planner = Control(load({"verifier": "boxed"}, None)).new_planner({"name": "informative", "redundancy": redundancy})
    assert shaping(planner, "informative").candidates(8) == 8 * redundancy


@pytest.mark.anyio
async def test_informative_is_refused_and_not_offered_without_a_verifier() -> None:
    control = Control(load({}, None))
    refusal = (
        "policy: 'informative' needs rewards while groups run, and this server has no verifier; start it with "
        "--verifier"
    )
    with pytest.raises(InvalidRequest) as patched:
        await control.change({"policy": "informative"})
    with pytest.raises(InvalidRequest) as overridden:
        control.new_planner({"name": "informative"})
    assert (patched.value.field, overridden.value.field) == ("policy", "policy")
    assert (str(patched.value), str(overridden.value)) == (refusal, refusal)
    with pytest.raises(InvalidSetting, match=r"^policy 'informative' needs rewards .* start it with --verifier$"):
        load({"policy": "informative"}, None)

    assert control.current_settings()["policies"] == [name for name in POLICIES if name != "informative"]
    assert Control(load({"verifier": "boxed"}, None)).current_settings()["policies"] == list(POLICIES)
