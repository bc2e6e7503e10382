"""A quality head that is trained in a process of its own, and scores in this one."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from darts_server.exceptions import InvalidRequest, StateError
from darts_server.policy.pruning.calibration import Label
from darts_server.quality.evaluation import ScoreMetrics
from darts_server.quality.features import assemble_feature
from darts_server.quality.messages import Example, Message, pack_examples
from darts_server.quality.report import TrainerReport, TrainingSchedule
from darts_server.quality.snapshot import Snapshot
from darts_server.quality.trainer_process import COMMAND, TrainerProcess
from darts_server.quality.types import HeadSettings, HeadStatus, Score

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths of the process within `DEATH_SECONDS`; after one more no other process is started."""
DEATH_SECONDS = 3600.0
GRACE_SECONDS = 5.0
"""To end in: a training takes a second, and importing torch takes some."""


class _Current(NamedTuple):
    """The newest report and snapshot. One value, so that a reader in another thread never sees half of a change."""

    report: TrainerReport
    snapshot: Snapshot | None


class RemoteHead:
    """Scores and learns as `head.Head` does, and trains in a process of its own. Any thread may call any method.

    Status, metrics and scores are those of the last report of that process. It is not started before `start`.

    Args:
        width: of the model's hidden states.
        settings, device: see `head.Head`.
        schedule: when the head is trained.
        on_report: called in a thread of its own with each report, and with the new state where there is one.
        clock: seconds; the deaths of the process are counted by it.
        command: runs the trainer; the descriptors of its two pipes are appended.
        grace: seconds in which the process must end.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings | None = None,
        *,
        device: str = "cpu",
        schedule: TrainingSchedule | None = None,
        on_report: Callable[[TrainerReport, bytes], None] = lambda _, __: None,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.settings = settings = settings or HeadSettings()
        self.width = width
        self.is_lost = False
        """Whether training has stopped for good, because the process died too often."""
        self._device = device
        self._schedule = schedule or TrainingSchedule()
        self._on_report = on_report
        self._clock = clock
        self._command = tuple(command)
        self._grace = grace
        self._current = _Current(TrainerReport(), None)
        self._changed = threading.Condition()  # for all below
        self._unsent: deque[Example] = deque(maxlen=settings.capacity)  # the head would not remember more than that
        self._state: bytes = b""
        self._restore_unsent = False
        self._restores = 0
        self._process: TrainerProcess | None = None
        self._process_ended = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the training process in the background, unless that was done before."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._supervise, name="darts-quality", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the process. This may take some seconds: it first finishes the training that it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._grace)
            if thread.is_alive() and (process := self._process) is not None:
                process.kill()  # it does not read, so that the thread cannot even send
            thread.join()

    # --- scoring and learning -----------------------------------------------

    @property
    def status(self) -> HeadStatus:
        return HeadStatus.TRAINER_LOST if self.is_lost else self._current.report.status

    @property
    def report(self) -> TrainerReport:
        """The last report of the process."""
        return self._current.report

    @property
    def pid(self) -> int | None:
        """The process id of the trainer; ``None`` while there is none."""
        process = self._process
        return None if process is None else process.pid

    def metrics(self) -> ScoreMetrics:
        """How good its scores were on labels that it had not been trained on."""
        return self._current.report.metrics

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """See `head.Head.score`."""
        feature = self._feature(hidden, position)
        report, snapshot = self._current
        status = HeadStatus.BAD_FEATURE if feature is None else self.status
        if feature is None or snapshot is None or status is not HeadStatus.READY:
            return Score(report.prior, status)
        return Score(snapshot.score(feature), status)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> bool:
        """See `head.Head.learn`; the example waits until the process takes it."""
        Label(0.0, target, survival)  # raises if they are out of range
        if self._feature(hidden, position) is None:
            return False
        with self._changed:
            self._unsent.append(Example(hidden, position, target, survival))
            self._changed.notify_all()
        return True

    def restore(self, data: bytes) -> None:
        """Continue from a saved state; empty ``data`` stands for a new head.

        Raises:
            StateDamaged, StateTooNew, InvalidRequest: nothing was changed.
        """
        snapshot = Snapshot.from_bytes(data, self.width, self.settings.hidden) if data else None
        steps = 0 if snapshot is None else snapshot.steps
        status = HeadStatus.READY if steps else HeadStatus.NO_LABELS
        with self._changed:
            self._restores += 1
            self._state, self._restore_unsent = data, True
            self._current = _Current(TrainerReport(status, steps=steps, restores=self._restores), snapshot)
            self._changed.notify_all()

    def _feature(self, hidden: NDArray[np.floating], position: int) -> NDArray[np.float32] | None:
        if hidden.shape != (self.width,):
            raise ValueError(f"hidden must have shape ({self.width},), got {hidden.shape}")
        return assemble_feature(hidden, position)

    # --- the process, in threads of their own --------------------------------

    def _supervise(self) -> None:
        """Keep a process running until `close`, or until it has died too often."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        while not self._closed:
            try:
                self._run_process()
            except OSError as error:
                logger.error("the quality head's trainer cannot be started: %s", error)
            if self._closed:
                return
            deaths.append(self._clock())
            if len(deaths) > MAX_DEATHS and deaths[-1] - deaths[0] < DEATH_SECONDS:
                logger.error("the quality head's trainer died %d times in an hour; it is not restarted", len(deaths))
                self.is_lost = True
                return
            logger.warning("the quality head's trainer died and is restarted")

    def _run_process(self) -> None:
        """Start one process and send to it until it ends or the head is closed."""
        process = TrainerProcess(self._command)
        with self._changed:
            self._process, self._process_ended = process, False
        reader = threading.Thread(target=self._read_reports, args=(process,), name="darts-quality-reports", daemon=True)
        reader.start()
        try:
            self._send_messages(process)
        finally:
            process.end(self._grace)
            reader.join()
            process.close()
            with self._changed:
                self._process = None

    def _send_messages(self, process: TrainerProcess) -> None:
        try:
            process.send(self._opening())
            while (messages := self._wait_for_messages()) is not None:
                for message in messages:
                    process.send(message)
        except OSError:
            pass  # it has died; the supervisor counts that

    def _opening(self) -> Message:
        with self._changed:
            self._restore_unsent = False
            fields = {
                "width": self.width,
                "settings": asdict(self.settings),
                "device": self._device,
                "schedule": asdict(self._schedule),
                "restores": self._restores,
            }
            return Message(fields, self._state)

    def _wait_for_messages(self) -> list[Message] | None:
        """Wait until there is something to send; ``None`` if the process has ended or is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._restore_unsent or self._process_ended or self._closed)
            if self._process_ended or self._closed:
                return None
            examples, restore = list(self._unsent), self._restore_unsent
            restores, state = self._restores, self._state
            self._unsent.clear()
            self._restore_unsent = False
        messages = [Message({"kind": "restore", "restores": restores}, state)] if restore else []
        return [*messages, Message({"kind": "labels"}, pack_examples(examples))] if examples else messages

    def _read_reports(self, process: TrainerProcess) -> None:
        try:
            while (message := process.receive()) is not None:
                self._apply(TrainerReport.from_json(message.fields), message.body)
        except (OSError, ValueError, KeyError, TypeError, StateError, InvalidRequest) as error:
            if self._closed and isinstance(error, OSError):
                return  # it was killed in the middle of a report
            logger.error("a report of the quality head's trainer cannot be read: %r", error)
        finally:
            with self._changed:
                self._process_ended = True
                self._changed.notify_all()

    def _apply(self, report: TrainerReport, state: bytes) -> None:
        """Score by the new state from now on, unless it is older than the last restore."""
        snapshot = Snapshot.from_bytes(state, self.width, self.settings.hidden) if state else None
        with self._changed:
            if report.restores != self._restores:
                return
            self._current = _Current(report, snapshot or self._current.snapshot)
            self._state = state or self._state
        self._on_report(report, state)
