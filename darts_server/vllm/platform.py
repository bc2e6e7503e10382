"""What the CPU build needs to be safe. Nothing here touches a GPU server."""

import os
from argparse import Namespace

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from darts_server.exceptions import InvalidRequest
from darts_server.vllm.plugin import SHARING

CPU_WORKER_EXTENSION = "darts_server.vllm.worker.CpuWorkerExtension"


def prepare(args: Namespace) -> None:
    """Set what the user left open.

    On CPU prompts are not split over steps, since a split prompt with a seed kills the engine there, and the worker
    gets its matrix unit switched on, without which it often dies at its first bfloat16 forward. And the engine leaves
    the cores to this process while it waits.
    """
    if not current_platform.is_cpu():
        return
    if args.enable_chunked_prefill is None and args.max_num_batched_tokens is None:
        args.enable_chunked_prefill = False
    if not args.worker_extension_cls:
        args.worker_extension_cls = CPU_WORKER_EXTENSION
    os.environ.setdefault(SHARING, "1")


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
