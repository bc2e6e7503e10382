"""What vLLM loads into each process of its engine: the entry point ``vllm.general_plugins`` of this package."""

import os
import time

SHARING = "DARTS_ENGINE_SHARES_CORES"
"""Set in the environment by a server whose engine must leave the cores to others while it waits."""

NAP_SECONDS = 1e-5
"""A step takes a hundred times as long, and no loss of throughput was measured."""


def share_cores() -> None:
    """Have the engine's processes sleep while they wait for each other, if :data:`SHARING` is set.

    They call ``sched_yield`` in a loop instead. Where cores are few, Linux 6.18 then lets no one else run: the API
    process was seen to wait for 13 s, and all that it should have stopped ran to its end.
    """
    if os.environ.get(SHARING) != "1":
        return
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(NAP_SECONDS)  # type: ignore[attr-defined]
