"""A process that starts two, each of which starts two more, as a server starts its engine and that its workers."""

import multiprocessing
import os
import signal
import sys
from typing import Any

from darts_server.vllm.engine_core.plugin import end_engine_with_server, end_with_server


def run(method: str, generations: int) -> None:
    """Print the id of this process, and start two for the next generation."""
    if method == "spawn":  # vLLM loads its plugins in spawned processes alone
        end_with_server()
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: all of these processes write to the same pipe
    if generations:
        context: Any = multiprocessing.get_context(method)
        for _ in range(2):
            context.Process(target=run, args=(method, generations - 1)).start()
    signal.pause()


if __name__ == "__main__":
    end_engine_with_server()
    run(sys.argv[1], 2)
