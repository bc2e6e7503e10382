"""vLLM's HTTP side: app, flags and server, imported from where each series has them.

0.31 has a package for starting servers. 0.26 has the same functions with the same parameters in several modules.
"""

import logging
from argparse import Namespace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm import logger as vllm_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Not try/except ImportError: that would also hide an import that fails inside the package. mypy checks against 0.31.
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
    """Add vLLM's flags to a parser, and ``--enable-scale-out`` if vLLM does not have it.

    0.26 always serves the routes that this flag adds in 0.31.
    """
    parser = cli_args.make_arg_parser(parser)
    if not hasattr(cli_args.FrontendArgs, "enable_scale_out"):
        parser.add_argument(  # type: ignore[no-untyped-call]
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
