"""Groups of real vLLM against brute force, and the internals of vLLM that the engine relies on.

Seeds make it possible: candidate i of a group with seed s generates what choice i of an unshaped request with seed s
does, so an unshaped request for all candidates has the lengths that stopped ones would have had.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import combinations
from math import ceil
from random import Random
from typing import Any

import numpy as np
import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest

from darts_server.engine.port import TokenSlice
from darts_server.exceptions import CandidateFailed, InvalidRequest
from darts_server.offline.demo.problems import sample_problem
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.types import FinishReason, Outcome
from darts_server.vllm.api.engine import VllmEngine
from darts_server.vllm.api.probe_receiver import ProbeReceiver
from darts_server.vllm.requests.adding import change_before_send
from darts_server.vllm.requests.outputs import CachingTokenizer
from darts_server.vllm.requests.prompt_request import PromptRequest
from examples.tiny_rl.engine import TinyEngine, final_only, shaping_engine
from tests.vllm.tokenizers import multi_byte_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(600)]
PROMPTS = ["7a-5b*4>", "1a+5b*4c-3>", "3a*7b+2c-5d*9>", "2a+2b+2c+2d+2e+2f+2>", "9a-1b*3c+8d-5e*2f+7g-1>"]
SIZE = 8
CANDIDATES = 12
COHORT = 32
CUT_LATE = Deadline(exploration=0.0, cut_factor=1000.0)
POLICIES = {
    "sampled": Shaping(redundancy=1.5, num_longest=1, tail=Tail.SAMPLED),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "darts": Shaping(redundancy=1.5, num_longest=1, tail=Tail.SAMPLED, adaptive=True),
    "cut": Shaping(redundancy=1.5, deadline=CUT_LATE),
    "cap": Shaping(redundancy=1.0, deadline=Deadline(exploration=0.0, cut_factor=1.25), completion_share=2 / 3),
}
FIXED = ("sampled", "longest", "shortest")


@pytest.fixture(scope="module")
async def engine(environment: None, anyio_backend: str) -> AsyncIterator[TinyEngine]:
    async with shaping_engine(POLICIES) as running:
        yield running


Ended = tuple[int, bool]
"""Length in tokens, and whether the candidate finished before the length limit."""


def shortest(outcomes: Sequence[Ended], count: int) -> set[int]:
    """Return the ``count`` finished candidates with the smallest (length, index) pairs, found by trying all sets."""
    finished = [i for i, (_, ok) in enumerate(outcomes) if ok]
    best = min(combinations(finished, count), key=lambda chosen: sorted((outcomes[i][0], i) for i in chosen))
    return set(best)


def expected(policy: str, outcomes: Sequence[Ended], size: int, draws: Sequence[float]) -> set[int]:
    """Return the group of ``size`` under a policy with one place for the tail, from all lengths.

    Of sampled tails the candidate with the smallest of the ``draws`` is selected.
    """
    finished = sum(ok for _, ok in outcomes)
    if policy == "shortest":
        assert finished >= size, "choose prompts whose candidates finish"
        return shortest(outcomes, size)
    short = shortest(outcomes, size - 1)
    rest = [i for i in range(len(outcomes)) if i not in short]
    if policy == "longest":
        assert finished >= size, "choose prompts whose candidates finish"
        return short | {max((i for i in rest if outcomes[i][1]), key=lambda i: (outcomes[i][0], i))}
    return short | {min(rest, key=lambda i: draws[i])}


def was_hopeless(record: GroupRecord, candidate: CandidateRecord, num_shortest: int) -> bool:
    """Check that a candidate could not be among the shortest any more when it was stopped.

    By then K others must have finished that are shorter than one token more than it had.
    """
    earliest = (candidate.tokens + 1, candidate.index)
    assert candidate.ended_at is not None
    ahead = [
        c
        for c in record.candidates
        if c.finish_reason is FinishReason.STOP
        and c.ended_at is not None
        and c.ended_at <= candidate.ended_at
        and (c.tokens, c.index) < earliest
    ]
    return len(ahead) >= num_shortest


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def tail_draws(engine: TinyEngine, text: str, seed: int, count: int) -> list[float]:
    """Return the numbers that the candidates of a seeded request draw for the tail."""
    rng = np.random.default_rng(PromptRequest(engine.prompt(text), final_only(seed=seed), "any").tail_seed)
    return [float(rng.random()) for _ in range(count)]


async def test_groups_equal_the_brute_force_selection(engine: TinyEngine, nightly: bool) -> None:
    groups = 200 if nightly else 18

    async def one(number: int) -> None:
        text, policy = PROMPTS[number % len(PROMPTS)], FIXED[number % len(FIXED)]
        name = f"exact-{number}"
        shaped, raw = await asyncio.gather(
            engine.generate(text, name, policy, n=SIZE, seed=number),
            engine.generate(text, f"raw-{number}", "off", n=CANDIDATES, seed=number),
        )
        outcomes = [(len(c.token_ids), c.finish_reason == "stop") for c in raw.outputs]
        wanted = expected(policy, outcomes, SIZE, tail_draws(engine, text, number, CANDIDATES))
        record = engine.records[name]
        assert {c.index for c in record.selected} == wanted, (policy, outcomes)
        assert token_ids(shaped) == [token_ids(raw)[index] for index in sorted(wanted)]
        assert [c.index for c in shaped.outputs] == list(range(SIZE))
        assert {c.finish_reason for c in shaped.outputs} <= {"stop", "length"}
        stopped = [c for c in record.candidates if c.selected_as is None and c.finish_reason is None]
        shorts = {"sampled": SIZE - 1, "longest": SIZE - 1, "shortest": SIZE}[policy]
        assert all(was_hopeless(record, c, shorts) for c in stopped), record
        assert policy != "longest" or not stopped
        assert len(record.candidates) == CANDIDATES

    limit = asyncio.Semaphore(16)

    async def bounded(number: int) -> None:
        async with limit:
            await one(number)

    await asyncio.gather(*map(bounded, range(groups)))
    stopped = sum(c.finish_reason is None for r in engine.records.values() for c in r.candidates)
    assert stopped > groups, "the rules must have had something to stop"
    assert len(engine.llm.output_processor.request_states) == 0


def flat(logprobs: Any) -> tuple[list[Any], list[float]]:
    """Return all tokens that log-probs name, in order, and their log-probs."""
    entries = [entry for position in logprobs or () for entry in position.items()]
    return [(token, one.decoded_token) for token, one in entries], [one.logprob for _, one in entries]


async def test_choices_of_groups_have_every_field_that_unshaped_ones_have(
    engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text and log-probs of candidates are made from what was collected (`tests.vllm.requests.test_outputs`)."""
    tokenizer = multi_byte_tokenizer()
    monkeypatch.setattr(engine.llm.output_processor, "tokenizer", tokenizer)
    caching = CachingTokenizer(tokenizer)
    monkeypatch.setattr(engine.llm.held_requests, "tokenizer", caching)
    monkeypatch.setattr(engine.port, "_tokenizer", caching)

    async def one(number: int) -> None:
        params: dict[str, Any] = {"seed": number, "logprobs": [None, 0, 3][number % 3], "max_tokens": 60}
        if number % 2:
            params |= {"stop": ["1", "日"], "include_stop_str_in_output": number % 4 == 1}
        name = f"fields-{number}"
        shaped, raw = await asyncio.gather(
            engine.generate(PROMPTS[number % 5], name, "shortest", n=SIZE, **params),
            engine.generate(PROMPTS[number % 5], f"raw-{name}", "off", n=CANDIDATES, **params),
        )
        for candidate, choice in zip(engine.records[name].selected, shaped.outputs, strict=True):
            wanted = raw.outputs[candidate.index]
            assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
            assert (choice.token_ids, choice.stop_reason) == (wanted.token_ids, wanted.stop_reason)
            assert choice.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
            assert (choice.logprobs is None) == (wanted.logprobs is None) == (params["logprobs"] is None)
            (tokens, logprobs), (wanted_tokens, wanted_logprobs) = flat(choice.logprobs), flat(wanted.logprobs)
            assert tokens == wanted_tokens
            assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)

    await asyncio.gather(*map(one, range(12)))


