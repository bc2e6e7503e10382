"""Parse vLLM's flags, and set flags and environment for the platform that vLLM was built for.

The API process and the hosts of engines use it.
"""

import logging
import os
import shutil
import sysconfig
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from vllm import envs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.exceptions import InvalidSetting
from darts_server.vllm.engine_core.plugin import COMBINED, EXTENSION, SHARE_CORES, WORKER, end_engine_with_server
from darts_server.vllm.requests.sampling import PROCESSED_LOGPROBS

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# Each served model has a second name with this suffix. Requests that use the second name are never shaped.
RAW_SUFFIX = ":raw"

NO_COMPILATION = "TORCHDYNAMO_DISABLE"
"""Environment variable of torch: ``1`` disables compilation, in child processes too."""
NO_COMPILER = "no C++ compiler with Python's headers: nothing is compiled, as with --enforce-eager"
START_METHOD, FORK = "VLLM_WORKER_MULTIPROC_METHOD", "fork"
PLUGINS = "VLLM_PLUGINS"
"""vLLM's environment variable with the names of the only plugins to load, separated by commas. Without it all are."""
PLUGIN_GROUP, OUR_PLUGIN = "vllm.general_plugins", "darts_server"


def parse(argv: Sequence[str]) -> Namespace:
    """Parse and check vLLM's flags as ``vllm serve`` does; exits with a message on a wrong one.

    Raises:
        InvalidSetting: a mode of vLLM's in which groups could not be shaped.
    """
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="darts-server serve", usage="%(prog)s MODEL [options]"))
    parser.set_defaults(
        allowed_origins=[],  # vLLM's default lets the web pages of all sites read all answers
        logprobs_mode=PROCESSED_LOGPROBS,  # of what was sampled from; vLLM's are those of the model at temperature 1
    )
    args: Namespace = parser.parse_args(list(argv))
    if args.model_tag is not None:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    if args.headless or args.grpc:
        raise InvalidSetting("--headless and --grpc start no HTTP server here; run vLLM itself for those")
    if args.api_server_count not in (None, 1):
        raise InvalidSetting(
            f"--api-server-count = {args.api_server_count}: API processes share no groups, so a server has one"
        )
    args.api_server_count = None
    refuse_speculation(args.speculative_config or args.spec_method or args.spec_model or args.spec_tokens)
    args.host = args.host or LOOPBACK
    served = args.served_model_name or [args.model]  # vLLM's answers name the first one
    args.served_model_name = [*served, *(name + RAW_SUFFIX for name in served)]
    prepare(args)
    return args


def prepare(args: Namespace) -> None:
    """Add our worker extension and plugin to the user's, and set defaults for flags that the user left open.

    On CPU:

    * prompts are not split over steps (chunked prefill), since a split prompt with a seed kills vLLM's engine there;
    * the engine's processes sleep while they wait, instead of spinning on the cores that this process needs;
    * with ``VLLM_WORKER_MULTIPROC_METHOD=fork`` its processes are forked, where vLLM would spawn them in any case: each
      takes a quarter of a minute less to start, but must not be forked once this process has computed with threads;
    * without a compiler nothing is compiled: vLLM's sampler would compile kernels at the first request, which kills
      the engine if it fails.

    Raises:
        InvalidSetting: vLLM's processes would not load our plugin, and so never answer an abort.
    """
    if not entry_points(group=PLUGIN_GROUP, name=OUR_PLUGIN):
        raise InvalidSetting(
            "darts-server is imported but not installed, so vLLM finds no plugin of it: pip install it"
        )
    args.worker_extension_cls = extension(args.worker_extension_cls)
    end_engine_with_server()
    if PLUGINS in os.environ:
        os.environ[PLUGINS] = ",".join(filter(None, (os.environ[PLUGINS], OUR_PLUGIN)))
    if not current_platform.is_cpu():
        return
    if args.enable_chunked_prefill is None and args.max_num_batched_tokens is None:
        args.enable_chunked_prefill = False
    os.environ.setdefault(SHARE_CORES, "1")
    if os.environ.get(START_METHOD) == FORK:
        envs.environment_variables[START_METHOD] = lambda: FORK
    if not can_compile():
        logger.warning("%s", NO_COMPILER)
        args.enforce_eager = True
        os.environ.setdefault(NO_COMPILATION, "1")


def can_compile() -> bool:
    """Return whether torch can compile CPU kernels: that takes a C++ compiler and Python's headers."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


def extension(users: str | None) -> str:
    """Return the qualified name of the worker extension: ours, combined with the user's if there is one."""
    return f"{WORKER}.{COMBINED}{users.replace('.', ':')}" if users else f"{WORKER}.{EXTENSION}"


def refuse_speculation(speculative_config: object) -> None:
    """Refuse speculative decoding on CPU as an `InvalidSetting`: it changes what is sampled there.

    Measured in plain vLLM 0.31 at temperature 1 on the tiny model: answers of 35 tokens without, some 160 with n-gram
    speculation (`benchmarks.speculation`). Greedy answers agree.
    """
    if speculative_config and current_platform.is_cpu():
        raise InvalidSetting(
            "--speculative-config: on a CPU vLLM samples from another distribution with it, so lengths and rewards "
            "would be wrong; leave it out, or serve on GPUs"
        )
