"""Callers with and without keys that send everything at once, on the scripted engine: no limit is ever exceeded."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from darts_server.caller import Caller, caller
from darts_server.engine.port import NO_TOKENS, Probe, TokenSlice
from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine
from darts_server.exceptions import DartsError, InvalidRequest, Overloaded, QuotaReached
from darts_server.policy.shaping import Shaping
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.batches.run import AnswerFormat
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.rollout.spec import GroupSpec, JoinRequest
from darts_server.rollout.voting import Confidence, VoteRequest, VoteRunner
from darts_server.serving.admission import AdmissionLimits
from darts_server.types import FinishReason, PromptSpec, RequestOptions, Sample
from tests.rollout.helpers import AtOnce, Documents, Texts

CAPACITY, MAX_WAITING, SHARE = 6, 30, 16
KEYS = ("one", "other", None)
POLICIES = {
    "uniform": Shaping(redundancy=1.5),
    "adaptive": Shaping(redundancy=1.5, adaptive=True, max_redundancy=3.0),
}
MAX_TURNS = 3_000


class CountingEngine(ScriptedEngine):
    """Count what runs whenever a candidate starts. Requests begin with their caller's name and a slash."""

    def __init__(self, rng: Random) -> None:
        super().__init__(lambda _, __: Script(rng.randint(1, 12), delay=rng.randint(0, 3)))
        self.capacity = CAPACITY
        self.most, self.most_of_a_key = 0, 0
        self._rng = rng

    async def start(
        self,
        request: str,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> ScriptedCandidate:
        await turns(self._rng.randint(0, 3))
        candidate = await super().start(request, index, probe, order, prefix)
        by_caller = Counter(each.request.partition("/")[0] for each in self.running)
        self.most = max(self.most, len(self.running))
        self.most_of_a_key = max(self.most_of_a_key, by_caller["one"], by_caller["other"])
        return candidate


class SlowTexts(Texts):
    """Render prompts, which takes a while."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        await turns(self._rng.randint(0, 4))
        if self._rng.random() < 0.1:
            raise InvalidRequest("text", "is bad")
        return prompt.text or ""

    async def to_sample(self, output: list[int]) -> Sample:
        return Sample(output, None, f"#{len(output) % 2}", FinishReason.STOP)


@dataclass(frozen=True)
class Request:
    """``size``: of a group. ``groups``: of a batch. ``turn``: in which it arrives. ``leaves``: after so many turns."""

    kind: str
    key: str | None
    size: int
    groups: int
    policy: str
    turn: int
    leaves: int | None


REQUESTS = st.builds(
    Request,
    kind=st.sampled_from(["batch", "vote", "group", "unshaped", "singles"]),
    key=st.sampled_from(KEYS),
    size=st.integers(2, 12),
    groups=st.integers(1, 4),
    policy=st.sampled_from(sorted(POLICIES)),
    turn=st.integers(0, 20),
    leaves=st.none() | st.integers(1, 40),
)


class Server:
    """All ways to request candidates, as the routes use them."""

    def __init__(self, rng: Random) -> None:
        self.engine = CountingEngine(rng)
        planner = Planner(POLICIES, "uniform", Limits(64))
        self.rollouts: Rollouts[str, list[int]] = Rollouts(
            self.engine,
            planner,
            Statistics(Documents(), CAPACITY),
            Intervals(poll=0, allocation=0, join=0.001),
            admission_limits=AdmissionLimits(max_waiting=MAX_WAITING, max_per_caller=SHARE),
        )
        self.admission = self.rollouts.admission
        texts = SlowTexts(rng)
        self.batches = BatchRegistry(self.rollouts, texts, lambda _: planner)
        self.votes = VoteRunner(self.rollouts, texts, Confidence(Documents()), lambda *_: None, AtOnce())
        self._rng = rng

    async def serve(self, request: Request, number: int) -> None:
        await turns(request.turn)
        caller.set(Caller(request.key))
        prompt = f"{request.key or ''}/{number}"
        task = asyncio.create_task(self._work(request, prompt, number))
        if request.leaves is not None:
            await turns(request.leaves)
            task.cancel()
        with suppress(Overloaded, QuotaReached, InvalidRequest, asyncio.CancelledError):
            await task

    def _work(self, request: Request, prompt: str, number: int) -> Coroutine[Any, Any, object]:
        match request.kind:
            case "batch":
                return self._batch(request, prompt)
            case "vote":
                return self.votes.run(VoteRequest(PromptSpec(text=prompt), request.size, "#(.)"))
            case "group":
                return self._group(request, prompt, number)
            case "unshaped":
                return self._unshaped(request, prompt)
            case _:
                return self._singles(request, prompt, number)

    async def _batch(self, request: Request, prompt: str) -> None:
        prompts = [PromptSpec(text=f"{prompt}.{place}") for place in range(request.groups)]
        batch = await self.batches.start_or_find(BatchRequest(prompts, request.size), AnswerFormat())
        with batch.listen():
            await batch.wait()

    async def _group(self, request: Request, prompt: str, number: int) -> None:
        plan = self.rollouts.plan(request.size, RequestOptions(request.policy))
        assert plan is not None
        ticket = self.admission.admit(self.rollouts.estimate_candidates(plan))
        with ticket:
            await turns(self._rng.randint(0, 5))
            async with self.rollouts.gate.enter():
                allocation = await self.rollouts.allocator.allocate(plan, prompt)
                allocation = replace(allocation, candidates=ticket.resize_within_limits(allocation.candidates))
                spec = GroupSpec(plan, prompt, f"group {number}")
                run = self.rollouts.start(spec, allocation, ticket.split(allocation.candidates))
                try:
                    assert len([each async for each in run.trajectories()]) == plan.size
                finally:
                    run.cancel()

    async def _unshaped(self, request: Request, prompt: str) -> None:
        with self.admission.admit(request.size) as ticket:
            await turns(self._rng.randint(0, 5))
            running: list[ScriptedCandidate] = []
            try:
                for index in range(request.size):
                    running.append(await self.engine.start(prompt, index))
                ticket.mark_started()
                await asyncio.gather(*(each.result() for each in running))
            finally:
                for each in running:
                    each.stop()

    async def _singles(self, request: Request, prompt: str, number: int) -> None:
        plan = self.rollouts.plan(1, RequestOptions(request.policy, group_id=prompt, group_size=request.size))
        assert plan is not None

        async def single(place: int) -> None:
            caller.set(Caller(request.key))
            await turns(place)
            with self.admission.admit(1) as ticket:
                joining = JoinRequest(prompt, f"single {number}.{place}", plan, prompt, prompt, ticket)
                await self.rollouts.joiner.join(joining, lambda _: None)

        singles = [asyncio.create_task(single(place)) for place in range(request.size)]
        if request.leaves is not None:  # some of its callers leave, and their candidates run on
            for task in singles[1:]:
                if self._rng.random() < 0.5:
                    asyncio.get_running_loop().call_later(0.001, task.cancel)
        try:
            ends = await asyncio.gather(*singles, return_exceptions=True)
        finally:
            for task in singles:
                task.cancel()
        bugs = [end for end in ends if isinstance(end, Exception) and not isinstance(end, DartsError)]
        assert not bugs


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def play(requests: Sequence[Request], seed: int) -> None:
    server = Server(Random(seed))
    serving = asyncio.gather(*(server.serve(request, number) for number, request in enumerate(requests)))
    for _ in range(MAX_TURNS):
        await server.engine.step()
        if serving.done() and not server.rollouts.runs:
            break
    await serving
    assert server.engine.most <= CAPACITY + MAX_WAITING
    assert server.engine.most_of_a_key <= SHARE
    admission = server.admission
    assert (len(server.rollouts.runs), admission.not_in_engine, admission.unanswered_requests) == (0, 0, 0)
    for name in ("one", "other"):
        assert admission.count_free(name) == SHARE  # nothing that has ended is held


@given(st.lists(REQUESTS, max_size=14), st.integers(0, 2**16))
@example([Request("vote", "one", 12, 1, "uniform", 0, None)] * 12, 1)
@example([Request("batch", "one", 4, 2, "uniform", 0, None)] * 12, 2)
@example([Request("singles", "one", 8, 1, "uniform", 0, 30)] * 4, 3)
@example(
    # The first caller leaves when only some of its candidates have started.
    [
        Request("unshaped", "other", 3, 1, "adaptive", 0, 7),
        Request("batch", "one", 2, 1, "adaptive", 0, None),
        Request("batch", "one", 2, 1, "adaptive", 0, None),
        Request("batch", "other", 10, 1, "adaptive", 7, None),
    ],
    0,
)
def test_no_key_and_no_queue_ever_exceeds_its_limit(requests: list[Request], seed: int) -> None:
    asyncio.run(play(requests, seed))
