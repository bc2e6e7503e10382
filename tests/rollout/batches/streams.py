"""Batches that are listened to, on the scripted engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from darts_server.engine.scripted import Script, settle
from darts_server.exceptions import CandidateFailed, EngineRefused
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.batches.events import CandidateDiscarded, Event, GroupEnded, TokenDelta, TrajectorySelected
from darts_server.rollout.batches.registry import BatchRegistry, BatchRetention, IdempotencyKey
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.batches.submission import BatchRequest
from darts_server.rollout.plan import Limits, Planner
from darts_server.types import FinishReason, PromptSpec
from tests.rollout.batches.test_submission import Texts
from tests.rollout.helpers import House
from tests.rollout.joining.joining import SteppedLoop

Told = list[tuple[int, Event]]
SHAPINGS = {
    "shortest": Shaping(redundancy=1.5, num_longest=0),
    "sampled": Shaping(redundancy=2.0),
    "longest": Shaping(redundancy=1.5, tail=Tail.LONGEST),
    "darts": Shaping(redundancy=1.5, adaptive=True, max_redundancy=3.0),
    "cut": Shaping(redundancy=1.5, deadline=Deadline(quantile=0.5, exploration=0.0)),
    "shadow": Shaping(redundancy=1.5, num_longest=0, shadow=True),
}
POLICIES = [*SHAPINGS, "off"]


def batches(house: House, policy: str, keeping: BatchRetention | None = None) -> BatchRegistry[str, list[int]]:
    """Whose listeners look at candidates in every turn of the loop."""
    planner = Planner(SHAPINGS, policy, Limits(64))
    clock = asyncio.get_running_loop().time
    return BatchRegistry(house.rollouts, Texts(), lambda _: planner, keeping, interval=0, clock=clock)


def on_stepped_time(scenario: Coroutine[Any, Any, None]) -> None:
    """Where no time passes looking takes none, and so is done in every turn."""
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(scenario)


def claim(key: str = "key", body: bytes = b"body", owner: bytes = b"owner") -> IdempotencyKey:
    return IdempotencyKey(owner, key, body)


def ask(prompts: int, size: int = 4, num_groups: int | None = None) -> BatchRequest:
    specs = [PromptSpec(text=str(i), metadata={"place": i}) for i in range(prompts)]
    return BatchRequest(specs, size, num_groups=num_groups)


def tokens(chunk: int = 4) -> AnswerFormat:
    return AnswerFormat(StreamMode.TOKENS, chunk)


def scripted(seed: int, faults: float) -> Callable[[str, int], Script]:
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


async def hear(batch: BatchRun, after: int = 0, pauses: Sequence[int] = (0,)) -> Told:
    """All events after one; the listener sits still for so many moments between each two."""
    told: Told = []
    with batch.listen(after) as listener:
        while (found := await listener.next()) is not None:
            told.append(found)
            for _ in range(pauses[len(told) % len(pauses)]):
                await settle()
    return told


async def play(house: House, listening: "asyncio.Future[Told]") -> Told:
    """What a listener hears while the engine runs."""
    for _ in range(1000):
        if listening.done():
            break
        await house.engine.step()
    return await listening


@dataclass
class Heard:
    """What one candidate's events say."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: TrajectorySelected | CandidateDiscarded | None = None


def heard(told: Told) -> dict[str, Heard]:
    """By trajectory id. Checks that nothing is missing, repeated or told after the end."""
    candidates: dict[str, Heard] = {}
    for _, event in told:
        if isinstance(event, TokenDelta | TrajectorySelected | CandidateDiscarded):
            candidate = candidates.setdefault(event.trajectory_id, Heard())
            assert candidate.end is None
            assert event.trajectory_id.rpartition(":")[0].endswith(f"-{event.number}")
            if isinstance(event, TokenDelta):
                assert event.token_ids
                assert event.start == len(candidate.token_ids)
                candidate.token_ids += event.token_ids
                candidate.logprobs += event.logprobs or ()
            else:
                candidate.end = event
        elif isinstance(event, GroupEnded):
            ours = [c for name, c in candidates.items() if name.startswith(f"{event.result.group_id}:")]
            assert all(candidate.end is not None for candidate in ours)
    return candidates
