"""Start vLLM's engine, or several engines, with our objects around them."""

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

from darts_server.drafts.history import History
from darts_server.exceptions import InvalidSetting, UpdateFailed
from darts_server.serving.gate import Gate
from darts_server.vllm.api.engine import VllmEngine, VllmRollouts
from darts_server.vllm.api.llm import MergeOptions, ShapingLLM
from darts_server.vllm.api.probe_receiver import install_probes
from darts_server.vllm.api.shutdown import CHILD_GRACE_SECONDS
from darts_server.vllm.api.weights import VllmModel
from darts_server.vllm.engine_core.plugin import COUPLED
from darts_server.vllm.flags import send_images_whole
from darts_server.vllm.fleet.core import Engine, FleetCore
from darts_server.vllm.fleet.host import Start
from darts_server.vllm.fleet.transport import listen
from darts_server.vllm.requests.history import RequestHistory
from darts_server.vllm.requests.prompt_renderer import VllmPromptRenderer
from darts_server.vllm.requests.structured_outputs import limit_checks
from darts_server.weights.updates import Updates

JOIN_POLL_SECONDS = 0.05
MODEL_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A started engine, or several engines behind one port. ``fingerprint``: see `fingerprint_of`."""

    llm: ShapingLLM
    port: VllmEngine
    renderer: VllmPromptRenderer
    model: VllmModel
    model_name: str
    fingerprint: str

    def serve_groups(self, rollouts: VllmRollouts, merge_options: MergeOptions, updates: Updates | None = None) -> None:
        self.llm.held_requests.on_step = rollouts.statistics.latency.observe
        self.llm.rollouts = rollouts
        self.llm.merge_options = merge_options
        self.llm.updates = updates

    @asynccontextmanager
    async def keep_answers(self, history: History) -> AsyncIterator[None]:
        """Keep answers in ``history``, and send them to engines, until the block ends."""
        llm = self.llm
        adapters = self.model.loras

        def model_version() -> object:
            return llm.weight_version, None if adapters is None else adapters.changes

        request_history = RequestHistory(llm.engine_core, llm.output_processor, history, model_version)
        watching = asyncio.ensure_future(request_history.watch_engines())
        try:
            yield
        finally:
            watching.cancel()

    @property
    def vocabulary_size(self) -> int:
        return int(self.llm.vllm_config.model_config.get_vocab_size())

    @property
    def num_up(self) -> int:
        # A fleet's client removes lost engines from this list.
        return len(self.llm.engine_core.core_engines)

    @property
    def num_lost(self) -> int:
        core = self.llm.engine_core
        return core.num_lost if isinstance(core, FleetCore) else 0


class EngineHosts(Protocol):
    """Hosts of engines, which are started again when they end."""

    failure: InvalidSetting | None
    """Why a host cannot be started."""

    def restart(self, rank: int) -> None:
        """End an engine, so that its host is started again."""


RunHosts = Callable[[Sequence[bytes], int], AbstractAsyncContextManager[EngineHosts]]
"""Runs hosts in a block. Takes an encoded `Start` for each engine, and the number of GPUs of an engine."""


@asynccontextmanager
async def start_fleet(
    args: Namespace,
    argv: Sequence[str],
    count: int,
    run_hosts: RunHosts,
    host: str,
    watchdog: float,
) -> AsyncIterator[RunningEngine]:
    """Run ``count`` engines behind this process until the block ends.

    ``argv``: vLLM's flags. ``host``: address at which hosts reach this process. ``watchdog``: seconds that an
    engine with requests may send nothing; 0 for no limit.

    Raises:
        InvalidSetting: the engines cannot be placed, or do not start.
    """
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if config.parallel_config.data_parallel_size > 1:
        raise InvalidSetting(
            "--data-parallel-size makes one engine of several ranks, so it cannot be used with --replicas; omit either"
        )
    gpus_per_engine = config.parallel_config.world_size
    # vLLM's checks of requests and our `Ranks` treat each engine as a data-parallel rank.
    config.parallel_config.data_parallel_size = count

    core = FleetCore(config)
    token = secrets.token_hex(16)
    hub = await listen(host, token, core.add_engine)
    port = int(hub.sockets[0].getsockname()[1])
    flags = drop_api_keys(argv)
    starts = [msgspec.json.encode(Start(flags, host, port, token, rank)) for rank in range(count)]
    try:
        async with run_hosts(starts, gpus_per_engine) as hosts:
            core.on_lost = hosts.restart
            # Each host connects to the hub, which adds its engine to the core.
            while len(core.core_engines) < count:
                if hosts.failure is not None:
                    raise hosts.failure
                await asyncio.sleep(JOIN_POLL_SECONDS)

            with replace_engine_client(core):
                async with start_engine(args, config=config) as running:
                    llm = running.llm
                    core.processor = llm.output_processor
                    core.bring_to_state = partial(bring_to_state, llm, running.model)
                    watching = asyncio.ensure_future(core.lose_silent_engines(watchdog, lambda: llm.should_respond))
                    try:
                        yield running
                    finally:
                        watching.cancel()
                        # Engines that end with the server are not started again.
                        core.on_lost = lambda _: None
    finally:
        hub.close()


@contextmanager
def replace_engine_client(core: FleetCore) -> Iterator[None]:
    """Let an `AsyncLLM` that is created in the block use ``core``."""
    # AsyncLLM.__init__ calls this factory by name, and takes no client as an argument.
    factory = "make_async_mp_client"
    original = EngineCoreClient.__dict__[factory]
    setattr(EngineCoreClient, factory, staticmethod(lambda *_, **__: core))
    try:
        yield
    finally:
        setattr(EngineCoreClient, factory, original)


def drop_api_keys(argv: Sequence[str]) -> list[str]:
    """Return vLLM's flags without ``--api-key KEY…``, in all the ways in which vLLM reads it."""
    flags = []
    is_after_key_flag = False
    for word in argv:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            # vLLM reads underscores as dashes, and a beginning of the name that no other flag has.
            is_key_flag = name.replace("_", "-").startswith("--api-k")
            # After "--api-key=KEY" no further key follows.
            is_after_key_flag = is_key_flag and not equals
            if is_key_flag:
                continue
        if not is_after_key_flag:
            flags.append(word)
    return flags


