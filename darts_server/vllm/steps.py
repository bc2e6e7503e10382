"""Measure the engine's steps, from the statistics that vLLM collects anyway."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

StepListener = Callable[[int, float, int], None]
"""Gets how many sequences got a token in a step, its seconds, and for how many of them the token was the first."""


class Steps:
    """Report each step that decoded, see `StepListener`."""

    def __init__(self) -> None:
        self.listener: StepListener | None = None

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """Create the logger of one engine; vLLM calls this for each."""
        return _StepLogger(vllm_config, engine_index, self)

    def record(self, stats: IterationStats) -> None:
        between_tokens, started = stats.inter_token_latencies_iter, len(stats.time_to_first_tokens_iter)
        # Several tokens per sequence have no step time each. A step in which all are the first has none either.
        one_each = stats.num_generation_tokens == len(between_tokens) + started
        if self.listener is not None and between_tokens and one_each and (seconds := min(between_tokens)) > 0:
            # The minimum: a sequence that was preempted in between waited longer than the step took.
            self.listener(len(between_tokens) + started, seconds, started)


class _StepLogger(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int, steps: Steps) -> None:
        self._steps = steps

    def record(self, scheduler_stats: Any, iteration_stats: IterationStats | None, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self._steps.record(iteration_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM's own loggers log it."""
