"""What each machine's build of vLLM needs, and what the CPU build needs to be safe."""

import logging
import os
import shutil
import sysconfig
from argparse import Namespace
from pathlib import Path

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.plugin import SHARING

logger = logging.getLogger(__name__)

UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""Of torch: in its environment ``1`` has nothing compiled, in this process's children neither."""
NO_COMPILER = "no C++ compiler with Python's headers: torch compiles nothing, as with --enforce-eager"
WORKER = "darts_server.vllm.worker"
EXTENSION = "WorkerExtension"
BESIDE = f"{EXTENSION} beside "
"""Begins the name of an extension that has another one in it, with colons for its dots."""


def prepare(args: Namespace) -> None:
    """Set what the user left open, and have the worker take our extension beside the user's.

    On CPU prompts are not split over steps, since a split prompt with a seed kills the engine there, and the engine
    leaves the cores to this process while it waits. Where nothing can be compiled nothing is: vLLM's sampler would have
    kernels made at the first request, and the engine would die of it.
    """
    args.worker_extension_cls = extension(args.worker_extension_cls)
    if not current_platform.is_cpu():
        return
    if args.enable_chunked_prefill is None and args.max_num_batched_tokens is None:
        args.enable_chunked_prefill = False
    os.environ.setdefault(SHARING, "1")
    if not can_compile():
        logger.warning("%s", NO_COMPILER)
        args.enforce_eager = True
        os.environ.setdefault(UNCOMPILED, "1")


def can_compile() -> bool:
    """Whether there is what torch makes kernels for a CPU with: a C++ compiler, and Python's headers."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    return compiler is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()


def extension(users: str | None) -> str:
    """The qualified name of the worker's extension: ours, together with the user's if there is one."""
    return f"{WORKER}.{BESIDE}{users.replace('.', ':')}" if users else f"{WORKER}.{EXTENSION}"


def refuse_what_would_crash(config: VllmConfig, params: SamplingParams) -> None:
    """A seeded request on CPU whose prompt may be split over steps.

    Any prompt may be, not just one longer than a step: what others leave of a step's budget can be less than it needs.

    Raises:
        InvalidRequest
    """
    if params.seed is None or not current_platform.is_cpu() or not config.scheduler_config.enable_chunked_prefill:
        return
    raise InvalidRequest(
        "seed",
        "vLLM on CPU cannot split a seeded prompt over several steps "
        f"(max_num_batched_tokens = {config.scheduler_config.max_num_batched_tokens}), and would die of it; "
        "leave the seed out, or start the server with --no-enable-chunked-prefill and --max-num-batched-tokens of at "
        "least the model's length",
    )
