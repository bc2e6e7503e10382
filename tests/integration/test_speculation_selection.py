"""Groups are selected exactly with drafts, when candidates get several tokens in a step.

With drafts a seed does not repeat an answer, so lengths of stopped candidates cannot be found by another run. They are
at least one token more than the candidate had. The selection must be that of brute force both if all stopped
candidates ended there, and if none of them ever ended.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from math import ceil
from random import Random

import pytest
from prometheus_client import REGISTRY
from vllm.outputs import RequestOutput

from darts_server.offline.demo.problems import sample_problem
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.types import FinishReason
from darts_server.vllm.flags import add_sampling_flags
from examples.tiny_rl.engine import TinyEngine, shaping_engine
from tests.integration.test_exactness import (
    CANDIDATES,
    COHORT,
    FIXED,
    POLICIES,
    SIZE,
    Ended,
    expected,
    tail_draws,
    was_hopeless,
)

pytestmark = [pytest.mark.engine, pytest.mark.anyio, pytest.mark.timeout(900)]
NEVER = 1_000_000
TEXTS = [sample_problem(Random(number)).prompt for number in range(COHORT)]


@pytest.fixture(scope="module")
async def engine(environment: None, anyio_backend: str) -> AsyncIterator[TinyEngine]:
    """An engine with drafts that has answered all prompts before."""
    async with shaping_engine(POLICIES, *add_sampling_flags([], speculate=True, couple=False)) as running:
        for epoch in range(2):
            await asyncio.gather(*(running.generate(text, f"earlier-{epoch}-{text}", "off", n=SIZE) for text in TEXTS))
        yield running


def accepted() -> float:
    """Return the number of drafted tokens that were right."""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return sum(sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name)


def outcomes(candidates: Sequence[CandidateRecord], stopped_at: int | None = None) -> list[Ended]:
    """Return all lengths, where stopped and cut candidates end at their next token, or ``stopped_at`` the same."""
    found = []
    for candidate in candidates:
        if candidate.finish_reason is None or candidate.cut:
            found.append((stopped_at or candidate.tokens + 1, True))
        else:
            found.append((candidate.tokens, candidate.finish_reason is FinishReason.STOP))
    return found


def check_selection(engine: TinyEngine, record: GroupRecord, policy: str, text: str, seed: int) -> None:
    """Check that brute force selects the same candidates, whatever the stopped candidates would have generated."""
    draws = tail_draws(engine, text, seed, CANDIDATES)
    selected = {candidate.index for candidate in record.selected}
    for stopped_at in (None, NEVER):
        lengths = outcomes(record.candidates, stopped_at)
        assert selected == expected(policy, lengths, SIZE, draws), (policy, lengths)
    shorts = SIZE if policy == "shortest" else SIZE - 1
    for candidate in record.candidates:
        if candidate.finish_reason is None and candidate.selected_as is None:
            assert was_hopeless(record, candidate, shorts), record


def check_trajectories(record: GroupRecord, answer: RequestOutput) -> None:
    """Check that each answer has the tokens and log-probs that its candidate counts."""
    assert len(answer.outputs) == SIZE
    for candidate, choice in zip(record.selected, answer.outputs, strict=True):
        assert len(choice.token_ids) == candidate.tokens
        assert choice.logprobs is not None
        assert len(choice.logprobs) == candidate.tokens
        if candidate.cut:
            assert choice.finish_reason == "length"


async def run_groups(engine: TinyEngine, policy: str, first_seed: int, texts: Sequence[str]) -> list[GroupRecord]:
    """Run a group of each prompt in one cohort, and return their records."""
    names = [f"{policy}-{first_seed + place}" for place in range(len(texts))]
    before = accepted()
    answers = await asyncio.gather(
        *(
            engine.generate(text, name, policy, n=SIZE, seed=first_seed + place, logprobs=0)
            for place, (text, name) in enumerate(zip(texts, names, strict=True))
        )
    )
    assert accepted() > before
    records = [engine.records[name] for name in names]
    for record, answer in zip(records, answers, strict=True):
        check_trajectories(record, answer)
    return records


@pytest.mark.parametrize("policy", FIXED)
async def test_groups_equal_the_brute_force_selection_with_drafts(
    engine: TinyEngine, policy: str, nightly: bool
) -> None:
    rounds = 8 if nightly else 1
    stopped = 0
    for number in range(rounds):
        seed = number * COHORT
        records = await run_groups(engine, policy, seed, TEXTS)
        for place, record in enumerate(records):
            check_selection(engine, record, policy, TEXTS[place], seed + place)
            stopped += sum(candidate.finish_reason is None for candidate in record.candidates)
    if policy == "longest":
        assert stopped == 0
    else:
        assert stopped > rounds * COHORT


async def test_a_deadline_cuts_tails_to_the_token_with_drafts(engine: TinyEngine, nightly: bool) -> None:
    cut = 0
    for number in range(4 if nightly else 1):
        seed = 1000 + number * COHORT
        before = len(engine.cohorts)
        records = await run_groups(engine, "cut", seed, TEXTS)
        [cohort] = engine.cohorts[before:]
        assert cohort.deadline is not None
        for place, record in enumerate(records):
            check_selection(engine, record, "sampled", TEXTS[place], seed + place)
            own = {sorted(outcomes(record.candidates, at))[SIZE - 1][0] for at in (None, NEVER)}
            assert record.deadline in {None, *(max(cohort.deadline, length) for length in own)}
            for candidate in record.selected:
                if candidate.cut:
                    assert candidate.tokens == record.deadline
                    cut += 1
    assert cut > 0


async def test_a_cap_cuts_candidates_to_the_token_with_drafts(engine: TinyEngine, nightly: bool) -> None:
    cut = 0
    place_of_limit = ceil(SIZE * 2 / 3)
    for number in range(4 if nightly else 1):
        before = len(engine.cohorts)
        records = await run_groups(engine, "cap", 2000 + number * COHORT, TEXTS)
        [cohort] = engine.cohorts[before:]
        assert cohort.deadline is not None
        cut_length = ceil(1.25 * cohort.deadline)
        for record in records:
            assert [candidate.index for candidate in record.selected] == list(range(SIZE))
            finished = sorted(
                candidate.tokens for candidate in record.candidates if candidate.finish_reason is FinishReason.STOP
            )
            own = cut_length
            if len(finished) >= place_of_limit:
                own = finished[place_of_limit - 1]
            limit = min(cut_length, max(cohort.deadline, own))
            # Each group learns its own limit.
            cuts = [candidate.ended_at for candidate in record.selected if candidate.cut]
            for candidate in record.selected:
                if candidate.cut:
                    assert candidate.tokens == limit
                    cut += 1
                elif candidate.tokens > limit:
                    # It had finished before the limit was known.
                    assert candidate.ended_at is not None
                    assert all(time is not None and candidate.ended_at <= time for time in cuts)
    assert cut > 0
