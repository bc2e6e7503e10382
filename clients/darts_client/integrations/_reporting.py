"""A wrapper that reports the rewards of a trainer's reward function to the server."""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
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
    """Counts of one function's rewards. Rewards of None or NaN are skipped."""

    correct_above: float
    """Answers with a larger reward are correct."""
    matched: int = 0
    """Rewards that the server matched to a trajectory."""
    repeated: int = 0
    """Rewards of trajectories that had a reward already."""
    unknown: int = 0
    """Rewards that match no trajectory."""
    unreported: int = 0
    """Rewards that were not delivered, for example because the server was unavailable."""
    _server: Server | None = field(default=None, repr=False)
    _last_batch: Callable[[], SampledBatch | None] = field(default=lambda: None, repr=False)
    _has_warned: bool = field(default=False, repr=False)

    def connect(self, server: Server, last_batch: Callable[[], SampledBatch | None]) -> None:
        """Report to this server. `last_batch` returns the batch that is rewarded, or None if it was not shaped."""
        self._server = server
        self._last_batch = last_batch

    def report(self, values: Sequence[Any], completion_ids: Sequence[TokenIds] | None) -> None:
        """Report the rewards of a batch. A failure of the server is counted, not raised."""
        if self._server is None:
            self._count_unreported(len(values), "the function's trainer is not a DartsGRPOTrainer")
            return
        batch = self._last_batch()
        # The completions are of an evaluation.
        if batch is None:
            return
        prompts, completions = batch
        # Rewards are matched by their order, so they must be of this batch.
        if completion_ids != completions or len(values) != len(completions):
            self._count_unreported(len(values), "these are not the completions of the trainer's last batch")
            return

        rewards = []
        for prompt, completion, value in zip(prompts, completions, values, strict=True):
            if value is None or not math.isfinite(value):
                continue
            reward = Reward(
                reward=float(value),
                prompt_token_ids=prompt,
                completion_token_ids=completion,
                correct=float(value) > self.correct_above,
            )
            rewards.append(reward)
        try:
            with self._server.client() as client:
                counts = client.rewards(rewards)
        except DartsError as error:
            self._count_unreported(len(rewards), str(error))
            return
        self.matched += counts.matched
        self.repeated += counts.repeated
        self.unknown += counts.unknown

    def _count_unreported(self, count: int, reason: str) -> None:
        self.unreported += count
        if not self._has_warned:
            logger.warning("%d rewards were not reported; further ones are not logged: %s", count, reason)
        self._has_warned = True


def report_rewards(function: Callable[..., Any], correct_above: float = 0.0) -> Callable[..., Any]:
    """Wrap a reward function, sync or async, so that its rewards are also reported to the server.

    ```python
    DartsGRPOTrainer(reward_funcs=[report_rewards(is_correct), is_short], ...)
    ```

    A trajectory keeps its first reward, so wrap only the function that checks the answer. An answer is correct if its
    reward is above `correct_above`. The attribute `report` of the wrapper is its `RewardReport`.

    Raises:
        TypeError: `function` is a reward model or its name, not a function.
    """
    if not callable(function) or hasattr(function, "forward"):
        raise TypeError(f"report_rewards takes a function, got {type(function).__name__}; call the model in a function")
    report = RewardReport(correct_above)

    @wraps(function)
    def report_sync(*args: Any, **kwargs: Any) -> Any:
        values = list(function(*args, **kwargs))
        report.report(values, kwargs.get("completion_ids"))
        return values

    @wraps(function)
    async def report_async(*args: Any, **kwargs: Any) -> Any:
        values = list(await function(*args, **kwargs))
        report.report(values, kwargs.get("completion_ids"))
        return values

    wrapper: Any = report_async if _is_async(function) else report_sync
    wrapper.report = report
    return cast(Callable[..., Any], wrapper)


def find_reports(functions: Sequence[Any]) -> list[RewardReport]:
    reports = [getattr(function, "report", None) for function in functions]
    return [report for report in reports if isinstance(report, RewardReport)]


def _is_async(function: Callable[..., Any]) -> bool:
    # An object may have a `__call__` that is a coroutine function.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  # callable() is no answer
