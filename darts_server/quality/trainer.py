"""The process that trains a quality head: ``python -m darts_server.quality.trainer``, started by `remote`.

Its argument is the file descriptor of a pipe to the server. It answers each message from there with a report, and ends
when the server closes its end, as a server that dies does. A training thread in the server instead would share one
interpreter lock with the event loop. Both ends are ours, so their messages are pickled.
"""

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from darts_server.quality.head import Head

NICE = 10
"""Serving comes first, but a trainer that never ran would leave the head behind the policy."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the server then ends this one
    os.nice(NICE)
    torch.set_num_threads(1)  # the cores are for the engine
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with pipe, suppress(EOFError, OSError):
        width, settings, device, schedule = pipe.recv()
        head = Head(width, settings, device=device)
        while True:
            restored, examples = pipe.recv()
            if restored:
                head.restore(restored)
            elif restored is not None:  # a restore without a head replaces all that was learned by nothing
                head = Head(width, settings, device=device)
            for example in examples:
                head.learn(*example)
            steps = head.train(schedule.max_steps, schedule.max_seconds) if examples else 0
            pipe.send((head.report, head.state() if steps else b""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
