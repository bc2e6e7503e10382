"""A vLLM plugin, loaded into each process of the engine: this package's entry point ``vllm.general_plugins``."""

import os
import time

from darts_server.vllm.parent import end_with_parent

SHARE_CORES = "DARTS_ENGINE_SHARES_CORES"
"""Environment variable that the server sets to ``1`` if the engine's processes must not spin while they wait."""

POLL_SECONDS = 1e-5
"""A hundredth of a decode step; no loss of throughput was measured."""


def prepare_process() -> None:
    """Prepare a process of the engine. vLLM calls this in the server's process too."""
    share_cores()
    end_with_parent()


def share_cores() -> None:
    """Let the engine's processes sleep while they wait for each other, if :data:`SHARE_CORES` is set.

    vLLM's processes spin on ``sched_yield`` while they wait. On a machine with few cores, Linux 6.18 then hardly
    schedules other processes: the API process was seen to wait for 13 s, in which all candidates that it should have
    stopped ran to their end.
    """
    if os.environ.get(SHARE_CORES) != "1":
        return
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(POLL_SECONDS)  # type: ignore[attr-defined]
