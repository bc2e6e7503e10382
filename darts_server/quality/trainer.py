"""The process that trains a quality head: ``python -m darts_server.quality.trainer``, started by `remote`.

Messages come on standard input and reports go out on what was standard output. It ends with its parent: at the end of
its input. TrainingResult in a thread of the server would have to share one interpreter lock with the event loop.
"""

import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import IO

import torch

from darts_server.quality.frames import Frame, read, read_examples, write
from darts_server.quality.head import Head
from darts_server.quality.report import TrainerReport, TrainingSchedule
from darts_server.quality.types import HeadSettings

NICE = 10
"""Serving comes first, but a trainer that never ran would leave the head behind the policy."""
WAITING = 64
"""Messages read ahead; beyond it the parent waits."""


class Trainer:
    """A head, trained as its labels come. ``opened``: the first message, which says what head it is."""

    def __init__(self, opened: Frame, output: IO[bytes]) -> None:
        self._opened = opened.says
        self._output = output
        self._schedule = TrainingSchedule(**opened.says["schedule"])
        self._fresh = 0
        self._trained_at = time.monotonic()
        self._report = TrainerReport(epoch=opened.says["epoch"])
        self._head = self._new()
        if opened.body:
            self._head.restore(opened.body)

    def run(self, messages: "queue.Queue[Frame | None]") -> None:
        """Until there are no more."""
        self._tell()
        while (message := self._next(messages)) is not None:
            while message is not None:
                self._take(message)
                message = self._at_hand(messages)
            self._train() if self._fresh >= self._schedule.labels else self._tell()

    def _next(self, messages: "queue.Queue[Frame | None]") -> Frame | None:
        """The next message, with a training meanwhile where labels have waited long enough."""
        if self._fresh:
            due = self._trained_at + self._schedule.seconds
            try:
                return messages.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                self._train()
        return messages.get()

    def _at_hand(self, messages: "queue.Queue[Frame | None]") -> Frame | None:
        try:
            message = messages.get_nowait()
        except queue.Empty:
            return None
        if message is None:
            messages.put(None)  # the end is for `run` to see
        return message

    def _take(self, message: Frame) -> None:
        if message.says["kind"] == "restore":
            if message.body:
                self._head.restore(message.body)
            else:  # everything learned was replaced, and no head was among it
                self._head = self._new()
            self._report = replace(self._report, epoch=message.says["epoch"])
            self._fresh = 0
            return
        for x in read_examples(message.body):
            learned = self._head.learn(x.hidden, x.position, x.target, x.survival)
            self._fresh += learned
            self._report = replace(self._report, learned=self._report.learned + 1)

    def _train(self) -> None:
        begun = time.monotonic()
        training = self._head.train(self._schedule.steps, self._schedule.limit)
        self._fresh, self._trained_at = 0, time.monotonic()
        self._report = replace(
            self._report,
            made=self._report.made + training.steps,
            seconds=self._report.seconds + self._trained_at - begun,
            loss=self._report.loss if training.loss is None else training.loss,
        )
        self._tell(self._head.state() if training.steps else b"")

    def _tell(self, state: bytes = b"") -> None:
        head = self._head
        self._report = replace(
            self._report,
            status=head.status,
            prior=head.prior,
            metrics=head.metrics(),
            steps=head.steps,
            divergences=head.divergences,
        )
        write(self._output, Frame(self._report.says(), state))

    def _new(self) -> Head:
        said = self._opened
        return Head(said["width"], HeadSettings(**said["settings"]), device=said["device"])


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to the server, which ends this by itself
    os.nice(NICE)
    torch.set_num_threads(1)  # the cores are the engine's
    source, output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints does not print into the reports
    opened = read(source)
    if opened is None:
        return 0
    messages: queue.Queue[Frame | None] = queue.Queue(WAITING)
    trainer = Trainer(opened, output)
    threading.Thread(target=_listen, args=(source, messages), daemon=True).start()
    try:
        trainer.run(messages)
    except BrokenPipeError:
        os._exit(0)  # the parent is gone, and what is buffered for it cannot be written at a usual end
    return 0


def _listen(source: IO[bytes], messages: "queue.Queue[Frame | None]") -> None:
    try:
        while (message := read(source)) is not None:
            messages.put(message)
    finally:
        messages.put(None)


if __name__ == "__main__":
    sys.exit(main())
