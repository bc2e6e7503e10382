"""Batches in a row that carry over what they leave unfinished, on real vLLM, amid what happens to a training run.

Weights change, everything is aborted, and callers disconnect while groups run that go on from earlier batches. No
prompt is lost or returned twice, each group is whole, and the server stays in order.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import save

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import STARTED, wait_idle, wait_started
from tests.integration.weights import ORIGINAL

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(1800)]
SIZE, NEW, TAKEN = 4, 8, 2 / 3
"""Trajectories a group, new prompts a batch, and the share of a batch's groups that it waits for."""
OTHERS = ("off", "cap", "uniform", "darts", "darts_cut")
FAULTS = ("update", "abort", "disconnect")


@pytest.fixture(
    scope="module", params=["off", pytest.param("auto", marks=pytest.mark.nightly)], ids="speculate-{}".format
)
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("rows") / "log"
    with serve(DARTS, log, "--speculate", request.param, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


class Row:
    """One row of batches under a policy, and what became of each prompt."""

    def __init__(self, server: Server, client: httpx.AsyncClient, policy: str) -> None:
        self.server = server
        self.client = client
        self.options = {"policy": {"name": policy}, "carry": "resume"}
        self.random = Random(policy)
        self.policy = policy
        self.sent = 0
        self.carried = 0
        self.returned: Counter[str] = Counter()
        self.unsure: set[str] = set()
        """Keys of prompts that a batch had whose caller left: its groups may have been complete."""

    def prompts(self, count: int) -> list[dict[str, Any]]:
        self.sent += count
        numbers = range(self.sent - count, self.sent)
        return [{"text": sample_problem(self.random).prompt, "key": f"{self.policy}/{i}"} for i in numbers]

    async def run(self, fault: str | None) -> None:
        """Run one batch, and let one of `FAULTS` happen while it runs."""
        prompts = self.prompts(NEW)
        total = NEW + self.carried
        body = {"prompts": prompts, "carried": True, "group_size": SIZE, "num_groups": int(TAKEN * total)}
        body |= self.options | {"sampling": {"max_tokens": 160, "logprobs": True}}
        started = self.server.metric(STARTED)
        batch = asyncio.create_task(self.client.post("/darts/v1/rollouts", json=body))
        if fault is not None:
            await asyncio.to_thread(wait_started, self.server, started + 1)
            await asyncio.sleep(self.random.uniform(0, 0.2))
            await getattr(self, fault)(batch)
        if fault != "disconnect":
            self.check(await batch, total, int(TAKEN * total))

    async def update(self, batch: asyncio.Task[httpx.Response]) -> None:
        answer = await self.client.put("/darts/v1/weights", content=save(ORIGINAL))
        assert answer.status_code == 200, answer.text

    async def abort(self, batch: asyncio.Task[httpx.Response]) -> None:
        answer = await self.client.post("/abort_requests", json={})
        assert answer.status_code == 200, answer.text

    async def disconnect(self, batch: asyncio.Task[httpx.Response]) -> None:
        self.unsure |= {f"{self.policy}/{i}" for i in range(self.sent)} - self.returned.keys()
        batch.cancel()
        with suppress(asyncio.CancelledError):
            await batch
        await asyncio.to_thread(wait_idle, self.server)  # by then the batch has given back the prompts that it took
        body = {"prompts": self.prompts(1), "group_size": 1, "sampling": {"max_tokens": 1}, "carry": "restart"}
        answer = await self.client.post("/darts/v1/rollouts", json=body | {"policy": {"name": "off"}})
        self.returned[f"{self.policy}/{self.sent - 1}"] += len(answer.json()["groups"])
        self.carried = answer.json()["carried"]

    def check(self, answer: httpx.Response, total: int, most: int) -> None:
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert len(body["groups"]) <= most, "as many as were asked for, or fewer after an abort"
        for group in body["groups"]:
            assert group["error"] is None, group["error"]
            assert len(group["trajectories"]) == SIZE
            for trajectory in group["trajectories"]:
                assert trajectory["finish_reason"] in ("stop", "length")
                length = trajectory["length"]
                assert length == len(trajectory["token_ids"]) == len(trajectory["logprobs"])
                assert length == sum(tokens for _, tokens in trajectory["version_spans"])
            self.returned[group["prompt_key"]] += 1
        assert len(body["groups"]) + len(body["unfinished"]) == total
        assert body["carried"] == len(body["unfinished"])
        self.carried = body["carried"]

    async def finish(self) -> None:
        """Run what is left, if anything is, and check that each prompt was returned once."""
        body = {"prompts": [], "carried": True, "group_size": SIZE, "sampling": {"max_tokens": 160, "logprobs": True}}
        if self.carried:
            answer = await self.client.post("/darts/v1/rollouts", json=body | self.options)
            self.check(answer, self.carried, self.carried)
        assert set(self.returned.values()) == {1}
        assert {f"{self.policy}/{i}" for i in range(self.sent)} - self.returned.keys() <= self.unsure


@pytest.mark.parametrize("policy", ["auto", *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)])
async def test_no_prompt_of_a_row_of_batches_is_lost_or_returned_twice(
    server: Server, policy: str, nightly: bool, request: pytest.FixtureRequest
) -> None:
    is_long = nightly and "engines-1" in request.node.name
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        row = Row(server, client, policy)
        for number in range(60 if is_long else 7):
            await row.run(FAULTS[number // 2 % 3] if number % 2 else None)
        await row.finish()
        await asyncio.to_thread(wait_idle, server)
        assert (await client.get("/health")).status_code == 200
    log = server.log.read_text()
    for fault in ("never retrieved", "output_handler failed", "Traceback"):
        assert fault not in log, log[log.find(fault) - 3000 :][:9000]


@pytest.mark.nightly
async def test_what_goes_on_is_as_long_and_as_likely_as_what_was_never_stopped(server: Server) -> None:
    """A group of each of a thousand prompts, with carry-over and without, compared prompt by prompt."""
    rng, batches, most = Random(5), 20, 160
    texts = [sample_problem(rng).prompt for _ in range(1000)]
    prompts = [{"text": text, "key": f"samples/{i}"} for i, text in enumerate(texts)]
    common = {"group_size": SIZE, "sampling": {"max_tokens": most, "logprobs": True}, "policy": {"name": "off"}}
    found: list[dict[str, list[float]]] = [{}, {}]  # by key: mean length, its square, share truncated, log-prob
    went_on = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        for number in range(batches):
            new = prompts[number::batches]
            carry: dict[str, object] = {"carry": "resume", "carried": True}
            if number < batches - 1:  # the last one returns all that are left
                carry["num_groups"] = len(new) if number else len(new) // 2
            for place, more in enumerate((dict[str, object](), carry)):
                answer = await client.post("/darts/v1/rollouts", json={"prompts": new, **common, **more})
                assert answer.status_code == 200, answer.text
                sent = {prompt["key"] for prompt in new}
                for group in answer.json()["groups"]:
                    went_on += group["prompt_key"] not in sent
                    lengths = np.array([each["length"] for each in group["trajectories"]])
                    logprobs = [sum(each["logprobs"]) for each in group["trajectories"]]
                    means = lengths.mean(), (lengths**2).mean(), (lengths == most).mean(), np.mean(logprobs)
                    found[place][group["prompt_key"]] = [float(mean) for mean in means]
    plain, resumed = (np.array([found[place][prompt["key"]] for prompt in prompts]) for place in range(2))
    differences = resumed - plain
    scores = differences.mean(axis=0) / (differences.std(axis=0, ddof=1) / np.sqrt(len(prompts)) + 1e-12)
    assert went_on > 300, "of these half of the prompts were deferred"
    assert np.abs(scores).max() < 4.5, scores