@pytest.mark.parametrize("more", [{}, {"seed": 3}, {"stop": ["1"], "logprobs": 2, "logit_bias": {5: 1.0}}])
async def test_the_request_of_a_sibling_equals_the_request_that_vllm_would_make(
    engine: TinyEngine, more: dict[str, Any]
) -> None:
    processor = engine.llm.input_processor
    request = PromptRequest(engine.prompt(PROMPTS[0]), final_only(extra_args={"a": 1}, **more), "siblings")
    tasks = await engine.llm.get_supported_tasks()

    def make(index: int, priority: int) -> EngineCoreRequest:
        return processor.process_inputs(
            f"{index}_siblings", request.prompt, request.make_params(index), tasks, arrival_time=1.0, priority=priority
        )

    # No request is sent in the block, which raises the error.
    with suppress(RuntimeError), change_before_send(lambda *_: None, request):
        first = make(0, 5)
        processor.assign_request_id(first)
        repeated = make(3, 7)
    own = make(3, 7)
    assert repr(repeated) == repr(own)
    assert repeated.sampling_params is not first.sampling_params
    assert (first.priority, repeated.priority, own.external_req_id) == (5, 7, None)


async def test_token_counts_rise_until_a_candidate_is_stopped_which_returns_its_tokens(engine: TinyEngine) -> None:
    """Also if it is stopped twice."""
    adapter = VllmEngine(engine.llm, ProbeReceiver())
    params = final_only(max_tokens=290, ignore_eos=True, logprobs=0)
    request = PromptRequest(engine.prompt(PROMPTS[0]), params, "stopped")
    running, other = await adapter.start(request, 0), await adapter.start(request, 1)
    seen = [0]
    while seen[-1] < 20:
        seen.append(running.count_tokens() or 0)
        await asyncio.sleep(0.002)
    assert seen == sorted(seen)
    for each in (running, running, other):
        each.stop()
    result = await running.result()
    assert result.finish_reason is None
    assert result.tokens >= seen[-1]
    assert running.count_tokens() is None
    completion = result.output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == result.tokens
    assert (await other.result()).finish_reason is None
    assert len(engine.llm.output_processor.request_states) == 0
    assert not engine.llm.output_processor.external_req_ids.keys() & {"0_stopped", "1_stopped"}


