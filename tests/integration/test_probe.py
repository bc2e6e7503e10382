"""Hidden states of running candidates on real vLLM, against those of the HF model.

Steps are small and the KV cache is too small for what runs, so prompts are split over steps, and candidates are
preempted and recomputed.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import REGISTRY
from transformers import AutoModelForCausalLM
from vllm.platforms import current_platform

from darts_server.engine.port import HiddenState, Probe
from darts_server.exceptions import InvalidRequest
from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.server import MODEL
from darts_server.policy.shaping import Shaping
from darts_server.types import FinishReason
from darts_server.vllm.api.engine import VllmEngine
from darts_server.vllm.requests.prompt_request import PromptRequest
from examples.tiny_rl.engine import TinyEngine, final_only, shaping_engine

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.nightly, pytest.mark.timeout(600)]
DETECT_AT = (3, 10, 24)
LONGEST_PROMPT = 160
SMALL = ("--enable-chunked-prefill", "--max-num-batched-tokens", "128", "--max-num-seqs", "40")
CRAMPED = ("--block-size", "32", "--num-gpu-blocks-override", "80")
EXTENSION = ("--worker-extension-cls", "tests.integration.extension.UserExtension")
RELATIVE_ERROR = 1e-4
PATIENCE = 180.0


@dataclass
class Trajectory:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    probed: list[HiddenState] = field(default_factory=list)


@pytest.fixture(scope="module")
async def engine(environment: None, anyio_backend: str) -> AsyncIterator[TinyEngine]:
    async with shaping_engine({"uniform": Shaping()}, *SMALL, *CRAMPED, *EXTENSION) as running:
        yield running


@pytest.fixture(scope="module")
def port(engine: TinyEngine) -> VllmEngine:
    assert isinstance(engine.port, VllmEngine)
    return engine.port


def preemptions() -> float:
    samples = [s for metric in REGISTRY.collect() for s in metric.samples if s.name == "vllm:num_preemptions_total"]
    return sum(s.value for s in samples)


async def trajectory(
    port: VllmEngine, name: str, prompt: list[int], length: int, at: tuple[int, ...] = DETECT_AT
) -> Trajectory:
    """Generate one candidate of ``length`` tokens with its probed states."""
    generated = Trajectory(prompt)
    params = final_only(max_tokens=length, ignore_eos=True)
    request = PromptRequest({"prompt_token_ids": prompt}, params, name)
    result = await (await port.start(request, 0, Probe(at, generated.probed.append))).result()
    assert result.finish_reason is FinishReason.LENGTH
    generated.tokens = list(result.output.outputs[0].token_ids)
    assert len(generated.tokens) == length
    return generated


async def check_probed(trajectories: Sequence[Trajectory]) -> None:
    """Wait until every point that was passed has been reported; check that it was once and in order."""
    async with asyncio.timeout(PATIENCE):
        while any(len(m.probed) < sum(point < len(m.tokens) for point in DETECT_AT) for m in trajectories):
            await asyncio.sleep(0.01)
    for m in trajectories:
        assert [probed.tokens for probed in m.probed] == [point for point in DETECT_AT if point < len(m.tokens)]


def worst_error(trajectories: Sequence[Trajectory]) -> float:
    """Return the largest relative error of a probed state against the HF model's."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).model.eval()
    worst = 0.0
    for start in range(0, len(trajectories), 50):
        batch = trajectories[start : start + 50]
        sequences = [torch.tensor(m.prompt + m.tokens) for m in batch]
        with torch.inference_mode():
            padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # attention is causal
            states = model(padded).last_hidden_state.numpy()
        for m, of_one in zip(batch, states, strict=True):
            worst = max([worst, *(difference(p, of_one[len(m.prompt) + p.tokens - 1]) for p in m.probed)])
    return worst


