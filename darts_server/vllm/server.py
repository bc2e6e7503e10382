"""vLLM's own server around the engine that shapes: its app, its routes, its flags."""

import asyncio
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop
from fastapi import FastAPI
from vllm import envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.exceptions import InvalidSetting
from darts_server.serving.gate import Gate
from darts_server.vllm.compat import doubt, vllm_version
from darts_server.vllm.compat.entrypoints import (
    build_app,
    configure_logging,
    get_uvicorn_log_config,
    init_app_state,
    make_arg_parser,
    serve_http,
    setup_server,
    validate_parsed_serve_args,
)
from darts_server.vllm.engine import VllmEngine, VllmPort, VllmPrompts, VllmRollouts
from darts_server.vllm.life import (
    CHILD_GRACE_SECONDS,
    CONNECTION_SECONDS,
    SIGNALS,
    Living,
    exit_code,
    leave_at_once,
    settle_grace,
    take_signals,
    watched,
)
from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.platform import prepare
from darts_server.vllm.probe.receiver import probing
from darts_server.vllm.prompter import VllmPrompter
from darts_server.vllm.requests import ReadOptions, attach, with_raw_names
from darts_server.vllm.steps import Steps
from darts_server.vllm.traces import Traces
from darts_server.vllm.weights import VllmModel
from darts_server.weights.port import Groups, Model
from darts_server.weights.updates import Updates

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the rooms above bring: made by ``app.py``.

    ``rollouts``: from the engine, what makes its requests, and the served model name. ``extend``: adds to vLLM's app
    before it serves. ``updates``: from the model, the
    groups that run and its served name, what gives it new weights. ``gate``: what requests pass.
    ``read_keys_again``: done on SIGHUP. ``living``: how the server ends.
    """

    rollouts: Callable[[VllmPort, VllmPrompts, str], VllmRollouts]
    read_options: ReadOptions
    extend: Callable[[FastAPI], None]
    updates: Callable[[Model, Groups, str], Updates] | None = None
    gate: Gate = field(default_factory=Gate)
    read_keys_again: Callable[[], None] | None = None
    living: Living = field(default_factory=Living)


def parse(argv: Sequence[str]) -> Namespace:
    """vLLM's flags, as ``vllm serve`` takes them, checked; exits with a message on a wrong one.

    Raises:
        InvalidSetting: a mode of vLLM's in which groups could not be shaped.
    """
    cli_env_setup()  # type: ignore[no-untyped-call]
    empty = FlexibleArgumentParser(prog="darts-server serve", usage="%(prog)s MODEL [options]")  # type: ignore[no-untyped-call]
    args: Namespace = make_arg_parser(empty).parse_args(list(argv))
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    _refuse_other_modes(args)
    args.host = args.host or LOOPBACK
    args.served_model_name = with_raw_names(args.served_model_name or [args.model])
    prepare(args)
    return args


def taken_keys(args: Namespace) -> list[str]:
    """The API keys of vLLM's flag or variable. It is not left with them: it would refuse those that come later.

    Its processes do not inherit them either.
    """
    given: list[str] = args.api_key or [os.environ.get(KEY_VARIABLE, "")]
    args.api_key = None
    os.environ.pop(KEY_VARIABLE, None)
    return [key for key in given if key]


def traces(args: Namespace) -> list[Traces]:
    """What has a span made of each group, if vLLM's flag says where spans go. Without OpenTelemetry it says so."""
    return [] if args.otlp_traces_endpoint is None else [Traces()]


def serve(args: Namespace, wiring: Wiring) -> int:
    """Serve until told to stop; the process's exit code: 1 if the engine died."""
    configure_logging(args)
    if (warning := doubt(vllm_version())) is not None:
        logger.warning(warning)
    return uvloop.run(_serve(args, wiring))