async def test_a_streamed_group_has_each_choice_once_and_one_with_cumulative_output_is_whole(
    engine: TinyEngine,
) -> None:
    whole = await engine.generate(PROMPTS[2], "whole", "sampled", n=SIZE, seed=3)
    outputs = dict[RequestOutputKind, list[RequestOutput]]()
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        params = final_only(n=SIZE, seed=3, extra_args={"darts_policy": "sampled"})
        params.output_kind = kind
        outputs[kind] = [o async for o in engine.llm.generate(engine.prompt(PROMPTS[2]), params, kind.name)]
    streamed, (cumulative,) = outputs.values()
    assert [o.finished for o in streamed] == [False] * (SIZE - 1) + [True]
    assert sorted(o.outputs[0].index for o in streamed) == list(range(SIZE))
    assert sorted(list(o.outputs[0].token_ids) for o in streamed) == sorted(token_ids(whole))
    assert engine.records["DELTA"].outcome is Outcome.COMPLETED
    assert cumulative.finished
    assert token_ids(cumulative) == token_ids(whole)


async def test_aborting_a_request_by_its_id_cancels_the_whole_group(engine: TinyEngine) -> None:
    waiting = asyncio.create_task(engine.generate(PROMPTS[0], "aborted", "sampled", n=SIZE, ignore_eos=True))
    while len(engine.llm.output_processor.request_states) < CANDIDATES:
        await asyncio.sleep(0.01)
    await engine.llm.abort("aborted")
    output = await waiting
    assert {choice.finish_reason for choice in output.outputs} == {"abort"}
    whole = await engine.generate(PROMPTS[0], "whole", "off", n=SIZE, ignore_eos=True)
    for choice, other in zip(output.outputs, whole.outputs, strict=True):
        assert choice.token_ids == other.token_ids[: len(choice.token_ids)]
    assert engine.records["aborted"].outcome is Outcome.CANCELLED
    while len(engine.llm.output_processor.request_states):
        await asyncio.sleep(0.01)


