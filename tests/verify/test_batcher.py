"""The queue of a verifier, with a scripted runner and a clock that only the tests advance."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from darts_server.engine.scripted import settle
from darts_server.types import PromptSpec, VerifierResult
from darts_server.verify.batcher import Batcher, BatchLimits, Runner
from darts_server.verify.calls import Call
from darts_server.verify.types import Answer
from tests.rollout.joining.joining import SteppedLoop

pytestmark = pytest.mark.anyio

RIGHT = Call(VerifierResult.REWARD, 1.0)
WAIT_LIMIT = 600.0


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": SteppedLoop}


async def advance(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await settle()


class Scripted(Runner):
    """A runner whose calls for "hang" last until it is opened, and whose calls for "bug" raise."""

    def __init__(self, answers: int = 1) -> None:
        self.limits = BatchLimits(answers, shared=False)
        self.served: list[str] = []
        self.opened = asyncio.Event()

    async def run(self, answers: Sequence[Answer]) -> Sequence[Call | None]:
        self.served += [answer.text for answer in answers]
        if any(answer.text == "hang" for answer in answers):
            await self.opened.wait()
        if any(answer.text == "bug" for answer in answers):
            raise LookupError("bug")
        return [RIGHT] * len(answers)


def answer(text: str) -> Answer:
    return Answer(PromptSpec(text="1+1"), text, (1,))


class Queue:
    """A batcher of one runner, with the results of all ended calls."""

    def __init__(self, answers: int = 1) -> None:
        self.runner = Scripted(answers)
        self.results: list[VerifierResult] = []
        self.batcher = Batcher([self.runner], WAIT_LIMIT, lambda call, _: self.results.append(call.result))

    def call(self, *texts: str) -> list[asyncio.Future[Call]]:
        return [self.batcher.submit(answer(text)) for text in texts]


def results_of(futures: Sequence[asyncio.Future[Call]]) -> list[VerifierResult]:
    return [future.result().result for future in futures]


async def test_an_answer_that_is_called_or_waits_beyond_the_limit_has_no_verdict() -> None:
    queue = Queue()
    futures = queue.call("hang", "good", "good")
    await settle()
    await advance(WAIT_LIMIT - 1)
    assert not any(future.done() for future in futures)
    await advance(1)
    assert results_of(futures) == [VerifierResult.TIMEOUT] * 3
    detail = futures[0].result().detail
    assert detail.startswith("gave no verdict within 600 seconds, as too many answers wait: raise")
    assert queue.runner.served == ["hang"], "an answer that waits in the queue ends too"

    queue.runner.opened.set()
    [later] = queue.call("good")
    assert await later == RIGHT
    assert queue.runner.served == ["hang", "good"], "an answer whose limit is over is not called"
    assert queue.results == [VerifierResult.TIMEOUT] * 3 + [VerifierResult.REWARD], "each answer is counted once"
    await queue.batcher.close()


async def test_a_younger_answer_gets_its_verdict_after_late_answers() -> None:
    queue = Queue()
    late = queue.call("hang", "good")
    await settle()
    await advance(WAIT_LIMIT / 2)
    [young] = queue.call("young")
    await advance(WAIT_LIMIT / 2)
    assert results_of(late) == [VerifierResult.TIMEOUT] * 2
    assert not young.done()
    queue.runner.opened.set()
    assert await young == RIGHT
    await queue.batcher.close()


async def test_answers_of_a_shared_call_end_at_their_limit() -> None:
    queue = Queue(answers=3)
    futures = queue.call("good", "hang", "good")
    await settle()
    await advance(WAIT_LIMIT)
    assert results_of(futures) == [VerifierResult.TIMEOUT] * 3
    queue.runner.opened.set()
    assert await asyncio.gather(*queue.call("good", "good")) == [RIGHT] * 2
    assert len(queue.results) == 5
    await queue.batcher.close()


async def test_an_ended_or_cancelled_call_is_not_ended_again_at_its_limit() -> None:
    queue = Queue()
    first, second = queue.call("good", "good")
    second.cancel()
    assert await first == RIGHT
    await advance(WAIT_LIMIT)
    assert queue.results == [VerifierResult.REWARD]
    await queue.batcher.close()


async def test_each_answer_has_its_own_limit() -> None:
    queue = Queue()
    futures = queue.call("hang")
    await settle()
    for _ in range(4):
        await advance(100)
        futures += queue.call("good")
    await advance(199)
    for late in range(5):
        assert [future.done() for future in futures] == [True] * late + [False] * (5 - late)
        await advance(1)
        assert [future.done() for future in futures] == [True] * (late + 1) + [False] * (4 - late)
        await advance(99)
    assert queue.results == [VerifierResult.TIMEOUT] * 5
    await queue.batcher.close()


async def test_answers_that_wait_are_called_after_an_unexpected_error() -> None:
    queue = Queue()
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
    futures = queue.call("bug", "good")
    await settle()
    assert [future.done() for future in futures] == [True, True]
    assert futures[1].result() == RIGHT
    await queue.batcher.close()
    assert [type(error) for error in raised] == [LookupError]


async def test_closing_ends_an_answer_whose_call_is_about_to_begin() -> None:
    queue = Queue()
    futures = queue.call("good")
    # Now the batch has a task, which has not begun.
    await asyncio.sleep(0)
    await queue.batcher.close()
    assert results_of(futures) == [VerifierResult.CRASH]
    assert queue.runner.served == []
