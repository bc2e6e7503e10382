"""A head that is trained in a process of its own, and scores in this one."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_server.exceptions import InvalidRequest, StateError
from darts_server.policy.pruning.calibration import Label
from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.features import assembled
from darts_server.quality.frames import Example, Frame, examples, read, write
from darts_server.quality.report import TrainerReport, TrainingSchedule
from darts_server.quality.snapshot import Snapshot
from darts_server.quality.types import HeadSettings, HeadStatus, Score

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "darts_server.quality.trainer")
DEATHS = 3
"""Within `DEATH_SECONDS`; one more, and no other process is started."""
DEATH_SECONDS = 3600.0
GRACE_SECONDS = 5.0
"""A training takes a second, torch's import some."""


class _Known(NamedTuple):
    """What is known of the head. One value, so that a reader in another thread sees all of it or nothing."""

    report: TrainerReport
    snapshot: Snapshot | None


class RemoteHead:
    """Does what `head.Head` does, but for training, which goes on by itself. Any thread may call any method.

    What it tells is what the other process told last. Nothing is started before `start`.

    Args:
        width: of the model's hidden states.
        settings, device: see `head.Head`.
        schedule: when it is trained.
        trained: hears in a thread of its own of each report, with the state as bytes where that is a new one.
        clock: seconds; the deaths of the process are counted by it.
        command: what trains.
        grace: seconds that it is given to end.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings | None = None,
        *,
        device: str = "cpu",
        schedule: TrainingSchedule | None = None,
        trained: Callable[[TrainerReport, bytes], None] = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.settings = settings = settings or HeadSettings()
        self.width = width
        self.rejected = 0
        """Features that were not finite."""
        self.lost = False
        """Whether nobody trains it any more, because its process died too often."""
        self._device = device
        self._schedule = schedule or TrainingSchedule()
        self._trained = trained
        self._clock = clock
        self._command = tuple(command)
        self._grace = grace
        self._known = _Known(TrainerReport(), None)
        self._news = threading.Condition()  # for all below
        self._labelled: deque[Example] = deque(maxlen=settings.capacity)  # more than that it would not remember
        self._state: bytes = b""
        self._restore = False
        self._epoch = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False  # the present process
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have a process train it. Returns at once, also where that was done before."""
        with self._news:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._supervise, name="darts-quality", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the process. It is given some seconds, since it may be in the middle of a training."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._grace)
            if thread.is_alive() and (process := self._process) is not None:
                process.kill()  # it does not even read
            thread.join()

    # --- scoring and learning -----------------------------------------------

    @property
    def status(self) -> HeadStatus:
        return HeadStatus.TRAINER_LOST if self.lost else self._known.report.status

    @property
    def report(self) -> TrainerReport:
        """What the process told last."""
        return self._known.report

    @property
    def pid(self) -> int | None:
        """Of the process that trains; ``None`` while there is none."""
        process = self._process
        return None if process is None else process.pid

    def metrics(self) -> ScoreMetrics:
        """How good its scores were on labels that it had not been trained on."""
        return self._known.report.metrics

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """As `head.Head.score`."""
        feature = self._feature(hidden, position)
        report, snapshot = self._known
        status = self.status
        if feature is None:
            status = HeadStatus.BAD_FEATURE
        if feature is None or snapshot is None or status is not HeadStatus.READY:
            return Score(report.prior, status)
        return Score(snapshot.chance(feature), status)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool:
        """As `head.Head.learn`; it is learned when the process takes it."""
        Label(0.0, target, survival)
        if self._feature(hidden, position) is None:
            return False
        with self._news:
            self._labelled.append(Example(hidden, position, target, survival))
            self._news.notify_all()
        return True

    def restore(self, data: bytes) -> None:
        """Go on from what was saved; no ``data`` is a new head.

        Raises:
            StateDamaged, StateTooNew, InvalidRequest: nothing was changed.
        """
        snapshot = Snapshot.read(data, self.width, self.settings.hidden) if data else None
        with self._news:
            self._epoch += 1
            self._state, self._restore = data, True
            trained = snapshot is not None and snapshot.steps > 0
            report = TrainerReport(epoch=self._epoch, status=HeadStatus.READY if trained else HeadStatus.NO_LABELS)
            self._known = _Known(replace(report, steps=snapshot.steps if snapshot else 0), snapshot)
            self._news.notify_all()

    def _feature(self, hidden: NDArray[np.floating], position: int) -> NDArray[np.float32] | None:
        if hidden.shape != (self.width,):
            raise ValueError(f"hidden must have shape ({self.width},), got {hidden.shape}")
        feature = assembled(hidden, position)
        self.rejected += feature is None
        return feature

    # --- the process, in threads of their own --------------------------------

    def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=DEATHS + 1)
        while not self._closed:
            try:
                self._live()
            except OSError as error:
                logger.error("the quality head's trainer cannot be started: %s", error)
            if self._closed:
                return
            deaths.append(self._clock())
            if len(deaths) > DEATHS and deaths[-1] - deaths[0] < DEATH_SECONDS:
                self.lost = True
                logger.error("the quality head's trainer died %d times in an hour; it is left dead", len(deaths))
                return
            logger.warning("the quality head's trainer died; another one is started")

    def _live(self) -> None:
        """One process, from its start to its end."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        assert process.stdout is not None
        with self._news:
            self._process, self._ended = process, False
        reader = threading.Thread(
            target=self._listen, args=(process.stdout,), name="darts-quality-reports", daemon=True
        )
        reader.start()
        try:
            self._feed(process.stdin)
        except OSError:
            pass  # it has died, as is seen below
        finally:
            self._end(process, reader)

    def _feed(self, stream: IO[bytes]) -> None:
        write(stream, self._opening())
        while (frames := self._waiting()) is not None:
            for frame in frames:
                write(stream, frame)

    def _opening(self) -> Frame:
        with self._news:
            self._restore = False
            says = {
                "width": self.width,
                "settings": asdict(self.settings),
                "device": self._device,
                "schedule": asdict(self._schedule),
                "epoch": self._epoch,
            }
            return Frame(says, self._state)

    def _waiting(self) -> list[Frame] | None:
        """What the process is to be told next; ``None`` if it is to end, or has."""
        with self._news:
            self._news.wait_for(lambda: self._labelled or self._restore or self._ended or self._closed)
            if self._ended or self._closed:
                return None
            labelled, restore, epoch, state = list(self._labelled), self._restore, self._epoch, self._state
            self._labelled.clear()
            self._restore = False
        frames = [Frame({"kind": "restore", "epoch": epoch}, state)] if restore else []
        return [*frames, Frame({"kind": "labels"}, examples(labelled))] if labelled else frames

    def _end(self, process: "subprocess.Popen[bytes]", reader: threading.Thread) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # what could not be written any more
            process.stdin.close()
        try:
            process.wait(self._grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()
        with self._news:
            self._process = None

    def _listen(self, stream: IO[bytes]) -> None:
        try:
            while (frame := read(stream)) is not None:
                self._hear(TrainerReport.read(frame.says), frame.body)
        except (ValueError, KeyError, TypeError, StateError, InvalidRequest) as error:
            logger.error("the quality head's trainer said what cannot be read: %r", error)
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()

    def _hear(self, report: TrainerReport, state: bytes) -> None:
        snapshot = Snapshot.read(state, self.width, self.settings.hidden) if state else None
        with self._news:
            if report.epoch != self._epoch:
                return  # of before it was told to restore
            self._known = _Known(report, snapshot or self._known.snapshot)
            self._state = state or self._state
        self._trained(report, state)