async def test_candidates_that_the_engine_aborts_are_restarted(engine: TinyEngine) -> None:
    waiting = asyncio.create_task(
        engine.generate(PROMPTS[0], "lost", "sampled", n=SIZE, ignore_eos=True, max_tokens=100)
    )
    while len(engine.llm.output_processor.request_states) < CANDIDATES:
        await asyncio.sleep(0.01)
    await engine.llm.abort([f"{index}_lost" for index in range(6)])
    output = await waiting
    assert len(output.outputs) == SIZE
    assert len(engine.records["lost"].candidates) == CANDIDATES + 6
    assert {c.finish_reason for c in output.outputs} == {"length"}


@pytest.fixture(scope="module")
async def unshaped(engine: TinyEngine) -> list[tuple[str, RequestOutput]]:
    """Prompts, and all candidates that a group of each has with its place as seed."""
    rng = Random(7)
    texts = [sample_problem(rng).prompt for _ in range(COHORT)]
    raw = (engine.generate(t, f"raw-{seed}", "off", n=CANDIDATES, seed=seed) for seed, t in enumerate(texts))
    return list(zip(texts, await asyncio.gather(*raw), strict=True))


async def run_cohort(
    engine: TinyEngine, policy: str, unshaped: Sequence[tuple[str, RequestOutput]]
) -> list[tuple[GroupRecord, RequestOutput, RequestOutput]]:
    """Return record and answer of the groups of one cohort, and the unshaped answer with all their candidates."""
    names = [f"{policy}-batch-{i}" for i in range(len(unshaped))]
    shaped = await asyncio.gather(
        *(engine.generate(text, names[seed], policy, n=SIZE, seed=seed) for seed, (text, _) in enumerate(unshaped))
    )
    return [(engine.records[n], one, raw) for n, one, (_, raw) in zip(names, shaped, unshaped, strict=True)]


def check_cut(record: GroupRecord, shaped: RequestOutput, raw: RequestOutput) -> list[CandidateRecord]:
    """Check that trajectories are the first tokens of what unshaped candidates generate; return those that were cut."""
    for candidate, completion in zip(record.selected, shaped.outputs, strict=True):
        whole = list(raw.outputs[candidate.index].token_ids)
        assert list(completion.token_ids) == whole[: candidate.tokens]
        assert candidate.cut == (candidate.tokens < len(whole))
        assert not candidate.cut or completion.finish_reason == "length"
    return [candidate for candidate in record.selected if candidate.cut]


async def test_a_cut_cohort_returns_the_first_tokens_of_its_tails_without_waiting_for_the_rest(
    engine: TinyEngine, unshaped: list[tuple[str, RequestOutput]]
) -> None:
    results = await run_cohort(engine, "cut", unshaped)
    [cohort] = [b for b in engine.cohorts if b.policy == "cut"]
    assert cohort.deadline is not None
    cut = 0
    for seed, (record, shaped, raw) in enumerate(results):
        outcomes = [(len(c.token_ids), c.finish_reason == "stop") for c in raw.outputs]
        own = sorted(length for length, valid in outcomes if valid)[SIZE - 1]
        assert record.deadline in (max(cohort.deadline, own), None), "None: it was complete before the batch had one"
        wanted = expected("sampled", outcomes, SIZE, tail_draws(engine, raw.prompt or "", seed, CANDIDATES))
        assert {c.index for c in record.selected} == wanted
        for candidate in check_cut(record, shaped, raw):
            assert candidate.tokens == record.deadline
            cut += 1
        stopped = [c for c in record.candidates if c.finish_reason is None]
        assert all(was_hopeless(record, c, SIZE - 1) for c in stopped), record
    assert cut >= 3, "a tenth of the groups and more have tails beyond the deadline"


