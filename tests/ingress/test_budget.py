"""The budget of a batch that is divided among servers: one, spent over all of its prompts."""

import asyncio
from typing import Any

import pytest

from darts_server.engine.scripted import Script
from darts_server.policy.shaping import Shaping, build_policies
from darts_server.rollout.plan import Plan
from tests.ingress.scripted import PATH, SIZE, SURE, Cluster, batch, cluster
from tests.ingress.servers import Received
from tests.rollout.helpers import Documents, Harness

pytestmark = pytest.mark.anyio
PLAN = f"{PATH}/plan"
SPREADS = [1.0, 2.0, 40.0, 3.0, 90.0, 1.0, 15.0, 400.0, 2.0, 2.0, 60.0, 5.0]


def script(prompt: str, index: int) -> Script:
    return Script(20 + int(prompt) + index)


def learn(documents: Documents) -> None:
    documents.add_stds(**{f"key of {number}": std for number, std in enumerate(SPREADS)})


def on_one_server(policy: str, candidates: int | None = None) -> list[int]:
    """How many candidates one server allocates to all prompts."""
    harness = Harness(script)
    learn(harness.store)
    plan = Plan(policy, build_policies(Shaping(redundancy=1.5), SURE)[policy], SIZE)
    keys = [f"key of {number}" for number in range(len(SPREADS))]
    return [each.candidates for each in harness.rollouts.allocator.allocate_cohort(plan, keys, budget=candidates)]


def learn_on(running: Cluster) -> None:
    for each in running.servers:
        learn(each.harness.store)


def plans(running: Cluster) -> list[Received]:
    """The requests for plans that servers got."""
    return [got for each in running.servers for got in each.server.received if got.path == PLAN]


async def allocated(running: Cluster, **fields: Any) -> list[int]:
    answer = await running.post(len(SPREADS), **fields)
    assert answer.status_code == 200, answer.text
    return [group["candidates"] for group in answer.json()["groups"]]


@pytest.mark.parametrize(
    ("count", "policy", "candidates"),
    [(2, "darts", None), (3, "darts_cut", None), (3, "darts", 60), (2, "darts_cut", 80)],
)
async def test_prompts_get_the_candidates_that_one_server_would_give_them(
    count: int, policy: str, candidates: int | None
) -> None:
    async with cluster(count, script) as running:
        learn_on(running)
        fields = {} if candidates is None else {"budget": candidates}
        found = await allocated(running, policy={"name": policy}, **fields)
        assert found == on_one_server(policy, candidates)
        assert len(set(found)) > 1
        assert sum(found) == (candidates or 1.5 * SIZE * len(SPREADS))
        parts = [part for each in running.servers for part in each.parts]
        assert len(parts) == count
        assert {part["cohort"]["mean_candidates"] for part in parts} == {sum(found) / len(SPREADS)}
        assert sum(part.get("budget", 0) for part in parts) == (candidates or 0)
        assert len(plans(running)) == 1


async def test_where_prompts_are_not_weighed_against_each_other_no_server_is_asked_again() -> None:
    async with cluster(2, script) as running:
        for _ in range(2):
            assert await allocated(running, policy={"name": "uniform"}) == [6] * len(SPREADS)
        parts = [part for each in running.servers for part in each.parts]
        assert not any("candidates" in part["cohort"] for part in parts)
        assert sum(len(each.server.bodies(PLAN)) for each in running.servers) == 1
        await allocated(running, policy={"name": "darts"})
        assert sum(len(each.server.bodies(PLAN)) for each in running.servers) == 2


async def test_prompts_of_a_lost_server_keep_their_candidates() -> None:
    async with cluster(2, script) as running:
        learn_on(running)
        running.is_paused = True
        killing = asyncio.create_task(kill_when_all_have_started(running))
        assert await allocated(running, policy={"name": "darts"}) == on_one_server("darts")
        await killing
        assert len(running.servers[1].parts) == 2


async def kill_when_all_have_started(running: Cluster) -> None:
    while not all(each.harness.engine.started for each in running.servers):
        await asyncio.sleep(0.005)
    await running.servers[0].server.kill()
    running.is_paused = False


async def test_a_plan_starts_nothing_and_names_what_is_wrong() -> None:
    async with cluster(1, script) as running:
        learn_on(running)
        url = f"{running.servers[0].server.url}{PLAN}"
        answer = await running.ingress.client.post(url, json=batch(len(SPREADS), policy={"name": "darts"}))
        assert answer.json() == {"candidates": on_one_server("darts"), "mean_candidates": 6.0}
        assert not running.servers[0].harness.engine.started
        for name in ("uniform", "auto"):
            answer = await running.ingress.client.post(url, json=batch(2, policy={"name": name}))
            assert answer.json() == {"candidates": None, "mean_candidates": None}
        answer = await running.ingress.client.post(url, json=batch(2, policy={"name": "darts"}, budget=1))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "budget")
