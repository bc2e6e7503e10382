"""The scripted engine of the soak, with random lengths, failures and hidden states."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from darts_server.engine.port import RequestTokens
from darts_server.engine.scripted import Script, ScriptedEngine, slice_from
from darts_server.exceptions import CandidateFailed, EngineRefused, InvalidRequest
from darts_server.policy.voting.answers import create_extractor
from darts_server.quality.head import Head
from darts_server.quality.report import TrainerReport
from darts_server.quality.types import HeadSettings
from darts_server.rollout.voting.answer_search import Pattern
from darts_server.types import FinishReason, PromptSpec, Sample

STEP_SECONDS = 0.02
"""Duration of a decode step on the loop's own clock."""
WIDTH = 16
LIMIT = 40
"""Tokens at which a candidate is truncated."""
BROKEN, REFUSED, LOST = 0.03, 0.004, 0.01
"""Shares of candidates that fail, that the engine refuses (which fails their group), and that it aborts."""
DOOMED = "doomed"
"""All candidates of a prompt with this text fail."""
INVALID = "invalid"
"""A prompt with this text is refused before anything starts."""
TRAIN_EVERY, TRAIN_STEPS = 256, 4
QUICK = HeadSettings(hidden=16, batch_size=32, capacity=512, half_life=256.0, min_labels=64, learning_rate=1e-2)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock advances with the engine's steps, so that a day passes in minutes."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Engine(ScriptedEngine):
    """The scripted engine, without the memory of finished candidates that tests use."""

    async def step(self) -> None:
        await super().step()
        self.started = self.running
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now += STEP_SECONDS


def random_scripts(seed: int) -> Callable[[str, int], Script]:
    """Script each candidate at random, seeded by its request and index."""

    def script(request: str, index: int) -> Script:
        rng = Random(f"{seed} {request} {index}")
        length = 1 + min(int(rng.lognormvariate(1.8, 0.8)), LIMIT - 1)
        fate = rng.random()
        if DOOMED in request or fate < BROKEN:
            return Script(length, error=CandidateFailed("scripted failure"))
        if fate < BROKEN + REFUSED:
            return Script(length, error=EngineRefused("scripted refusal"))
        if fate < BROKEN + REFUSED + LOST:
            return Script(length, aborted=True)
        reason = FinishReason.LENGTH if length == LIMIT else FinishReason.STOP
        return Script(length, rng.choice((0, 0, 0, 2)), finish_reason=reason, hidden=hidden(rng.random() < 0.5, rng))

    return script


def hidden(right: bool, rng: Random) -> Callable[[int], Sequence[float]]:
    """Hidden states of a trajectory, slightly different for right ones."""
    seed = rng.randrange(2**32)

    def at(_: int) -> list[float]:
        state: NDArray[np.float64] = np.random.default_rng(seed).normal(1.0 if right else -1.0, 2.0, WIDTH)
        return list(map(float, state))

    return at


class Texts:
    """A renderer whose requests are the prompts' texts."""

    def effective_sampling(self, sampling: Mapping[str, object]) -> Mapping[str, object]:
        return sampling

    async def make_request(self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str) -> str:
        if INVALID in (prompt.text or INVALID):
            raise InvalidRequest("text", "is scripted to be invalid")
        return prompt.text or ""

    def prompt_key(self, request: str) -> str:
        return request.partition("#")[0]

    def tokens(self, request: str) -> RequestTokens:
        return RequestTokens(max(1, len(request.split())))

    def tail_seed(self, request: str) -> Sequence[int] | None:
        return None

    async def to_sample(self, output: list[int]) -> Sample:
        return Sample(output, slice_from(output, 0).logprobs, f"#{len(output) % 3}", FinishReason.STOP)


class LocalHead(Head):
    """The quality head, trained in the event loop instead of a process of its own."""

    def __init__(self, width: int, trained: Callable[[bytes], None], settings: HeadSettings = QUICK) -> None:
        super().__init__(width, settings)
        self._learned = 0
        self._trained = trained

    @property
    def report(self) -> TrainerReport:
        return TrainerReport(self.status, self.prior, self.metrics(), self._learned, self.steps)

    def start(self) -> None:
        """Do nothing: there is no process."""

    def close(self) -> None:
        """Do nothing: there is no process."""

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool:
        learned = super().learn(hidden, position, target, survival)
        self._learned += learned
        if self._learned % TRAIN_EVERY == 0 and self.train(TRAIN_STEPS).steps:
            self._trained(self.state())
        return learned


class LocalFinder:
    """Finds answers in this process: patterns of the soak take no time."""

    async def check(self, pattern: Pattern) -> None:
        create_extractor(pattern)

    async def find(self, pattern: Pattern, text: str) -> str | None:
        return create_extractor(pattern).extract(text)