async def test_a_cap_returns_all_candidates_and_none_runs_on_beyond_the_cut_length(
    engine: TinyEngine, unshaped: list[tuple[str, RequestOutput]]
) -> None:
    results = await run_cohort(engine, "cap", unshaped)
    [cohort] = [b for b in engine.cohorts if b.policy == "cap"]
    assert cohort.deadline is not None
    place = ceil(SIZE * 2 / 3)
    cut_length = ceil(1.25 * cohort.deadline)
    cut = 0
    at_cut_length = 0
    for record, shaped, raw in results:
        assert [c.index for c in record.selected] == list(range(SIZE))
        valid = sorted(len(c.token_ids) for c in raw.outputs[:SIZE] if c.finish_reason == "stop")
        own = valid[place - 1] if len(valid) >= place else cut_length
        assert record.cut_length in (cut_length, None), "None: it was complete before the batch had one"
        for candidate in check_cut(record, shaped, raw):
            assert candidate.tokens == min(cut_length, max(cohort.deadline, own))
            at_cut_length += candidate.tokens == cut_length
            cut += 1
    assert cut > at_cut_length


@pytest.mark.parametrize(
    "multi_byte", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["one byte", "multi-byte"]
)
async def test_a_trajectory_that_was_cut_anywhere_goes_on_as_if_it_had_not_been(
    engine: TinyEngine, nightly: bool, multi_byte: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, with the same weights: the same tokens, text, end and log-probs, also with stop strings at the cut."""
    if multi_byte:
        tokenizer = multi_byte_tokenizer()
        monkeypatch.setattr(engine.llm.output_processor, "tokenizer", tokenizer)
        monkeypatch.setattr(engine.llm.held_requests, "tokenizer", CachingTokenizer(tokenizer))
    adapter = VllmEngine(engine.llm, ProbeReceiver())
    reasons: set[str | None] = set()
    across = cuts = 0

    async def one(number: int) -> None:
        nonlocal across, cuts
        rng = Random(number)
        prompt = engine.prompt(sample_problem(rng).prompt)
        params: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": rng.randint(20, 120),
            "ignore_eos": rng.random() < 0.7,
            "logprobs": rng.choice([0, 0, 2]),
            "min_tokens": rng.choice([0, 0, 9]),
            "include_stop_str_in_output": rng.random() < 0.5,
            "seed": rng.choice([None, number]),
        }
        length = rng.randint(1, 5)
        if number % 3:
            text = (await run(PromptRequest(prompt, final_only(**params), f"unstopped-{number}"))).outputs[0].text
            if not text:  # nothing to cut
                return
            start = rng.randrange(len(text))
            params["stop"] = [text[start : start + length]]
        request = PromptRequest(prompt, final_only(**params), f"uncut-{number}")
        if params["logprobs"] < 2:
            adapter.check_resumable(request)
        whole = await run(request)
        uncut = whole.outputs[0]
        tokens = list(uncut.token_ids)
        if len(tokens) < 2:
            return
        # Just before a stop string has ended is where most can go wrong.
        last = len(tokens) - 1
        cut = rng.randint(max(1, last - 2), last) if number % 2 else rng.randint(1, last)
        before = adapter.tokens_from(whole, 0)
        assert before.logprobs is not None
        prefix = TokenSlice(tokens[:cut], before.logprobs[:cut])
        running = await adapter.start(PromptRequest(prompt, request.params, f"resumed-{number}"), 0, prefix=prefix)
        if (seen := running.tokens_from(0)) is not None:
            assert list(seen.token_ids)[:cut] == tokens[:cut]
        result = await running.result()
        resumed = result.output.outputs[0]
        assert list(resumed.token_ids) == tokens, (cut, params)
        assert (resumed.text, resumed.finish_reason) == (uncut.text, uncut.finish_reason), (cut, params)
        assert resumed.stop_reason == uncut.stop_reason
        assert result.tokens == len(tokens)
        assert result.output.prompt_token_ids == prompt["prompt_token_ids"]
        assert adapter.tokens_from(result.output, 0).logprobs == pytest.approx(before.logprobs, abs=1e-4)
        assert resumed.cumulative_logprob == pytest.approx(uncut.cumulative_logprob, abs=1e-3)
        reasons.add(str(uncut.stop_reason and "string") if uncut.finish_reason == "stop" else uncut.finish_reason)
        across += isinstance(uncut.stop_reason, str) and len(tokens) - cut < length
        cuts += 1

    async def run(request: PromptRequest) -> RequestOutput:
        return (await (await adapter.start(request, 0)).result()).output

    start, wanted = 0, 200 if nightly else 20
    while cuts < wanted:
        assert start < 2 * wanted, "most trajectories are long enough"
        await asyncio.gather(*map(one, range(start, start + 12)))
        start += 12
    assert {"string", "length"} <= reasons
    assert across > 2, "stop strings on both sides of a cut"
    assert not engine.llm.output_processor.request_states


async def test_the_rest_of_a_sampled_candidate_has_random_numbers_of_its_own(engine: TinyEngine) -> None:
    adapter = VllmEngine(engine.llm, ProbeReceiver())
    sampling = final_only(max_tokens=100, ignore_eos=True, seed=5, temperature=2.0)
    request = PromptRequest(engine.prompt(PROMPTS[1]), sampling, "sampled")
    whole = (await (await adapter.start(request, 0)).result()).output.outputs[0].token_ids
    prefix = TokenSlice(whole[:50], None)
    rests = [
        (await (await adapter.start(request, 0, prefix=prefix)).result()).output.outputs[0].token_ids for _ in range(2)
    ]
    assert list(rests[0]) == list(rests[1]), "a seed repeats it"
    assert list(rests[0][:50]) == list(whole[:50])
    assert list(rests[0][50:]) != list(whole[50:])
    same = sum(a == b for a, b in zip(rests[0][50:], whole[:50], strict=True))
    assert same < 25, "not the random numbers of the first tokens again"


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "bad_words", "prompt_logprobs"])
def test_what_depends_on_where_the_prompt_ends_is_not_resumed(engine: TinyEngine, name: str) -> None:
    adapter = VllmEngine(engine.llm, ProbeReceiver())
    value: object = ["a"] if name == "bad_words" else 1
    with pytest.raises(InvalidRequest) as refused:
        adapter.check_resumable(PromptRequest(engine.prompt("1>"), final_only(**{name: value}), "no"))
    assert refused.value.field == f"sampling.{name}"
    adapter.check_resumable(PromptRequest(engine.prompt("1>"), final_only(top_k=3, logprobs=1), "yes"))


async def test_an_abort_that_fails_ends_the_candidates_of_its_message_alone(
    engine: TinyEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: list[str]) -> None:
        raise OSError("no buffer space")

    adapter = VllmEngine(engine.llm, ProbeReceiver())
    sampling = final_only(max_tokens=200, ignore_eos=True)
    stopped, broken, other = [
        await adapter.start(PromptRequest(engine.prompt(PROMPTS[0]), sampling, name), 0)
        for name in ("stopped", "broken", "other")
    ]
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.engine_core, "abort_requests_async", fail)
        stopped.stop()
        broken.stop()
        for running in (stopped, broken):
            with pytest.raises(CandidateFailed, match=r"failed to abort.*no buffer space"):
                await running.result()
    assert (await other.result()).tokens == 200
    assert "failed to abort 2 requests" in caplog.text
