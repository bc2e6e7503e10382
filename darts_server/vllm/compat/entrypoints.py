"""vLLM's HTTP side: app, flags and server, wherever they are.

0.31 has a package for what starts servers. 0.26 has the same functions, with the same parameters, all over.
"""

import logging
from argparse import Namespace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm import logger as vllm_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Asked beforehand rather than tried, so that an import that fails inside the package says so. Types are those of 0.31.
if TYPE_CHECKING or find_spec("vllm.entrypoints.launchers"):
    from vllm.entrypoints.launchers import cli_args
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
else:
    from vllm.entrypoints.launcher import serve_http
    from vllm.entrypoints.openai import cli_args
    from vllm.entrypoints.openai.api_server import build_app, init_app_state, setup_server
    from vllm.entrypoints.serve.utils.server_utils import get_uvicorn_log_config

__all__ = [
    "build_app",
    "configure_logging",
    "get_uvicorn_log_config",
    "init_app_state",
    "make_arg_parser",
    "serve_http",
    "setup_server",
    "validate_parsed_serve_args",
]

validate_parsed_serve_args = cli_args.validate_parsed_serve_args


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """``parser`` with vLLM's flags, and ``--enable-scale-out`` where it is not one of them.

    0.26 always has the routes that this flag adds in 0.31.
    """
    parser = cli_args.make_arg_parser(parser)
    if not hasattr(cli_args.FrontendArgs, "enable_scale_out"):
        parser.add_argument(  # type: ignore[no-untyped-call]
            "--enable-scale-out", action="store_true", help="No effect: these routes are always there."
        )
    return parser


def configure_logging(args: Namespace) -> None:
    """Set vLLM's logging up as the flags say, and have our warnings heard.

    0.26 has no such flags, and set it up when it was imported. A library of vLLM's raises the root's level to ERROR: in
    0.26 when vLLM is imported, in 0.31 when the app is made.
    """
    if hasattr(vllm_logger, "configure_logging_from_args"):
        vllm_logger.configure_logging_from_args(args)
    ours = logging.getLogger("darts_server")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.WARNING)
