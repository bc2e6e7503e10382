"""A wrapper that reports the rewards of a trainer's reward function to the server."""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

from .._errors import DartsError
from .._rewards import Reward
from ._server import Server

TokenIds = Sequence[int]
SampledBatch = tuple[Sequence[TokenIds], Sequence[TokenIds]]
"""Prompts and completions of this process's last batch, of equal number."""

logger = logging.getLogger(__name__)


@dataclass
class RewardReport:
    """Counts of one function's rewards.

    `matched`, `repeated` and `unknown` as the server counted them; `unreported`: not delivered, for instance while the
    server is unavailable. A reward of None or NaN is skipped. `correct_above`: larger rewards are those of correct
    answers.
    """

    correct_above: float
    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unreported: int = 0
    _server: Server | None = field(default=None, repr=False)
    _last_batch: Callable[[], SampledBatch | None] = field(default=lambda: None, repr=False)
    _has_warned: bool = field(default=False, repr=False)

    def connect(self, server: Server, last_batch: Callable[[], SampledBatch | None]) -> None:
        """Report to this server. `last_batch` returns the batch being rewarded; None if the server did not shape it."""
        self._server, self._last_batch = server, last_batch

    def report(self, values: Sequence[Any], completion_ids: Sequence[TokenIds] | None) -> None:
        """Report the rewards of a batch. A failure of the server is counted, not raised."""
        if self._server is None:
            return self._count_unreported(len(values), "the function's trainer is not a DartsGRPOTrainer")
        if (batch := self._last_batch()) is None:
            return None
        prompts, completions = batch
        if completion_ids != completions or len(values) != len(completions):
            return self._count_unreported(len(values), "these are not the completions of the trainer's last batch")
        rewards = [
            self._reward(float(value), prompt, completion)
            for prompt, completion, value in zip(prompts, completions, values, strict=True)
            if value is not None and math.isfinite(value)
        ]
        try:
            with self._server.client() as client:
                counts = client.rewards(rewards)
        except DartsError as error:
            return self._count_unreported(len(rewards), str(error))
        self.matched += counts.matched
        self.repeated += counts.repeated
        self.unknown += counts.unknown
        return None

    def _reward(self, value: float, prompt: TokenIds, completion: TokenIds) -> Reward:
        correct = value > self.correct_above
        return Reward(reward=value, prompt_token_ids=prompt, completion_token_ids=completion, correct=correct)

    def _count_unreported(self, count: int, reason: str) -> None:
        self.unreported += count
        if not self._has_warned:
            logger.warning("%d rewards were not reported; further ones are not logged: %s", count, reason)
        self._has_warned = True


def report_rewards(function: Callable[..., Any], correct_above: float = 0.0) -> Callable[..., Any]:
    """Wrap a reward function, sync or async, so that its rewards are also reported to the server.

    Wrap one of a trainer's functions: the one that checks the answer, since a trajectory keeps its first reward.
    `correct_above`: a larger reward is that of a correct answer. The attribute `report` of the wrapper is its
    `RewardReport`.

    Raises:
        TypeError: it is a reward model or the name of one, not a function.
    """
    if not callable(function) or hasattr(function, "forward"):
        raise TypeError(f"report_rewards takes a function, got {type(function).__name__}; call the model in a function")
    report = RewardReport(correct_above)
    wrapper: Any = _wrap_async(function, report) if _is_async(function) else _wrap_sync(function, report)
    wrapper.report = report
    return cast(Callable[..., Any], wrapper)


def find_reports(functions: Sequence[Any]) -> list[RewardReport]:
    """Return the reports of those functions that are wrapped."""
    reports = (getattr(function, "report", None) for function in functions)
    return [report for report in reports if isinstance(report, RewardReport)]


def _wrap_sync(function: Callable[..., Any], report: RewardReport) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = list(function(*args, **kwargs))
        report.report(values, kwargs.get("completion_ids"))
        return values

    return wrapper


def _wrap_async(function: Callable[..., Awaitable[Any]], report: RewardReport) -> Callable[..., Awaitable[Any]]:
    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        values = list(await function(*args, **kwargs))
        report.report(values, kwargs.get("completion_ids"))
        return values

    return wrapper


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  # callable() is no answer
