"""vLLM's own HTTP server around the engine that shapes: its app and its routes."""

import asyncio
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from logging import NOTSET, WARNING, getLogger
from typing import Any

import uvloop
from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.logger import configure_logging_from_args

from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.api.logprob_answers import write_logprobs_from_arrays
from darts_server.vllm.api.routes import ErrorFields, Extension, ReadOptions, extend_routes
from darts_server.vllm.api.shutdown import CONNECTION_SECONDS, Shutdown
from darts_server.vllm.compat import version_warning, vllm_version
from darts_server.vllm.requests.text_limits import limit_texts, tokenize_in_threads

logger = getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
ROUTE_LINES = ("Available routes", "Route: ")


def take_api_keys(args: Namespace) -> list[str]:
    """Remove the API keys from vLLM's flag and environment variable, and return them."""
    keys: list[str] = args.api_key or [os.environ.get(KEY_VARIABLE, "")]
    # This server checks keys itself. vLLM would refuse the keys of ``--api-key-file``.
    args.api_key = None
    # Engine processes must not inherit keys.
    os.environ.pop(KEY_VARIABLE, None)
    return [key for key in keys if key]


def run(args: Namespace, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    configure_logging_from_args(args)
    # A library that vLLM uses raises the root logger's level to ERROR when the app is made.
    darts_logger = getLogger("darts_server")
    if darts_logger.level == NOTSET:
        darts_logger.setLevel(WARNING)
    warning = version_warning(vllm_version())
    if warning is not None:
        logger.warning(warning)
    return uvloop.run(main())


def bind_socket(args: Namespace) -> "closing[socket.socket]":
    # Before the engine starts, which takes long.
    _, sock = setup_server(args, reuse_port=False)
    return closing(sock)


async def make_app(
    llm: ShapingLLM,
    args: Namespace,
    read_options: ReadOptions,
    error_fields: ErrorFields,
    extensions: Sequence[Extension],
) -> FastAPI:
    tasks = await llm.get_supported_tasks()
    application = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, application.state, args, tasks)
    names: list[str] = args.served_model_name
    # `flags.parse` has added a raw name for each name, after all names.
    raw_names = set(names[len(names) // 2 :])
    limit_texts(llm.renderer)
    tokenize_in_threads(application.state)
    extend_routes(application, error_fields, read_options, raw_names, llm.check_options, extensions)
    write_logprobs_from_arrays(application)
    if llm.loras is not None:
        llm.loras.attach_registry(application.state.openai_serving_models, raw_names)
    # vLLM has built the stack already. Starlette builds it again with the middleware that is added later.
    application.middleware_stack = None
    return application


def url_of(args: Namespace, sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port, *_ = sock.getsockname()
    scheme = "https" if args.ssl_certfile else "http"
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


async def serve(
    application: FastAPI,
    args: Namespace,
    sock: socket.socket,
    shutdown: Shutdown,
    protocol: type[asyncio.Protocol],
    on_ready: Callable[[], None],
) -> None:
    """Serve the app until the server stops.

    ``protocol``: uvicorn's implementation of HTTP/1.1. ``on_ready``: called once, when the server answers.
    """
    # vLLM's statistics read the environment for each token. Its other processes cache it too.
    envs.enable_envs_cache()
    is_ready = False

    async def notify() -> None:
        # vLLM calls this when the server answers, and repeatedly afterwards.
        nonlocal is_ready
        # `serve_http` has set vLLM's own handlers meanwhile. Setting ours again is harmless.
        shutdown.handle_signals()
        if not is_ready:
            is_ready = True
            on_ready()

    def stop_http_server() -> None:
        application.state.server.should_exit = True

    # uvicorn has its own default, which None would replace.
    log_options: dict[str, Any] = {}
    log_config = get_uvicorn_log_config(args)
    if log_config is not None:
        log_options["log_config"] = log_config
    # A line for each of about fifty routes would bury the lines before.
    launcher = getLogger(serve_http.__module__)
    launcher.addFilter(lambda record: not str(record.msg).startswith(ROUTE_LINES))

    async with shutdown.watch(stop_http_server):
        http_shutdown = await serve_http(
            application,
            sock=sock,
            callback_notify=notify,
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
            http=protocol,
            **log_options,
        )
    # vLLM returns the rest of the shutdown as a coroutine.
    await http_shutdown


def is_stopping(application: FastAPI) -> bool:
    """Whether the HTTP server waits for open responses, so that endless responses must end."""
    http_server = getattr(application.state, "server", None)
    return http_server is not None and bool(http_server.should_exit)
