"""vLLM's HTTP side: app, flags and server, imported from where each series has them."""

import logging
from argparse import Namespace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm import logger as vllm_logger
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser


def _find(name: str, *modules: str) -> Any:
    """Return what has this name in the first of vLLM's modules, the newest series' first, that has it.

    Raises:
        ImportError: none has.
    """
    for module in modules:
        if _exists(full := f"vllm.{module}") and hasattr(found := import_module(full), name):
            return getattr(found, name)
    raise ImportError(f"this version of vLLM has no {name} in any of vllm.{', vllm.'.join(modules)}")


def _exists(module: str) -> bool:
    # Not by catching ImportError: that would also hide an import that fails inside the module.
    parent = module.rpartition(".")[0]
    return (not parent or _exists(parent)) and find_spec(module) is not None


if TYPE_CHECKING:  # mypy checks against the oldest tested series
    from vllm.entrypoints.chat_utils import load_chat_template
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args
    from vllm.entrypoints.launchers.cli_args import make_arg_parser as _make_arg_parser
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
else:
    _CLI_ARGS = ("entrypoints.launchers.cli_args", "entrypoints.openai.cli_args")
    _LAUNCHER = "entrypoints.launchers.launcher"
    _API_SERVER = "entrypoints.openai.api_server"
    FrontendArgs = _find("FrontendArgs", *_CLI_ARGS)
    _make_arg_parser = _find("make_arg_parser", *_CLI_ARGS)
    validate_parsed_serve_args = _find("validate_parsed_serve_args", *_CLI_ARGS)
    build_app = _find("build_app", "entrypoints.launchers.app", _API_SERVER)
    init_app_state = _find("init_app_state", "entrypoints.launchers.api_server.app_state", _API_SERVER)
    setup_server = _find("setup_server", _LAUNCHER, _API_SERVER)
    serve_http = _find("serve_http", _LAUNCHER, "entrypoints.launcher")
    get_uvicorn_log_config = _find(
        "get_uvicorn_log_config",
        "entrypoints.launchers.utils.server_utils",
        "entrypoints.serve.utils.server_utils",
    )
    load_chat_template = _find("load_chat_template", "renderers.chat_utils", "entrypoints.chat_utils")

__all__ = [
    "build_app",
    "cli_env_setup",
    "configure_logging",
    "get_uvicorn_log_config",
    "init_app_state",
    "load_chat_template",
    "make_arg_parser",
    "serve_http",
    "setup_server",
    "validate_parsed_serve_args",
]


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add vLLM's flags to a parser, and ``--enable-scale-out`` if vLLM does not have it.

    0.26 always serves the routes that this flag adds in 0.31.
    """
    parser = _make_arg_parser(parser)
    if not hasattr(FrontendArgs, "enable_scale_out"):
        parser.add_argument(
            "--enable-scale-out", action="store_true", help="No effect: these routes are always served."
        )
    return parser


def configure_logging(args: Namespace) -> None:
    """Configure vLLM's logging from the flags, and enable our own warnings.

    0.26 has no such flags, and configures logging when it is imported. Our level is set explicitly, since a library
    that vLLM uses raises the root logger's level to ERROR: in 0.26 when vLLM is imported, in 0.31 when the app is made.
    """
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(args)
    ours = logging.getLogger("darts_server")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.WARNING)
