"""Start vLLM's engine, and everything of ours that is bound to it."""

import asyncio
import hashlib
import json
import secrets
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core_client import EngineCoreClient

from darts_server.exceptions import InvalidSetting, UpdateFailed
from darts_server.serving.gate import Gate
from darts_server.vllm.api.engine import VllmEngine, VllmRollouts
from darts_server.vllm.api.llm import MergeOptions, ShapingLLM
from darts_server.vllm.api.probe_receiver import probing
from darts_server.vllm.api.shutdown import CHILD_GRACE_SECONDS
from darts_server.vllm.api.weights import VllmModel
from darts_server.vllm.flags import refuse_speculation
from darts_server.vllm.fleet.core import Engine, FleetCore
from darts_server.vllm.fleet.host import Start
from darts_server.vllm.fleet.transport import listen
from darts_server.vllm.requests.prompt_renderer import VllmPromptRenderer
from darts_server.vllm.requests.structured_outputs import limit_checks
from darts_server.weights.updates import Updates

JOIN_POLL_SECONDS = 0.05  # how often is looked whether engines have come, and whether an update has ended
MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json")
"""Of a model in a folder: its weights, and what they are put together by."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A started engine, or several behind one port.

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
        self.llm.held.on_step = rollouts.statistics.latency.observe
        self.llm.rollouts, self.llm.merge_options, self.llm.updates = rollouts, merge_options, updates

    @property
    def up(self) -> int:
        """How many engines take requests."""
        return len(self.llm.engine_core.core_engines)

    @property
    def lost(self) -> int:
        """How many engines were lost so far."""
        return self.llm.engine_core.lost if isinstance(self.llm.engine_core, FleetCore) else 0


class Places(Protocol):
    """Hosts of engines that run somewhere, each started again whenever it ends."""

    failure: InvalidSetting | None  # why one of them cannot be started, again and again

    def restart(self, rank: int) -> None:
        """End what is left of an engine, so that it is started again."""


Place = Callable[[Sequence[bytes], int], AbstractAsyncContextManager[Places]]
"""Starts a host for each engine with what it reads, and runs them until the block ends. The number: GPUs that an
engine's model is divided over."""


@asynccontextmanager
async def start_fleet(
    args: Namespace, argv: Sequence[str], count: int, place: Place, host: str, watchdog: float
) -> AsyncIterator[RunningEngine]:
    """Run several engines behind this process until the block ends.

    ``place``: starts ``count`` engines with vLLM's flags ``argv``. ``host``: address at which their hosts reach this
    process. ``watchdog``: seconds in which an engine that has requests must send something; 0 for any.

    Raises:
        InvalidSetting: they cannot be placed, or do not start.
    """
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if config.parallel_config.data_parallel_size > 1:
        raise InvalidSetting("--data-parallel-size cannot be used with --replicas: it makes one engine of several")
    divided_over = config.parallel_config.world_size
    config.parallel_config.data_parallel_size = count  # to everything above, each engine is a rank
    core, token = FleetCore(config), secrets.token_hex(16)
    hub = await listen(host, token, core.joined)
    port = int(hub.sockets[0].getsockname()[1])
    starts = [msgspec.json.encode(Start(without_keys(argv), host, port, token, rank)) for rank in range(count)]
    try:
        async with place(starts, divided_over) as places:
            core.on_lost = places.restart
            while len(core.core_engines) < count:
                if places.failure is not None:
                    raise places.failure
                await asyncio.sleep(JOIN_POLL_SECONDS)
            with engine_client(core):
                async with start_engine(args, config=config) as running:
                    llm = running.llm
                    core.processor = llm.output_processor
                    core.bring_to_state = partial(bring_to_state, llm, running.model)
                    watching = asyncio.ensure_future(core.lose_silent(watchdog, lambda: llm.should_respond))
                    try:
                        yield running
                    finally:
                        watching.cancel()
                        core.on_lost = lambda _: None
    finally:
        hub.close()


@contextmanager
def engine_client(core: FleetCore) -> Iterator[None]:
    """Make an `AsyncLLM` that is created in the block use ``core`` as its client of the engine core."""
    # AsyncLLM.__init__ calls this factory by name, and takes no client as an argument.
    factory = "make_async_mp_client"
    original = EngineCoreClient.__dict__[factory]
    setattr(EngineCoreClient, factory, staticmethod(lambda *_, **__: core))
    try:
        yield
    finally:
        setattr(EngineCoreClient, factory, original)


def without_keys(argv: Sequence[str]) -> list[str]:
    """Return vLLM's flags without ``--api-key KEY…``, which engines need not know."""
    kept, is_key = [], False
    for word in argv:
        is_key = word.startswith("--api-key") or (is_key and not word.startswith("-"))
        if not is_key:
            kept.append(word)
    return kept


async def bring_to_state(llm: ShapingLLM, model: VllmModel, engine: Engine) -> None:
    """Return when an engine that has started again has the weights, LoRA adapters and pause of the others.

    In a turn of the event loop in which they have not changed since.

    Raises:
        UpdateFailed: it could not load them.
    """

    def state_of_others() -> tuple[Any, ...]:
        return model.state, llm.weight_version, llm.is_pause_wanted

    def is_changing() -> bool:
        """Whether it has to wait; for the next weights from files, if those of now are in none."""
        return llm.written_by_trainer or (llm.updates is not None and not llm.updates.coordinator.is_settled)

    while True:
        while is_changing():
            await asyncio.sleep(JOIN_POLL_SECONDS)
        state = state_of_others()
        try:
            await model.bring_to_state(engine.name)
        except UpdateFailed:
            if state == state_of_others():  # otherwise other weights have taken the place of these
                raise
        pause = ("pause_scheduler", "keep", True) if llm.is_pause_wanted else ("resume_scheduler",)
        await llm.engine_core._call_utility_async(*pause, engine=engine.name)
        if state == state_of_others() and not is_changing():
            return


@asynccontextmanager
async def start_engine(args: Namespace, config: VllmConfig | None = None) -> AsyncIterator[RunningEngine]:
    """Run the engine until the block ends. ``config``: if not by ``args``."""
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
        llm.gate = Gate()
        async with probing(llm) as probes:
            model = VllmModel(llm)
            llm.loras = model.loras
            port, renderer = VllmEngine(llm, probes), VllmPromptRenderer(llm, args)
            yield RunningEngine(llm, port, renderer, model, args.served_model_name[0], fingerprint)
    finally:
        if llm.rollouts is not None:
            llm.rollouts.statistics.flush()
        llm.shutdown(timeout=CHILD_GRACE_SECONDS)


def fingerprint_of(config: VllmConfig) -> str:
    """Return a hash of a model's name, version and numbers, and of size and time of its files if they are in a folder.

    To be called before the weights are loaded: files that are replaced later give another one at the next start.
    """
    model, path = config.model_config, Path(config.model_config.model)
    paths = [path] if path.is_file() else [file for pattern in MODEL_FILES for file in path.glob(pattern)]
    stats = [(file, file.stat()) for file in sorted(paths) if file.is_file()]
    described = {
        "model": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "config": [model.hf_config_path, repr(model.hf_overrides)],  # such as another rope scaling
        "load_format": str(config.load_config.load_format),
        "files": [(str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns) for file, stat in stats],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
