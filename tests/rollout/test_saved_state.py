"""Whatever a saved state holds: groups complete, the books balance, and what cannot be used is learned again."""

import asyncio
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from darts_server.engine.scripted import Script, ScriptedEngine, settle
from darts_server.estimates.deadline_losses import LAST_BIN
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.policy.auto import AheadState
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Plan, Planner
from darts_server.rollout.rollouts import KINDS, Intervals, Rollouts, check_document
from darts_server.rollout.spec import GroupSpec
from darts_server.types import RequestOptions
from tests.rollout.helpers import Documents, Recorder, collect

POLICIES = {
    kind.value: Shaping(redundancy=1.5, adaptive=True, budget=kind, deadline=Deadline(exploration=0.5))
    for kind in BudgetKind
} | {"signal": Shaping(redundancy=1.5, num_longest=0, adapts_to_signal=True)}
EXTREMES: list[Any] = [
    *(10**400, -(10**400), 2**63, 2**53, 10**9, -1, 0, 5e-324, -5e-324, 1e-300, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), True, None, "", "1", "x" * 1000, [], {}, [[]], {"": 0}),
]
Path = tuple[str | int, ...]


async def run(documents: Documents, *policies: str, together: int = 9) -> Recorder:
    """Run a single group and some together under each policy; their rewards are learned too."""
    engine = ScriptedEngine(lambda _, index: Script(5 + index))
    rollouts: Rollouts[str, list[int]] = Rollouts(
        engine,
        Planner(POLICIES, "fixed", Limits(64)),
        Statistics(documents, 64),
        Intervals(poll=0, allocation=0),
    )
    recorder = Recorder(rollouts.observers)
    for policy in policies:
        plan = rollouts.plan(8, RequestOptions(policy))
        assert isinstance(plan, Plan)
        for batch in (1, together):
            allocations = await asyncio.gather(*(rollouts.allocator.allocate(plan, "p") for _ in range(batch)))
            specs = [GroupSpec(plan, "p", f"{policy}-{batch}-{i}", "p") for i in range(batch)]
            runs = [rollouts.start(spec, one) for spec, one in zip(specs, allocations, strict=True)]
            tasks = [asyncio.create_task(collect(run)) for run in runs]
            await settle()
            for size in (1, 2, 4) * 12:
                rollouts.statistics.latency.observe(size, 0.01 * size)
                rollouts.statistics.latency.observe(size, 0.02 * size, 1)
            await engine.run()
            assert {len(group) for group in await asyncio.gather(*tasks)} == {8}
    rollouts.statistics.rewards.learn({"p": RewardStats(single_length(7), single_length(9), 1, 0)})
    for record in recorder.records:
        rollouts.allocator.deadlines.learn_rewards(record, dict.fromkeys(range(8), True))
        rollouts.statistics.pass_rates.learn(record, {index: index % 3 == 0 for index in range(8)})
    rollouts.statistics.flush()
    assert rollouts.observers.failures == 0
    return recorder


@cache
def learned() -> dict[tuple[str, str], dict[str, Any]]:
    """What a run learns, with the JSON inside of documents parsed."""
    documents = Documents()
    asyncio.run(run(documents, *POLICIES))
    # These are written after 256 groups, and after the reward of a group that explored.
    documents.put("dataset", "all", {"value": '{"recent_stds": [2.5, 3.5], "mean": 9.5, "steps": 2}'})
    histogram = [1.5] * (LAST_BIN + 1)
    losses = {"right": histogram, "cut": histogram, "explored": 80.0}
    losses |= {"explored_right": histogram, "explored_all": histogram}
    documents.put("losses", BudgetKind.FIXED.value, {"value": json.dumps(losses)})
    # This is written after a batch that resumes prompts.
    ahead = AheadState(9, 2, 0.5, True, True, ((8, 0.7), (9, 0.6)), ((7, 1.1),))
    documents.put("ahead", "8", {"value": json.dumps(asdict(ahead))})
    return {
        name: {"value": json.loads(str(document["value"]))} if "value" in document else dict(document)
        for name, document in documents.kept.items()
    }


def paths(value: Any) -> Iterator[Path]:
    """Yield the places of all values inside, outermost first; of long lists only those of the first and last."""
    yield ()
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        if not isinstance(value, list) or key in (0, len(value) - 1):
            yield from ((key, *rest) for rest in paths(one))