async def bring_to_state(llm: ShapingLLM, model: VllmModel, engine: Engine) -> None:
    """Bring an engine that has started again to the weights, LoRA adapters, drafts and pause of the other engines."""

    def state_of_others() -> tuple[Any, ...]:
        return model.state, llm.weight_version, llm.is_pause_wanted, llm.is_drafting

    def must_wait() -> bool:
        # Weights that a trainer has written are in no file, so the engine waits for the next weights from files.
        return llm.written_by_trainer or (llm.updates is not None and not llm.updates.coordinator.is_settled)

    # The state may change at each await. Then begin again.
    while True:
        while must_wait():
            await asyncio.sleep(JOIN_POLL_SECONDS)

        state = state_of_others()
        try:
            await model.bring_to_state(engine.name)
        except UpdateFailed:
            # If the state has changed, the files of old weights may be gone, and the new weights are loaded.
            if state == state_of_others():
                raise
        call = partial(llm.engine_core._call_utility_async, engine=engine.name)
        # Arguments as in `ControlledLLM.collective_rpc`.
        await call("collective_rpc", "darts_speculate", None, (llm.is_drafting,), None)
        if llm.is_pause_wanted:
            # Arguments: mode and clear_cache.
            await call("pause_scheduler", "keep", True)
        else:
            await call("resume_scheduler")

        if state == state_of_others() and not must_wait():
            return


@asynccontextmanager
async def start_engine(args: Namespace, config: VllmConfig | None = None) -> AsyncIterator[RunningEngine]:
    """Run the engine until the block ends. ``config``: by default the configuration of ``args``."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if config is None:
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    fingerprint = fingerprint_of(config)
    # Prompts are not sent in the order in which they were rendered, so the engine's cache may lack an image.
    send_images_whole(config)
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
        # As vLLM's server does: drop the images of the engine's profiling run.
        await llm.reset_mm_cache()
        # vLLM caches the tasks, and generate() needs them without awaiting.
        await llm.get_supported_tasks()
        if config.speculative_config is not None and not all(await llm.collective_rpc("darts_expands_rightly")):
            raise InvalidSetting(
                "this version of vLLM samples from a wrong distribution with drafts on this device; omit --speculate "
                "and --speculative-config"
            )
        if COUPLED in dict(engine_args.additional_config) and not all(await llm.collective_rpc("darts_can_couple")):
            raise InvalidSetting("vLLM's workers on this platform cannot couple sampling; omit --sampling coupled")
        # The engine is checked. Every request passes this gate.
        llm.gate = Gate()
        async with install_probes(llm) as probes:
            model = VllmModel(llm)
            llm.loras = model.loras
            yield RunningEngine(
                llm,
                VllmEngine(llm, probes),
                VllmPromptRenderer(llm, args),
                model,
                model_name=args.served_model_name[0],
                fingerprint=fingerprint,
            )
    finally:
        if llm.rollouts is not None:
            llm.rollouts.statistics.flush()
        llm.shutdown(timeout=CHILD_GRACE_SECONDS)


def fingerprint_of(config: VllmConfig) -> str:
    """Return a hash of a model's configuration, and of size and time of its files if it is in a folder.

    Call it before the weights are loaded: if files are replaced later, the next start must get another hash.
    """
    model = config.model_config
    path = Path(model.model)
    paths = [path]
    if not path.is_file():
        paths = [file for pattern in MODEL_FILES for file in path.glob(pattern)]
    stats = [(file, file.stat()) for file in sorted(paths) if file.is_file()]
    description = {
        "model": model.model,
        "revision": model.revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        # Overrides such as another RoPE scaling change what is sampled.
        "config": [model.hf_config_path, repr(model.hf_overrides)],
        "load_format": str(config.load_config.load_format),
        "files": [(str(file.relative_to(path)), stat.st_size, stat.st_mtime_ns) for file, stat in stats],
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
