"""Rewards on their way from a trainer's reward function to the server."""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

from .._errors import DartsError
from .._rewards import Reward
from ._link import Link

TokenIds = Sequence[int]
Sampled = tuple[Sequence[TokenIds], Sequence[TokenIds]]
"""Prompts and completions of this process's last batch, both of the batch's length."""

logger = logging.getLogger(__name__)


@dataclass
class RewardReport:
    """What became of one function's rewards.

    `matched`, `repeated`, `unknown` as the server counted them; `unreported`: lost on the way, as while the server is
    away. A reward of None or NaN is none, and counts nowhere. `correct_above`: larger ones are of right answers.
    """

    correct_above: float
    matched: int = 0
    repeated: int = 0
    unknown: int = 0
    unreported: int = 0
    _link: Link | None = field(default=None, repr=False)
    _sampled: Callable[[], Sampled | None] = field(default=lambda: None, repr=False)
    _warned: bool = field(default=False, repr=False)

    def bind(self, link: Link, sampled: Callable[[], Sampled | None]) -> None:
        """Report to this server. `sampled`: what is being rewarded; None if the server did not shape it."""
        self._link, self._sampled = link, sampled

    def tell(self, values: Sequence[Any], completion_ids: Sequence[TokenIds] | None) -> None:
        """Report a batch. Whatever is wrong with the server, this returns."""
        if self._link is None:
            return self._lose(len(values), "the function's trainer is not a DartsGRPOTrainer")
        if (sampled := self._sampled()) is None:
            return None
        prompts, completions = sampled
        if completion_ids != completions or len(values) != len(completions):
            return self._lose(len(values), "these are not the completions of the trainer's last batch")
        rewards = [
            self._reward(float(value), prompt, completion)
            for prompt, completion, value in zip(prompts, completions, values, strict=True)
            if value is not None and math.isfinite(value)
        ]
        try:
            with self._link.aside() as client:
                counts = client.rewards(rewards)
        except DartsError as error:
            return self._lose(len(rewards), str(error))
        self.matched += counts.matched
        self.repeated += counts.repeated
        self.unknown += counts.unknown
        return None

    def _reward(self, value: float, prompt: TokenIds, completion: TokenIds) -> Reward:
        right = value > self.correct_above
        return Reward(reward=value, prompt_token_ids=prompt, completion_token_ids=completion, correct=right)

    def _lose(self, count: int, why: str) -> None:
        self.unreported += count
        if not self._warned:
            logger.warning("%d rewards were not reported, and more may follow without a further word: %s", count, why)
        self._warned = True


def report_rewards(function: Callable[..., Any], correct_above: float = 0.0) -> Callable[..., Any]:
    """The reward function, sync or async, which also reports what it returns to the server.

    Wrap one of a trainer's functions: the one that says whether an answer is right, since a trajectory keeps its first
    reward. `correct_above`: a larger reward is a right answer's. `report` of what is returned is its `RewardReport`.

    Raises:
        TypeError: it is a reward model or the name of one, not a function.
    """
    if not callable(function) or hasattr(function, "forward"):
        raise TypeError(f"report_rewards takes a function, got {type(function).__name__}; call the model in a function")
    report = RewardReport(correct_above)
    wrapper: Any = _async(function, report) if _is_async(function) else _sync(function, report)
    wrapper.report = report
    return cast(Callable[..., Any], wrapper)


def reports(functions: Sequence[Any]) -> list[RewardReport]:
    """Of those functions that have one."""
    found = (getattr(function, "report", None) for function in functions)
    return [report for report in found if isinstance(report, RewardReport)]


def _sync(function: Callable[..., Any], report: RewardReport) -> Callable[..., Any]:
    @wraps(function)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        values = list(function(*args, **kwargs))
        report.tell(values, kwargs.get("completion_ids"))
        return values

    return reporting


def _async(function: Callable[..., Awaitable[Any]], report: RewardReport) -> Callable[..., Awaitable[Any]]:
    @wraps(function)
    async def reporting(*args: Any, **kwargs: Any) -> Any:
        values = list(await function(*args, **kwargs))
        report.tell(values, kwargs.get("completion_ids"))
        return values

    return reporting


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
