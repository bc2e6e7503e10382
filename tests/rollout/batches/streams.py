"""Helpers to read the events of batches on the scripted engine."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineRefused, ServerStopping
from darts_server.group.informative import Select
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.batches.batch import BatchRequest
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.batches.events import (
    BatchDone,
    CandidateDiscarded,
    Event,
    GroupResult,
    TokenDelta,
    TrajectorySelected,
)
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention, IdempotencyKey
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.plan import Limits, Planner
from darts_server.types import FinishReason, PromptSpec
from tests.rollout.helpers import Harness, Texts
from tests.rollout.joining.joining import SteppedLoop

T = TypeVar("T")
Events = list[tuple[int, Event]]
SIZE = 4
STOPPING = ServerStopping("the server is stopping", 30)
WHOLE, GROUPS = AnswerFormat(), AnswerFormat(StreamMode.GROUPS)
SHAPINGS = {
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "sampled": Shaping(redundancy=2.0),
    "longest": Shaping(redundancy=1.5, tail=Tail.LONGEST),
    "darts": Shaping(redundancy=1.5, adaptive=True, max_redundancy=3.0),
    "cut": Shaping(redundancy=1.5, deadline=Deadline(quantile=0.5, exploration=0.0)),
}
POLICIES = [*SHAPINGS, "off"]
BY_REWARDS = {"informative": Shaping(redundancy=2.0, select=Select.INFORMATIVE)}
"""Policies that need a verifier."""


def new_registry(
    harness: Harness,
    policy: str,
    retention: BatchRetention | None = None,
    texts: Texts | None = None,
    **more: Any,  # of `BatchRegistry`
) -> BatchRegistry[str, list[int]]:
    """Create a registry whose listeners poll candidates in every turn of the event loop."""
    planner = harness.rollouts.planner = Planner(SHAPINGS | BY_REWARDS, policy, Limits(64))
    clock = asyncio.get_running_loop().time
    return BatchRegistry(harness.rollouts, texts or Texts(), lambda _: planner, retention, clock=clock, **more)


def run_on_stepped_clock(scenario: Coroutine[Any, Any, None]) -> None:
    """Run on a clock that stands still. Polls then take no time, so they are done in every turn."""
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(scenario)


def idempotency_key(
    key: str = "key", body: bytes = b"body", owner: str | None = None, body_bytes: int = 0
) -> IdempotencyKey:
    return IdempotencyKey(owner, key, body, body_bytes)


def batch_request(prompts: int, size: int = 4, num_groups: int | None = None) -> BatchRequest:
    specs = [PromptSpec(text=str(i), metadata=b'{"place": %d}' % i) for i in range(prompts)]
    return BatchRequest(specs, size, num_groups=num_groups)


def request(*texts: str, carry: Carry = Carry.DROP, **more: Any) -> BatchRequest:
    specs = [PromptSpec(text=text, metadata=b'{"of":"%s"}' % text.encode()) for text in texts]
    return BatchRequest(specs, SIZE, carry=carry, **more)


def token_stream(chunk: int = 4) -> AnswerFormat:
    return AnswerFormat(StreamMode.TOKENS, chunk)


def by_text(text: str, index: int) -> Script:
    """The prompt ``"20"`` has lengths of 20, 21, …"""
    return Script(int(text) + index)


def random_script(seed: int, faults: float) -> Callable[[str, int], Script]:
    """Short lengths, so that ties are frequent; ``faults``: share of candidates that fail or are lost."""

    def script(prompt: str, index: int) -> Script:
        random = Random(f"{seed} {prompt} {index}")
        length, delay = random.choice([1, 2, 3, 5, 8, 9, 14, 20]), random.choice([0, 0, 0, 4])
        if random.random() < faults:
            error = random.choice([CandidateFailed("broken"), CandidateFailed("broken"), EngineRefused("no"), None])
            return Script(length, delay, error=error, aborted=error is None)
        if random.random() < 0.1:
            return Script(24, delay, finish_reason=FinishReason.LENGTH)
        return Script(length, delay)

    return script


async def begin(harness: Harness, registry: BatchRegistry[str, list[int]], batch: BatchRequest, steps: int) -> BatchRun:
    """Open a batch that has a listener to the end of the test, and run so many steps of it."""
    run = await registry.start_or_find(batch, WHOLE)
    run.listeners += 1
    await settle()
    await harness.steps(steps)
    return run


class Server:
    """A registry on a scripted engine."""

    def __init__(self, harness: Harness, registry: BatchRegistry[str, list[int]]) -> None:
        self.harness, self.registry = harness, registry
        self.engine = harness.engine

    async def run(self, batch: BatchRequest, answer: AnswerFormat = WHOLE) -> BatchDone:
        """Run a batch to its end."""
        run = await self.registry.start_or_find(batch, answer)
        with run.listen():
            return await play(self.harness, run.wait())

    async def begin(self, steps: int, *texts: str, **more: Any) -> BatchRun:
        return await begin(self.harness, self.registry, request(*texts, **more), steps)

    async def stop(self) -> None:
        self.registry.drain()
        await self.registry.hand_back(STOPPING)
        assert await self.registry.close() == 0
        await settle()
        assert len(self.harness.rollouts.runs) == len(self.engine.running) == 0
        assert self.harness.rollouts.admission.unanswered_requests == 0


def new_server(script: Callable[[str, int], Script], policy: str = "shortest", **more: Any) -> Server:
    harness = Harness(script)
    return Server(harness, new_registry(harness, policy, **more))


async def finish(harness: Harness, batch: BatchRun) -> BatchDone:
    await settle()
    await harness.engine.run()
    return await batch.wait()


def key(result: GroupResult) -> str:
    return result.prompt_key.removeprefix("key of ")


def lengths_of(result: GroupResult) -> dict[int, int]:
    assert result.aborted is not None
    return {index: len(aborted.sample.token_ids) for index, aborted in result.aborted.items()}


async def read_events(batch: BatchRun, after: int = 0, pauses: Sequence[int] = (0,)) -> Events:
    """Read all events after a number; ``pauses``: turns of the event loop to wait between two events."""
    events: Events = []
    feed = batch.feed
    assert feed is not None
    with batch.listen():
        while (found := await feed.next(after)) is not None:
            after = found[0]
            events.append(found)
            for _ in range(pauses[len(events) % len(pauses)]):
                await settle()
    return events


async def play(harness: Harness, waiting: Awaitable[T]) -> T:
    """Run the engine until a caller has what it waits for."""
    listening = asyncio.ensure_future(waiting)
    await settle()
    for _ in range(1000):
        if listening.done():
            break
        await harness.engine.step()
    return await listening


@dataclass
class CandidateEvents:
    """The content of one candidate's events."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: TrajectorySelected | CandidateDiscarded | None = None


def by_candidate(events: Events) -> dict[str, CandidateEvents]:
    """Collect events by trajectory id, and check that none is missing, repeated, or after the candidate's end."""
    candidates: dict[str, CandidateEvents] = {}
    for _, event in events:
        if isinstance(event, TokenDelta | TrajectorySelected | CandidateDiscarded):
            candidate = candidates.setdefault(event.trajectory_id, CandidateEvents())
            assert candidate.end is None
            assert event.trajectory_id.rpartition(":")[0].endswith(f"-{event.number}")
            if isinstance(event, TokenDelta):
                assert event.token_ids
                assert event.start == len(candidate.token_ids)
                candidate.token_ids += event.token_ids
                candidate.logprobs += event.logprobs or ()
            else:
                candidate.end = event
            if isinstance(event, TrajectorySelected):
                length = len(event.sample.token_ids)
                assert candidate.token_ids[:length] == list(event.sample.token_ids)
                assert event.cut or length == len(candidate.token_ids)
        elif isinstance(event, GroupResult):
            of_group = [c for name, c in candidates.items() if name.startswith(f"{event.group_id}:")]
            assert all(candidate.end is not None for candidate in of_group)
    return candidates
