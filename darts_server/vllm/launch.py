"""Start vLLM's engine, and everything of ours that is bound to it."""

from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from darts_server.serving.gate import Gate
from darts_server.vllm.engine import VllmEngine, VllmRollouts
from darts_server.vllm.fingerprint import fingerprint_of
from darts_server.vllm.llm import MergeOptions, ShapingLLM
from darts_server.vllm.platform import refuse_speculation
from darts_server.vllm.probe.receiver import probing
from darts_server.vllm.prompt_renderer import VllmPromptRenderer
from darts_server.vllm.shutdown import CHILD_GRACE_SECONDS
from darts_server.vllm.steps import StepListener, Steps
from darts_server.vllm.structured_outputs import limit_checks
from darts_server.vllm.weights import VllmModel
from darts_server.weights.updates import Updates


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A started engine.

    ``port``: runs candidates. ``renderer``: renders prompts. ``model``: takes new weights.
    ``fingerprint``: of the model that it was started with, see `fingerprint_of`.
    """

    llm: ShapingLLM
    port: VllmEngine
    renderer: VllmPromptRenderer
    model: VllmModel
    model_name: str
    fingerprint: str
    _steps: Steps

    def shape(self, rollouts: VllmRollouts, merge_options: MergeOptions, updates: Updates | None = None) -> None:
        """Serve requests as groups of ``rollouts``, and vLLM's own weight routes through ``updates``."""
        self.observe_steps(rollouts.statistics.latency.observe)
        self.llm.shape(rollouts, merge_options)
        self.llm.updates = updates

    def observe_steps(self, listener: StepListener) -> None:
        """Report each step that decodes to ``listener``."""
        self._steps.listener = listener


@asynccontextmanager
async def start_engine(args: Namespace, gate: Gate | None = None) -> AsyncIterator[RunningEngine]:
    """Run the engine until the block ends. ``gate``: what every request passes."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    refuse_speculation(config.speculative_config)  # a model may bring its own
    fingerprint = fingerprint_of(config)
    steps = Steps()
    limit_checks()
    llm = ShapingLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
        # With --disable-log-stats vLLM makes no statistics, and nothing is learned of the engine's speed.
        stat_loggers=None if engine_args.disable_log_stats else [steps.logger],
    )
    assert isinstance(llm, ShapingLLM)
    try:
        await llm.reset_mm_cache()
        await llm.get_supported_tasks()  # vLLM caches them; generate() needs them without waiting
        llm.gate = gate or Gate()
        async with probing(llm) as probes:
            model = VllmModel(llm)
            llm.loras = model.loras
            renderer = VllmPromptRenderer(llm, args.chat_template)
            port = VllmEngine(llm, probes)
            name = args.served_model_name[0]
            yield RunningEngine(llm, port, renderer, model, name, fingerprint, steps)
    finally:
        if llm.rollouts is not None:
            llm.rollouts.statistics.flush()
        llm.shutdown(timeout=CHILD_GRACE_SECONDS)
