"""Parses vLLM's flags, and sets flags and environment for vLLM's platform: for the API process and hosts of engines."""

import json
import logging
import os
import shutil
import sysconfig
from argparse import Namespace
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from darts_server.drafts.lengths import MAX_DRAFT_TOKENS
from darts_server.exceptions import InvalidSetting
from darts_server.vllm.compat import import_cli_args, prepare_environment
from darts_server.vllm.engine_core.plugin import (
    COMBINED,
    COUPLED,
    EXTENSION,
    SHARE_CORES,
    WORKER,
    end_engine_with_server,
)
from darts_server.vllm.requests.sampling import PROCESSED_LOGPROBS

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RAW_SUFFIX = ":raw"
"""Suffix of a model's second name."""

DRAFTER = "darts_server.vllm.engine_core.drafter.Drafter"
OTHER_DRAFTERS = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")

ADDITIONAL = "--additional-config"
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable: ``0`` for its first model runner. Its second runner, the default on GPUs, samples in its kernels."""

NO_COMPILATION = "TORCHDYNAMO_DISABLE"
"""Environment variable of torch: ``1`` disables compilation, in child processes too."""
NO_COMPILER = "no C++ compiler with Python's headers: nothing is compiled, as with --enforce-eager"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
FORK = "fork"
PLUGINS = "VLLM_PLUGINS"
"""vLLM's variable with the names of plugins, separated by commas. Without it, vLLM loads all plugins."""
PLUGIN_GROUP = "vllm.general_plugins"
OUR_PLUGIN = "darts_server"


def parse(argv: Sequence[str]) -> Namespace:
    """Parse, check and complete vLLM's flags, and set the environment of its processes (`complete_args`).

    A wrong flag exits with a message, as in ``vllm serve``.

    Raises:
        InvalidSetting: a mode of vLLM's that cannot shape groups.
    """
    prepare_environment()
    cli_args = import_cli_args()
    parser = cli_args.make_arg_parser(
        FlexibleArgumentParser(prog="darts-server serve", usage="%(prog)s MODEL [options]")
    )
    # vLLM's own defaults let web pages of all sites read answers, and leave temperature and top_k out of log-probs.
    parser.set_defaults(allowed_origins=[], logprobs_mode=PROCESSED_LOGPROBS)
    args: Namespace = parser.parse_args(list(argv))
    if args.model_tag is not None:
        args.model = args.model_tag
    cli_args.validate_parsed_serve_args(args)
    if args.headless or args.grpc:
        raise InvalidSetting("--headless and --grpc start no HTTP server here; run vLLM itself for them")
    if args.api_server_count not in (None, 1):
        raise InvalidSetting(
            f"--api-server-count = {args.api_server_count}: API processes cannot share groups; omit it, or set it to 1"
        )
    args.api_server_count = None
    args.host = args.host or LOOPBACK
    # vLLM's answers name the first model.
    served_names = args.served_model_name or [args.model]
    # Requests with the second name of a model are never shaped.
    raw_names = [name + RAW_SUFFIX for name in served_names]
    args.served_model_name = [*served_names, *raw_names]
    complete_args(args)
    return args


def complete_args(args: Namespace) -> None:
    """Add our worker extension and plugin to the user's, and set defaults for vLLM's platform."""
    # Without the plugin, vLLM's processes would never answer an abort.
    if not entry_points(group=PLUGIN_GROUP, name=OUR_PLUGIN):
        raise InvalidSetting(
            "darts-server is imported but not installed, so vLLM finds no plugin of it: pip install it"
        )
    args.worker_extension_cls = worker_extension_name(args.worker_extension_cls)
    end_engine_with_server()
    # The user has named the plugins that vLLM loads.
    if PLUGINS in os.environ:
        os.environ[PLUGINS] = ",".join(filter(None, (os.environ[PLUGINS], OUR_PLUGIN)))
    if COUPLED in (args.additional_config or {}):
        model_runner = os.environ.setdefault(MODEL_RUNNER, "0")
        if model_runner != "0":
            raise InvalidSetting(f"--sampling coupled needs vLLM's first model runner; unset {MODEL_RUNNER}")
    if not current_platform.is_cpu():
        return

    # On CPU, vLLM's engine dies of a prompt with a seed that is split over steps (chunked prefill).
    if args.enable_chunked_prefill is None and args.max_num_batched_tokens is None:
        args.enable_chunked_prefill = False
    # The engine's processes sleep while they wait, instead of spinning on cores that this process needs.
    os.environ.setdefault(SHARE_CORES, "1")
    # vLLM would ignore the variable. A forked process starts 15 seconds faster, but this process must not have computed
    # with threads before.
    if os.environ.get(START_METHOD) == FORK:
        envs.environment_variables[START_METHOD] = lambda: FORK
    # Without a compiler, vLLM's sampler fails to compile kernels at the first request, which kills the engine.
    if not can_compile():
        logger.warning("%s", NO_COMPILER)
        args.enforce_eager = True
        os.environ.setdefault(NO_COMPILATION, "1")


def can_compile() -> bool:
    """Return whether torch finds a C++ compiler and Python's headers, for its CPU kernels."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


def worker_extension_name(users_extension: str | None) -> str:
    if not users_extension:
        return f"{WORKER}.{EXTENSION}"
    # vLLM splits the name at its last dot, see `COMBINED`.
    return f"{WORKER}.{COMBINED}{users_extension.replace('.', ':')}"


def add_sampling_flags(argv: Sequence[str], *, speculate: bool, couple: bool) -> list[str]:
    """Return vLLM's flags with flags of our drafter and of coupled sampling.

    Raises:
        InvalidSetting: the user has set vLLM's flags for the same.
    """
    flags = list(argv)
    # vLLM reads underscores as dashes.
    flag_names = {word.partition("=")[0].replace("_", "-") for word in argv}
    has_drafter = not flag_names.isdisjoint(OTHER_DRAFTERS)
    if speculate:
        if has_drafter:
            raise InvalidSetting("--speculate auto has a drafter of its own; omit it, or vLLM's --speculative-config")
        config = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": MAX_DRAFT_TOKENS}
        flags += ["--speculative-config", json.dumps(config)]
    if couple:
        if has_drafter:
            raise InvalidSetting(
                "--sampling coupled verifies no drafts of vLLM's own methods; omit it, or replace vLLM's "
                "--speculative-config by --speculate auto"
            )
        if ADDITIONAL in flag_names:
            raise InvalidSetting(
                f"--sampling coupled adds to vLLM's {ADDITIONAL}; write yours as {ADDITIONAL}.KEY VALUE"
            )
        flags += [f"{ADDITIONAL}.{COUPLED}", "true"]
    return flags


def send_images_whole(config: VllmConfig) -> None:
    """Let vLLM send the data of an image with every request.

    With one engine vLLM sends only the name of an image that the engine's cache should have. But here a prompt may be
    sent long after it was rendered, in another order, or never, and the engine would not know the name.
    """
    multimodal = config.model_config.multimodal_config
    if multimodal is not None:
        multimodal.mm_processor_cache_type = "processor_only"  # type: ignore[assignment]
