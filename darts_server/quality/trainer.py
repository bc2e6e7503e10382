"""The process that trains a quality head: ``python -m darts_server.quality.trainer``, started by `trainer_process`.

Its two arguments are file descriptors: of the pipe that messages come from, and of the pipe that reports go to. It ends
when the parent closes the first one, as a parent that dies does. A training thread in the server instead would share
one interpreter lock with the event loop.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from darts_server.quality.head import Head
from darts_server.quality.messages import Message, PipeEnd, receive, send, unpack_examples
from darts_server.quality.report import TrainerReport, TrainingSchedule
from darts_server.quality.types import HeadSettings

NICE = 10
"""Serving comes first, but a trainer that never ran would leave the head behind the policy."""


class Trainer:
    """Trains a head as its labels come.

    Args:
        opening: the first message, which says what head to make.
        inbox: where messages come from.
        outbox: where reports go to.
    """

    def __init__(self, opening: Message, inbox: PipeEnd, outbox: PipeEnd) -> None:
        self._opening = opening.fields
        self._inbox = inbox
        self._outbox = outbox
        self._schedule = TrainingSchedule(**opening.fields["schedule"])
        self._new_labels = 0
        self._trained_at = time.monotonic()
        self._report = TrainerReport(restores=opening.fields["restores"])
        self._head = self._create_head()
        if opening.body:
            self._head.restore(opening.body)

    def run(self) -> None:
        """Learn and train until the parent closes its end.

        Raises:
            OSError: the parent has died.
        """
        self._send_report()
        is_open = True
        while is_open:
            self._wait_for_message()
            is_open = self._handle_messages()
            if self._new_labels >= self._schedule.min_labels:
                self._train()
            elif is_open:
                self._send_report()

    def _wait_for_message(self) -> None:
        """Wait for a message; train meanwhile if labels have waited for long enough."""
        if self._new_labels:
            due = self._trained_at + self._schedule.max_delay
            if not self._inbox.poll(max(0.0, due - time.monotonic())):
                self._train()

    def _handle_messages(self) -> bool:
        """Handle the next message and those behind it that have arrived; ``False`` after the last one."""
        while (message := receive(self._inbox)) is not None:
            self._handle(message)
            if not self._inbox.poll():
                return True
        return False

    def _handle(self, message: Message) -> None:
        if message.fields["kind"] == "restore":
            if message.body:
                self._head.restore(message.body)
            else:  # a restore without a head replaces all that was learned by nothing
                self._head = self._create_head()
            self._report = replace(self._report, restores=message.fields["restores"])
            self._new_labels = 0
            return
        examples = unpack_examples(message.body)
        for x in examples:
            self._new_labels += self._head.learn(x.hidden, x.position, x.target, x.survival)
        self._report = replace(self._report, labels=self._report.labels + len(examples))

    def _train(self) -> None:
        started = time.monotonic()
        result = self._head.train(self._schedule.max_steps, self._schedule.max_seconds)
        self._new_labels, self._trained_at = 0, time.monotonic()
        self._report = replace(
            self._report,
            trained_steps=self._report.trained_steps + result.steps,
            trained_seconds=self._report.trained_seconds + self._trained_at - started,
            loss=self._report.loss if result.loss is None else result.loss,
        )
        self._send_report(self._head.state() if result.steps else b"")

    def _send_report(self, state: bytes = b"") -> None:
        head = self._head
        self._report = replace(
            self._report,
            status=head.status,
            prior=head.prior,
            metrics=head.metrics(),
            steps=head.steps,
            divergences=head.divergences,
        )
        send(self._outbox, Message(self._report.to_json(), state))

    def _create_head(self) -> Head:
        fields = self._opening
        return Head(fields["width"], HeadSettings(**fields["settings"]), device=fields["device"])


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the server then ends this one
    os.nice(NICE)
    torch.set_num_threads(1)  # the cores are for the engine
    inbox, outbox = Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False)
    with inbox, outbox, suppress(OSError):  # the parent has died
        opening = receive(inbox)
        if opening is not None:
            Trainer(opening, inbox, outbox).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
