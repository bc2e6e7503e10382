"""What runs in the process that trains a quality head: the worker of the pool of one in `remote`.

The server imports this module too, so torch is imported in functions alone.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import parent_process
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from darts_server.quality.head import Head
    from darts_server.quality.types import Example, HeadSettings, TrainerReport

NICE = 10
"""Serving comes first, but a trainer that never ran would leave the head behind the policy."""
_head: Head | None = None
"""The head of this process. It keeps its replay buffer from call to call, which is too large to be sent each time."""


def start_worker() -> None:
    """Prepare the process, before numpy and torch are imported in it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the server then ends this one
    os.nice(NICE)
    os.environ["OMP_NUM_THREADS"] = "1"  # the cores are for the engine
    threading.Thread(target=_end_with_server, daemon=True).start()


def _end_with_server() -> None:
    """End with a server that was killed: a worker holds both ends of its queue, so it would wait for ever."""
    server = parent_process()
    assert server is not None
    server.join()
    os._exit(1)


def train(
    width: int, settings: HeadSettings, restored: bytes | None, examples: list[Example]
) -> tuple[TrainerReport, bytes]:
    """Restore the head if ``restored`` is given, learn the examples, and train.

    Empty ``restored`` stands for a new head. Returns the head's report and its state, which is empty if no step was
    made.
    """
    global _head
    import torch

    from darts_server.quality.head import Head

    torch.set_num_threads(1)
    if _head is None or restored == b"":  # a restore without a head replaces all that was learned by nothing
        _head = Head(width, settings)
    if restored:
        _head.restore(restored)
    for example in examples:
        _head.learn(*example)
    steps = _head.train(settings.max_steps, settings.max_seconds) if examples else 0
    return _head.report, _head.state() if steps else b""
