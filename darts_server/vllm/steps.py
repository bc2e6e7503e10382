"""The times of the engine's decode steps, from the statistics that vLLM keeps anyway."""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

Listener = Callable[[int, float], None]


class Steps:
    """Tells its listener, of each step that only decoded, how many sequences ran and how many seconds it took."""

    def __init__(self) -> None:
        self.listener: Listener | None = None

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """What vLLM makes for each engine."""
        return _StepLogger(vllm_config, engine_index, self)

    def note(self, stats: IterationStats) -> None:
        between_tokens = stats.inter_token_latencies_iter
        # A step with a prompt in it takes longer than its decoding; one with several tokens a sequence says nothing.
        decoding_only = stats.num_generation_tokens == len(between_tokens) and not stats.time_to_first_tokens_iter
        if self.listener is not None and between_tokens and decoding_only and (seconds := min(between_tokens)) > 0:
            # Whoever was put aside for a while waited longer than the step took.
            self.listener(len(between_tokens), seconds)


class _StepLogger(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int, steps: Steps) -> None:
        self._steps = steps

    def record(self, scheduler_stats: Any, iteration_stats: IterationStats | None, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            self._steps.note(iteration_stats)

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say it."""