PLACES = [(name, path) for name, document in sorted(learned().items()) for path in paths(document) if path]


def changed(name: tuple[str, str], path: Path, value: Any) -> dict[str, Any]:
    """A learned document with another value at one place, as the store has it."""
    document = copy.deepcopy(learned()[name])
    parent: Any = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return {"value": json.dumps(document["value"])} if "value" in document else document


def stored() -> Documents:
    """What a run learns, as the store has it."""
    documents = Documents()
    for name, document in learned().items():
        field = next(iter(document))
        documents.put(*name, changed(name, (field,), document[field]))
    return documents


def check_all(documents: Documents) -> None:
    for (kind, _), document in documents.kept.items():
        check_document(kind, document)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def test_documents_of_removed_policies_are_read_and_kept() -> None:
    documents, gone = stored(), {}
    for (kind, key), document in list(documents.kept.items()):
        if key.partition("/")[0] == BudgetKind.FIXED:
            for policy in ("darts_deadline", "shadow:darts"):
                gone[kind, policy + key.removeprefix(BudgetKind.FIXED)] = document
    # Earlier versions of `auto` have chosen among policies.
    state = {
        "batches": 9,
        "chosen": "cap at 0.9",
        "measured": [{"batch": 9, "name": "off", "error": 0.1}],
        "ahead": 0.5,
    }
    for key in ("8", "8 resumed"):
        gone["auto", key] = {"value": json.dumps(state)}
    assert {kind for kind, _ in gone} >= {"deadline", "losses", "price"}
    for name, document in gone.items():
        documents.put(*name, document)
    check_all(documents)
    asyncio.run(run(documents, BudgetKind.FIXED))
    assert {name: documents.kept[name] for name in gone} == gone


def test_every_kind_of_document_is_learned_and_can_be_used() -> None:
    kinds = {kind for kind, _ in learned()}
    assert kinds == {kind for kind in KINDS if not kind.startswith(("quality", "vote"))}
    check_all(stored())


@given(
    place=st.sampled_from(PLACES),
    value=st.sampled_from(EXTREMES) | json_values,
    policy=st.sampled_from([*POLICIES]),
)
@example(place=(("prompt", "p"), ("std_ema",)), value=10**400, policy="fixed")
def test_no_document_disturbs_a_group_whatever_it_contains(
    place: tuple[tuple[str, str], Path], value: Any, policy: str
) -> None:
    (kind, key), path = place
    documents = stored()
    documents.put(kind, key, changed((kind, key), path, value))
    recorder = asyncio.run(run(documents, policy, together=4))
    assert {record.outcome for record in recorder.records} == {"completed"}
    assert len(recorder.records) == 5
    assert recorder.started == sum(len(record.candidates) for record in recorder.records)
    del documents.kept[kind, key]
    check_all(documents)  # what was learned from it can be used


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**53, -1, 1e308, True, "1"], ids=repr)
@pytest.mark.parametrize("field", ["std_ema", "mean_ema", "groups", "candidates", "weight_version"])
def test_the_unusable_field_of_a_prompt_is_named(field: str, value: Any) -> None:
    right = {"std_ema": 1.0, "mean_ema": 2.0, "groups": 1, "candidates": 8, "weight_version": None}
    with pytest.raises(ValueError, match=rf"{field} must be a ") as error:
        check_document("prompt", right | {field: value})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("kind", "document", "message"),
    [
        ("quality", {"side": 0, "parts": 10**9, "digest": "x"}, "parts in"),
        ("vote", {"side": 0, "parts": 1}, "digest a text"),
        ("vote_part", {"data": 1}, "data must be a text"),
        ("price", {"value": "{"}, "JSONDecodeError"),
        ("price", {}, "KeyError"),
        ("latency", {"value": '{"batches": [[1]], "seconds": [[1e-320]], "ages": [0]}'}, "seconds must be"),
        ("step", {"value": "[[0, 1e400, null]]"}, "mean must be"),
        ("deadline", {"value": "[1.5]"}, "lengths must be"),
    ],
)
def test_documents_of_every_kind_are_checked(kind: str, document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_document(kind, document)


def test_documents_of_unknown_kinds_are_kept() -> None:
    check_document("of_the_future", {"x": 10**400})