def difference(probed: HiddenState, wanted: NDArray[np.float32]) -> float:
    assert probed.vector.dtype == np.float32
    return float(np.linalg.norm(probed.vector - wanted) / np.linalg.norm(wanted))


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts some of which share a prefix, for hits in the prefix cache."""
    rng = Random(seed)
    common = [rng.randrange(3, 60) for _ in range(LONGEST_PROMPT)]
    made = []
    for _ in range(count):
        shared = rng.choice([0, 0, 32, 64, 96])
        own = [rng.randrange(3, 60) for _ in range(rng.randrange(1, LONGEST_PROMPT - shared))]
        made.append(common[:shared] + own)
    return made


@pytest.mark.nightly
async def test_the_states_of_many_trajectories_are_the_hf_models(port: VllmEngine, nightly: bool) -> None:
    count = 1000 if nightly else 80
    assert port.probe_width == 128
    rng, before = Random(3), preemptions()
    limit = asyncio.Semaphore(60)

    async def one(number: int, prompt: list[int]) -> Trajectory:
        async with limit:
            return await trajectory(port, f"probed-{number}", prompt, rng.randrange(2, 40))

    trajectories = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts(count, 5))))
    await check_probed(trajectories)
    assert worst_error(trajectories) < RELATIVE_ERROR
    assert preemptions() - before > count // 50, "the cache was to be too small"
    assert sum(len(m.prompt) > 128 for m in trajectories) > count // 50, "prompts were to be longer than a step"


@pytest.mark.nightly
async def test_states_are_right_across_a_pause_that_clears_the_cache(engine: TinyEngine, port: VllmEngine) -> None:
    tasks = [
        asyncio.create_task(trajectory(port, f"paused-{i}", prompt, 40 + i)) for i, prompt in enumerate(prompts(12, 6))
    ]
    for _ in range(4):
        await asyncio.sleep(0.1)  # at some point while they generate
        await engine.llm.pause_engine("keep")
        await engine.llm.resume_engine()
    trajectories = await asyncio.gather(*tasks)
    await check_probed(trajectories)
    assert worst_error(trajectories) < RELATIVE_ERROR


async def test_a_probe_changes_nothing_in_the_output(port: VllmEngine) -> None:
    request = PromptRequest({"prompt_token_ids": prompts(1, 7)[0]}, final_only(temperature=0.0, max_tokens=30), "same")
    plain = await (await port.start(request, 0)).result()
    states: list[HiddenState] = []
    probed = await (await port.start(request, 1, Probe((3,), states.append, logprobs=True))).result()
    one, other = plain.output.outputs[0], probed.output.outputs[0]
    assert list(one.token_ids) == list(other.token_ids)
    for completion in (one, other):
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
    assert [p.tokens for p in states] == [3]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM splits seeded prompts elsewhere")
async def test_a_seed_is_refused_where_a_split_prompt_with_one_kills_the_engine(engine: TinyEngine) -> None:
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens = 128") as refused:
        await engine.generate("7a>", "seeded", "uniform", n=2, seed=1)
    assert refused.value.field == "seed"


async def test_a_users_own_worker_extension_works_beside_the_probe(engine: TinyEngine, port: VllmEngine) -> None:
    assert await engine.llm.collective_rpc("user_method") == ["here"]
    await check_probed([await trajectory(port, "beside", prompts(1, 9)[0], 30)])


async def test_stopped_candidates_report_no_more_states(engine: TinyEngine, port: VllmEngine) -> None:
    problem = sample_problem(Random(1)).prompt
    states: list[HiddenState] = []
    request = PromptRequest(engine.prompt(problem), final_only(max_tokens=250, ignore_eos=True), "stopped")
    running = await port.start(request, 0, Probe((5, 240), states.append))
    while (running.count_tokens() or 0) < 20:
        await asyncio.sleep(0.005)
    running.stop()
    assert (await running.result()).finish_reason is None
    later = await trajectory(port, "later", prompts(1, 10)[0], 30)
    await check_probed([later])
    assert [p.tokens for p in states] == [5]
