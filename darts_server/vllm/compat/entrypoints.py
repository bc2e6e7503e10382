"""vLLM's HTTP side: app, flags and server, imported from where each series has them."""

import logging
from argparse import Namespace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args

if TYPE_CHECKING or find_spec("vllm.renderers.chat_utils") is None:  # mypy checks against the oldest tested series
    from vllm.entrypoints.chat_utils import load_chat_template
else:  # since 0.32
    from vllm.renderers.chat_utils import load_chat_template

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


def configure_logging(args: Namespace) -> None:
    """Configure vLLM's logging from the flags, and enable our own warnings.

    Our level is set explicitly, since a library that vLLM uses raises the root logger's level to ERROR when the app is
    made.
    """
    configure_logging_from_args(args)
    ours = logging.getLogger("darts_server")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.WARNING)
