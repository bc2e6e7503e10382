"""Start vLLM's engine, and everything of ours that is bound to it."""

import asyncio
import hashlib
import json
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import msgspec
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import EngineCoreClient

from darts_server.fleet.transport import Hub
from darts_server.serving.gate import Gate
from darts_server.vllm.engine import VllmEngine, VllmRollouts
from darts_server.vllm.engine_host import Start
from darts_server.vllm.fleet_core import FleetCore
from darts_server.vllm.held import StepListener
from darts_server.vllm.llm import MergeOptions, ShapingLLM
from darts_server.vllm.platform import refuse_speculation
from darts_server.vllm.probe.receiver import probing
from darts_server.vllm.prompt_renderer import VllmPromptRenderer
from darts_server.vllm.shutdown import CHILD_GRACE_SECONDS
from darts_server.vllm.structured_outputs import limit_checks
from darts_server.vllm.weights import VllmModel
from darts_server.weights.updates import Updates

LOOPBACK = "127.0.0.1"
MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json")
"""Of a model in a folder: its weights, and what they are put together by."""


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

    def shape(self, rollouts: VllmRollouts, merge_options: MergeOptions, updates: Updates | None = None) -> None:
        """Serve requests as groups of ``rollouts``, and vLLM's own weight routes through ``updates``."""
        self.observe_steps(rollouts.statistics.latency.observe)
        self.llm.shape(rollouts, merge_options)
        self.llm.updates = updates

    def observe_steps(self, listener: StepListener) -> None:
        """Report each step that decodes to ``listener``."""
        self.llm.held.on_step = listener


Place = Callable[[Sequence[bytes], int], AbstractAsyncContextManager[asyncio.Future[None]]]
"""Starts a host for each engine with what it reads, and again whenever it ends, until the block ends. The number: GPUs
that an engine's model is divided over. The future fails if it gives up."""


@asynccontextmanager
async def start_engines(args: Namespace, argv: Sequence[str], count: int, place: Place) -> AsyncIterator[RunningEngine]:
    """Run ``count`` engines, whose hosts ``place`` starts with vLLM's flags ``argv``, behind this process."""
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    divided_over = config.parallel_config.world_size
    config.parallel_config.data_parallel_size = count  # to everything above, each engine is a rank
    model: list[VllmModel] = []

    async def bring_to_state(engine: bytes) -> None:
        if model:
            await model[0].bring_to_state(engine)

    core = FleetCore(config, bring_to_state)
    token = secrets.token_hex(16)
    hub = Hub(token, core.joined)
    port = await hub.listen(LOOPBACK)
    starts = [msgspec.json.encode(Start(list(argv), LOOPBACK, port, token, rank)) for rank in range(count)]
    try:
        async with place(starts, divided_over) as placed:
            coming = asyncio.ensure_future(core.wait_for_all())
            await asyncio.wait([coming, placed], return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                coming.cancel()
                placed.result()
            with in_place_of_vllms_client(core):
                async with start_engine(args, config=config) as running:
                    model.append(running.model)
                    yield running
    finally:
        hub.close()


@contextmanager
def in_place_of_vllms_client(core: FleetCore) -> Iterator[None]:
    """Let vLLM use this client of its engine."""
    with patch.object(EngineCoreClient, "make_async_mp_client", staticmethod(lambda *_, **__: core)):
        yield


@asynccontextmanager
async def start_engine(
    args: Namespace, gate: Gate | None = None, config: VllmConfig | None = None
) -> AsyncIterator[RunningEngine]:
    """Run the engine until the block ends. ``gate``: what every request passes. ``config``: if not by ``args``."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if config is None:
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    refuse_speculation(config.speculative_config)  # a model may bring its own
    fingerprint = fingerprint_of(config)
    limit_checks()
    llm = ShapingLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
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
            yield RunningEngine(llm, port, renderer, model, name, fingerprint)
    finally:
        if llm.rollouts is not None:
            llm.rollouts.statistics.flush()
        llm.shutdown(timeout=CHILD_GRACE_SECONDS)


def fingerprint_of(config: VllmConfig) -> str:
    """Return a hash of a model's name, version and numbers, and of size and time of its files if they are in a folder.

    To be called before the weights are loaded: files that are replaced later give another one at the next start.
    """
    model = config.model_config
    described = {
        "model": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "config": [model.hf_config_path, repr(model.hf_overrides)],  # such as another rope scaling
        "load_format": str(config.load_config.load_format),
        "files": _files(Path(model.model)),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file that belongs to a model; none of a name on a hub."""
    paths = [model] if model.is_file() else [path for pattern in MODEL_FILES for path in model.glob(pattern)]
    stats = [(path, path.stat()) for path in sorted(paths) if path.is_file()]
    return [(str(path.relative_to(model)), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
