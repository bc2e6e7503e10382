"""The trainer process, from its start to its end, and the pipes to it and from it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe

from darts_server.quality.messages import Message, receive, send

COMMAND = (sys.executable, "-m", "darts_server.quality.trainer")
"""A command rather than a ``multiprocessing.Process``: that one would import the server's main module again."""


class TrainerProcess:
    """A running trainer process. One thread may send while another one receives.

    Raises:
        OSError: ``command`` cannot be run.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        inbox, self._to_trainer = Pipe(duplex=False)
        self._from_trainer, outbox = Pipe(duplex=False)
        # Each side sees the death of the other one as the end of a pipe, so this side must not keep the trainer's ends.
        with inbox, outbox:
            ends = inbox.fileno(), outbox.fileno()
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            try:
                self._process = subprocess.Popen(
                    [*command, *map(str, ends)], pass_fds=ends, stdin=subprocess.DEVNULL, env=environment
                )
            except OSError:
                self._to_trainer.close()
                self._from_trainer.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send a message; wait while the pipe is full. Raises ``OSError`` if the process has died."""
        send(self._to_trainer, message)

    def receive(self) -> Message | None:
        """Wait for a message; ``None`` when the process has ended. Raises as `messages.receive`."""
        return receive(self._from_trainer)

    def kill(self) -> None:
        self._process.kill()

    def end(self, grace: float) -> None:
        """End the process by closing the pipe to it; kill it if that takes longer than ``grace`` seconds."""
        self._to_trainer.close()
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close the pipe from the process, once it has ended and everything was received."""
        self._from_trainer.close()
