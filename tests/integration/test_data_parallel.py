"""Two data-parallel engines of real vLLM: what one of them cannot do is not done."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from darts_server.exceptions import UpdateFailed
from darts_server.offline.demo.server import MODEL
from darts_server.vllm.api.weights import VllmModel
from darts_server.weights.tensors import FilePlan, names_by_file, read_tensors
from examples.tiny_rl.engine import TinyEngine, final_only, shaping_engine
from tests.integration.weights import PROMPT, perturbed

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.nightly, pytest.mark.timeout(600)]
FLAGS = ("--data-parallel-size", "2", "--worker-extension-cls", "tests.integration.extension.UserExtension")


@pytest.fixture(scope="module")
async def engine(environment: None, anyio_backend: str) -> AsyncIterator[TinyEngine]:
    async with shaping_engine({}, *FLAGS) as running:
        yield running


async def samples(engine: TinyEngine) -> list[tuple[str, float | None]]:
    """Return a greedy text of each engine, and its log-prob."""
    found = []
    for rank in range(2):
        params = final_only(temperature=0.0, max_tokens=40, logprobs=0)
        outputs = engine.llm.generate(engine.prompt(PROMPT), params, f"of {rank}", data_parallel_rank=rank)
        [completion] = [output async for output in outputs][-1].outputs
        found.append((completion.text, completion.cumulative_logprob))
    return found


@pytest.mark.parametrize("rank", [0, 1])
async def test_weights_that_one_engine_cannot_load_are_served_by_none(
    engine: TinyEngine, tmp_path: Path, rank: int
) -> None:
    def plan(path: Path) -> FilePlan:
        return names_by_file(read_tensors(path, "path"))

    save_file(perturbed(1), tmp_path / "new.safetensors")
    model = VllmModel(engine.llm)
    old = await samples(engine)
    assert old[0] == old[1]
    await engine.llm.collective_rpc("fail_next_load", args=(rank,))
    with pytest.raises(UpdateFailed, match=f"injected on rank {rank}"):
        await model.load(plan(tmp_path / "new.safetensors"))
    await model.load(plan(MODEL))  # as an update does that has failed
    assert await samples(engine) == old
    await model.load(plan(tmp_path / "new.safetensors"))
    new = await samples(engine)
    assert new[0] == new[1] != old[0]
    await model.load(plan(MODEL))
