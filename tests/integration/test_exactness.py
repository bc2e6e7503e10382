"""Groups of real vLLM against brute force, and the private things of vLLM that the adapter leans on.

Seeds make it possible: candidate i of a group with seed s generates what choice i of an unshaped request with seed s
does, so an unshaped request for all candidates tells the lengths that stopped ones would have had.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.exceptions import GroupAborted
from darts_server.types import Outcome
from darts_server.vllm.engine import PromptRequest, VllmEngine
from darts_server.vllm.llm import ShapingLLM
from examples.tiny_rl.server import ENVIRONMENT
from tests.integration.engines import SHAPINGS, Recorder, final_only, generate, prompt, shaping_engine
from tests.integration.oracle import expected, hopeless_when_stopped

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>", "2a+2b+2c+2d+2e+2f+2>", "9a-1b*3c+8d-5e*2f+7g-1>"]
GROUPS = 200
SIZE = 8
CANDIDATES = 12
Engine = tuple[ShapingLLM, Recorder]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
async def engine(environment: None, anyio_backend: str) -> AsyncIterator[Engine]:
    async with shaping_engine() as running:
        yield running


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


async def test_200_groups_equal_the_brute_force_selection(engine: Engine) -> None:
    llm, recorder = engine
    policies = list(SHAPINGS)

    async def one(number: int) -> None:
        text, policy = PROMPTS[number % len(PROMPTS)], policies[number % len(policies)]
        name = f"exact-{number}"
        shaped, raw = await asyncio.gather(
            generate(llm, text, name, policy, n=SIZE, seed=number),
            generate(llm, text, f"raw-{number}", "off", n=CANDIDATES, seed=number),
        )
        truths = [(len(c.token_ids), c.finish_reason == "stop") for c in raw.outputs]
        lots = np.random.default_rng(llm._lots(PromptRequest(prompt(llm, text), final_only(seed=number), name)))
        wanted = expected(policy, truths, SIZE, [float(lots.random()) for _ in truths])
        record = recorder.records[name]
        assert {c.index for c in record.selected} == wanted, (policy, truths)
        assert token_ids(shaped) == [token_ids(raw)[index] for index in sorted(wanted)]
        assert [c.index for c in shaped.outputs] == list(range(SIZE))
        assert {c.finish_reason for c in shaped.outputs} <= {"stop", "length"}
        stopped = [c for c in record.candidates if c.end is None and c.finish_reason is None]
        shorts = {"sampled": SIZE - 1, "longest": SIZE - 1, "shortest": SIZE}[policy]
        assert all(hopeless_when_stopped(record, c, shorts) for c in stopped), record
        assert policy != "longest" or not stopped
        assert len(record.candidates) == CANDIDATES

    limit = asyncio.Semaphore(16)

    async def bounded(number: int) -> None:
        async with limit:
            await one(number)

    await asyncio.gather(*map(bounded, range(GROUPS)))
    stopped = sum(c.finish_reason is None for r in recorder.records.values() for c in r.candidates)
    assert stopped > GROUPS, "the rules must have had something to stop"
    assert llm.get_num_unfinished_requests() == 0


async def test_unseeded_groups_are_what_the_reported_lengths_say(engine: Engine) -> None:
    llm, recorder = engine
    names = [f"unseeded-{i}" for i in range(24)]
    await asyncio.gather(*(generate(llm, PROMPTS[i % 5], name, "shortest", n=SIZE) for i, name in enumerate(names)))
    for name in names:
        ended = [c for c in recorder.records[name].candidates if c.finish_reason == "stop"]
        best = sorted(ended, key=lambda c: (c.tokens, c.index))[:SIZE]
        assert sorted(c.index for c in best) == [c.index for c in recorder.records[name].selected]


async def test_token_counts_rise_while_a_candidate_runs_and_are_gone_when_it_ended(engine: Engine) -> None:
    llm, _ = engine
    request = PromptRequest(prompt(llm, PROMPTS[0]), final_only(max_tokens=60, ignore_eos=True), "peeked")
    running = await VllmEngine(llm).start(request, 0)
    ending = asyncio.create_task(running.ended())
    seen = []
    while not ending.done():
        if (tokens := running.tokens()) is not None:
            seen.append(tokens)
        await asyncio.sleep(0.002)
    assert seen == sorted(seen)
    assert max(seen) > 20
    assert (await ending).tokens == 60
    assert running.tokens() is None


async def test_a_stopped_candidate_gives_what_it_had_and_frees_the_engine(engine: Engine) -> None:
    llm, _ = engine
    request = PromptRequest(prompt(llm, PROMPTS[0]), final_only(max_tokens=290, ignore_eos=True, logprobs=0), "stopped")
    running = await VllmEngine(llm).start(request, 0)
    while (running.tokens() or 0) < 20:
        await asyncio.sleep(0.002)
    seen = running.tokens()
    running.stop()
    ended = await running.ended()
    assert ended.reason is None
    assert ended.tokens >= (seen or 0)
    completion = ended.output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == ended.tokens
    assert llm.get_num_unfinished_requests() == 0


async def test_a_cut_trajectory_is_what_max_tokens_would_have_given(engine: Engine) -> None:
    llm, _ = engine
    adapter = VllmEngine(llm)
    for seed in range(5):
        whole_request = PromptRequest(prompt(llm, PROMPTS[4]), final_only(seed=seed, logprobs=1), "whole")
        limited_request = PromptRequest(
            prompt(llm, PROMPTS[4]), final_only(seed=seed, logprobs=1, max_tokens=11), "lim"
        )
        whole, limited = [await (await adapter.start(r, 0)).ended() for r in (whole_request, limited_request)]
        if whole.tokens <= 11:
            continue
        cut = adapter.cut(whole_request, whole.output, 11).outputs[0]
        wanted = limited.output.outputs[0]
        assert cut.token_ids == list(wanted.token_ids)
        assert cut.text == wanted.text
        assert cut.finish_reason == wanted.finish_reason == "length"
        assert cut.stop_reason is None
        assert cut.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
        assert [set(p) for p in cut.logprobs or []] == [set(p) for p in wanted.logprobs or []]


async def test_a_streamed_group_has_each_choice_once_and_ends(engine: Engine) -> None:
    llm, recorder = engine
    params = final_only(n=SIZE, seed=3, max_tokens=256)
    params.output_kind = RequestOutputKind.DELTA
    outputs = [o async for o in llm.generate(prompt(llm, PROMPTS[2]), params, "streamed")]
    assert [o.finished for o in outputs] == [False] * (SIZE - 1) + [True]
    assert sorted(o.outputs[0].index for o in outputs) == list(range(SIZE))
    whole = await generate(llm, PROMPTS[2], "unstreamed", "sampled", n=SIZE, seed=3)
    assert sorted(token_ids(whole)) == sorted(list(o.outputs[0].token_ids) for o in outputs)
    assert recorder.records["streamed"].outcome is Outcome.COMPLETED


async def test_aborting_a_request_by_its_id_ends_the_whole_group(engine: Engine) -> None:
    llm, recorder = engine
    waiting = asyncio.create_task(generate(llm, PROMPTS[0], "aborted", "sampled", n=SIZE, ignore_eos=True))
    while llm.get_num_unfinished_requests() < CANDIDATES:
        await asyncio.sleep(0.01)
    await llm.abort("aborted")
    with pytest.raises(GroupAborted):
        await waiting
    assert recorder.records["aborted"].outcome is Outcome.CANCELLED
    while llm.get_num_unfinished_requests():
        await asyncio.sleep(0.01)


async def test_candidates_that_the_engine_aborts_are_started_anew(engine: Engine) -> None:
    llm, recorder = engine
    waiting = asyncio.create_task(generate(llm, PROMPTS[0], "lost", "sampled", n=SIZE, ignore_eos=True, max_tokens=100))
    while llm.get_num_unfinished_requests() < CANDIDATES:
        await asyncio.sleep(0.01)
    await llm.abort([f"{index}_lost" for index in range(6)])
    output = await waiting
    assert len(output.outputs) == SIZE
    assert len(recorder.records["lost"].candidates) == CANDIDATES + 2
    assert {c.finish_reason for c in output.outputs} == {"length"}
