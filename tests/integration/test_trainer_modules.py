"""The modules of OpenRLHF and slime, on real vLLM."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest

from darts_client.integrations.openrlhf import HttpEngine
from darts_client.integrations.slime import Facade
from darts_server.offline.demo.server import DARTS, Server
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE, TOKENS = 4, 40
RUNNING = 3
"""At once on the server of its own: fewer than a group."""
TRAINERS = ("openrlhf", "slime")
Sampled = tuple[list[int], list[float]]


@pytest.fixture
def grouping(server: Server) -> Iterator[None]:
    """`--group-size` for a while."""
    url = f"{server.url}/darts/v1/policy"
    assert httpx.patch(url, json={"group_size": SIZE}).status_code == 200
    yield
    assert httpx.patch(url, json={"group_size": None}).status_code == 200


class Trainer:
    """Samples one turn after another by a trainer's module."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._openrlhf, facade = HttpEngine(url), Facade(url)
        self._samplers = (self._openrlhf._sampler, facade._sampler)
        self.facade = httpx.AsyncClient(transport=httpx.ASGITransport(facade), base_url="http://127.0.0.1:1")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for sampler in self._samplers:
            await sampler.aclose()

    async def sample(self, session: str, prompt: list[int]) -> Sampled:
        if self._name == "openrlhf":
            sampling = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=TOKENS, logprobs=1, stop=[])
            [completion] = (await self._openrlhf.generate(prompt, sampling)).outputs
            assert completion.logprobs is not None
            return completion.token_ids, [entry.logprob for each in completion.logprobs for entry in each.values()]
        return read_slime(await self.generate(session, prompt, TOKENS))

    async def generate(self, session: str, prompt: list[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
        """slime's request."""
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": max_new_tokens, **more}
        body = {"sampling_params": sampling, "return_logprob": True, "input_ids": prompt}
        answer = await self.facade.post("/generate", json=body, headers={"X-SMG-Routing-Key": session})
        assert answer.status_code == 200, answer.text
        decoded: dict[str, Any] = answer.json()
        return decoded


def read_slime(answer: dict[str, Any]) -> Sampled:
    pairs = answer["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in pairs], [value for value, _, _ in pairs]


@pytest.mark.parametrize("name", TRAINERS)
async def test_the_first_turns_make_a_group_and_later_ones_run_alone(server: Server, grouping: None, name: str) -> None:
    before, prompt = server.metric("darts_groups_total"), [7, 8, 9, *[5 + TRAINERS.index(name)] * 20]
    async with Trainer(name, server.url) as trainer:
        first = await asyncio.gather(*(trainer.sample(f"{name}-{i}", prompt) for i in range(SIZE)))
        assert server.metric("darts_groups_total") == before + 1
        assert all(len(tokens) == len(logprobs) > 0 >= max(logprobs) for tokens, logprobs in first)
        later = [trainer.sample(f"{name}-{i}", [*prompt, *tokens, 5]) for i, (tokens, _) in enumerate(first)]
        assert all(tokens for tokens, _ in await asyncio.gather(*later))
    assert server.metric("darts_groups_total") == before + 1


@pytest.fixture(scope="module")
def own(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--group-size", str(SIZE), "--max-num-seqs", str(RUNNING))
    log = tmp_path_factory.mktemp("slime") / "log"
    with serve(DARTS, log, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


@pytest.mark.nightly
async def test_slimes_partial_rollout_gets_what_was_generated_and_goes_on_from_it(own: Server) -> None:
    prompt, seeded = [7, 8, 9, 10], {"ignore_eos": True, "sampling_seed": 5, "temperature": 0}
    async with Trainer("slime", own.url) as trainer:
        whole = (await trainer.generate("whole", prompt, 200, **seeded))["output_ids"]
        greedy = asyncio.create_task(trainer.generate("greedy", prompt, 200, **seeded))
        while own.metric("vllm:num_requests_running") < 1:
            await asyncio.sleep(0.01)
        running = [asyncio.create_task(trainer.generate(f"s-{i}", prompt, 200, ignore_eos=True)) for i in range(SIZE)]
        while own.metric("vllm:num_requests_running") < RUNNING or own.metric("vllm:num_requests_waiting") < 2:
            await asyncio.sleep(0.01)
        await trainer.facade.post("/abort_request", json={"abort_all": True})
        samples = await asyncio.gather(*running)
        assert {each["meta_info"]["finish_reason"]["type"] for each in samples} == {"abort"}
        assert all(len(read_slime(each)[0]) == len(each["output_ids"]) < 200 for each in samples)
        assert sorted(bool(each["output_ids"]) for each in samples) == [False, False, True, True], "two had to wait"
        partial = (await greedy)["output_ids"]
        assert partial == whole[: len(partial)]
        assert (await trainer.facade.get("/v1/loads")).json() == {"loads": [{"num_reqs": 0}]}

        before = own.metric("darts_groups_total")
        goes_on = (trainer.generate(f"s-{i}", prompt + each["output_ids"], 20) for i, each in enumerate(samples))
        assert all(each["meta_info"]["finish_reason"]["type"] != "abort" for each in await asyncio.gather(*goes_on))
        assert own.metric("darts_groups_total") == before