async def _serve(args: Namespace, wiring: Wiring) -> int:
    for number in SIGNALS:
        signal.signal(number, leave_at_once)  # until the server answers
    grace = settle_grace(args, wiring.living.grace)
    _, sock = setup_server(args, reuse_port=False)
    try:
        async with engine(args, wiring) as llm:
            if wiring.read_keys_again is not None:
                # Not before: the engine's processes then go on ignoring the signal under nohup.
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, wiring.read_keys_again)
            shutdown = await _serve_http(llm, args, wiring, grace, sock)
            await shutdown
    finally:
        sock.close()
    return exit_code(llm, wiring.living.life)


@asynccontextmanager
async def engine(args: Namespace, wiring: Wiring) -> AsyncIterator[ShapingLLM]:
    """The engine, from its start to its shutdown."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    steps = Steps()
    llm = ShapingLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
        # Who wants no statistics gets none, and nothing is learned of the engine's speed.
        stat_loggers=None if engine_args.disable_log_stats else [steps.logger],
    )
    assert isinstance(llm, ShapingLLM)
    try:
        await llm.reset_mm_cache()
        await llm.get_supported_tasks()  # vLLM keeps them; generate() needs them without waiting
        llm.gate = wiring.gate
        async with probing(llm) as probes:
            llm.rollouts = wiring.rollouts(
                VllmEngine(llm, probes), VllmPrompter(llm, args.chat_template), args.served_model_name[0]
            )
            steps.listener = llm.rollouts.step
            if wiring.updates is not None:
                model = VllmModel(llm)
                llm.loras = model.loras
                llm.updates = wiring.updates(model, llm.rollouts, args.served_model_name[0])
            yield llm
    finally:
        if llm.rollouts is not None:
            llm.rollouts.flush()
        llm.shutdown(timeout=CHILD_GRACE_SECONDS)


async def app(llm: ShapingLLM, args: Namespace, wiring: Wiring) -> FastAPI:
    """vLLM's app on this engine, with our additions."""
    tasks = await llm.get_supported_tasks()
    application = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, application.state, args, tasks)
    names: list[str] = args.served_model_name
    raw_names = set(names[len(names) // 2 :])
    attach(application.state, wiring.read_options, raw_names)
    if llm.loras is not None:
        llm.loras.serve(application.state.openai_serving_models, raw_names)
    application.middleware_stack = None  # vLLM has built it already; now it is built anew, with what is added
    wiring.extend(application)
    return application


def stopping(application: FastAPI) -> bool:
    """Whether its HTTP server was told to stop. It waits for answers that are under way, so endless ones must end."""
    http_server = getattr(application.state, "server", None)
    return http_server is not None and bool(http_server.should_exit)


async def _serve_http(llm: ShapingLLM, args: Namespace, wiring: Wiring, grace: float, sock: socket.socket) -> Any:
    application = await app(llm, args, wiring)
    async with watched(llm, application, wiring.living, grace) as ending:

        async def serving() -> None:
            take_signals(ending, wiring.living.life)

        return await _http_server(application, args, sock, serving)


async def _http_server(
    application: FastAPI, args: Namespace, sock: socket.socket, serving: Callable[[], Awaitable[None]]
) -> Any:
    """``serving`` is called when it answers, and now and then afterwards."""
    log_config = get_uvicorn_log_config(args)
    return await serve_http(
        application,
        sock=sock,
        callback_notify=serving,
        timeout_graceful_shutdown=CONNECTION_SECONDS,
        enable_ssl_refresh=args.enable_ssl_refresh,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        h11_max_header_count=args.h11_max_header_count,
        **({} if log_config is None else {"log_config": log_config}),
    )


def _refuse_other_modes(args: Namespace) -> None:
    if args.headless or args.grpc:
        raise InvalidSetting("--headless and --grpc start no HTTP server here; run vLLM itself for those")
    if args.api_server_count not in (None, 1):
        raise InvalidSetting(
            f"--api-server-count = {args.api_server_count}: API processes share no groups; only 1 is supported"
        )
    args.api_server_count = None
