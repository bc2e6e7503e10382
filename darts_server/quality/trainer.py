"""Worker process that trains a quality head.

The server imports this module too, so only functions import torch.
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
"""Serving has priority, but a trainer that never ran would leave the head behind the policy."""
_head: Head | None = None
"""Head of this process. Its replay buffer is too large to be sent with each call."""


def start_worker() -> None:
    """Prepare the process before numpy and torch are imported."""
    # Ctrl-C reaches both processes, and the server ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    # The other cores are for the engine.
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_server, daemon=True).start()


def _end_with_server() -> None:
    # A worker holds both ends of its queue, so it would not notice that the server was killed.
    server = parent_process()
    assert server is not None
    server.join()
    os._exit(1)


def train(
    width: int,
    settings: HeadSettings,
    restored: bytes | None,
    examples: list[Example],
) -> tuple[TrainerReport, bytes]:
    """Learn the examples and train. Return the head's report, and its state. ``restored``: state to continue from."""
    global _head
    import torch

    from darts_server.quality.head import Head

    torch.set_num_threads(1)
    # None continues with the present head, and empty bytes begin a new head.
    if _head is None or restored == b"":
        _head = Head(width, settings)
    if restored:
        _head.restore(restored)
    for example in examples:
        _head.learn(*example)
    if examples and _head.train(settings.max_steps, settings.max_seconds):
        return _head.report, _head.state()
    # Nothing was trained, so there is no new state.
    return _head.report, b""
