"""A quality head that is trained in a process of its own, and scores in this one.

A training thread in the server instead would share one interpreter lock with the event loop.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from darts_server.quality import trainer
from darts_server.quality.snapshot import Snapshot, assemble_feature
from darts_server.quality.types import Example, HeadSettings, Score, TrainerReport
from darts_server.types import PruningStatus

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Deaths of the process within `DEATH_SECONDS`; after one more no other process is started."""
DEATH_SECONDS = 3600.0
GRACE_SECONDS = 5.0
"""For the end of a training, which takes a second."""
ANSWER_SECONDS = 300.0
"""Without an answer for so long the process counts as hanging. A training takes a second, but importing torch from a
slow disk may take minutes."""


class RemoteHead:
    """Scores and learns here, and is trained in a process of its own. Any thread may call any method.

    Status, metrics and scores are those of the last report of that process. It is not started before `start`.

    Args:
        width: of the model's hidden states.
        on_report: called in a thread of its own with each report, and with the new state where there is one.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings | None = None,
        *,
        on_report: Callable[[TrainerReport, bytes], None] = lambda _, __: None,
    ) -> None:
        self.settings = settings = settings or HeadSettings()
        self.width = width
        self.is_lost = False
        """Whether training has stopped for good, because the process died too often."""
        self._train = partial(trainer.train, width, settings)
        self._on_report = on_report
        # The newest report and snapshot. One value, so that a reader in another thread never sees half of a change.
        self._current: tuple[TrainerReport, Snapshot | None] = TrainerReport(), None
        self._changed = threading.Condition()  # for all below
        self._unsent: deque[Example] = deque(maxlen=settings.capacity)  # the head would not remember more than that
        self._state = b""
        self._restores = 0
        self._pool: ProcessPoolExecutor | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the training process in the background, unless that was done before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, name="darts-quality", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the process. This may take some seconds: it first finishes the training that it is in."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)
            self._kill_process()  # it still starts, or hangs
            self._thread.join()

    # --- scoring and learning -----------------------------------------------

    @property
    def status(self) -> PruningStatus:
        return PruningStatus.TRAINER_LOST if self.is_lost else self.report.status

    @property
    def report(self) -> TrainerReport:
        """The last report of the process."""
        return self._current[0]

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """Predict the probability that a trajectory with this hidden state after ``position`` tokens is correct.

        Unless the status is ``READY``, it is the share of correct ones among the labels.
        """
        feature = assemble_feature(hidden, position)
        report, snapshot = self._current
        status = None if feature is None else self.status
        if feature is None or snapshot is None or status is not PruningStatus.READY:
            return Score(report.prior, status)
        return Score(snapshot.score(feature), status)

    def learn(self, hidden: NDArray[np.floating], position: int, target: float, survival: float = 1.0) -> None:
        """Add a label, see `head.Head.learn`, for the next training."""
        with self._changed:
            self._unsent.append((hidden, position, target, survival))
            self._changed.notify_all()

    def restore(self, data: bytes) -> None:
        """Continue from a saved state; empty ``data`` stands for a new head, without labels.

        Raises:
            StateDamaged, InvalidRequest: nothing was changed.
        """
        snapshot = Snapshot.from_bytes(data, self.width, self.settings.hidden) if data else None
        steps = 0 if snapshot is None else snapshot.steps
        status = PruningStatus.READY if steps else PruningStatus.NO_LABELS
        with self._changed:
            self._restores += 1
            self._state = data
            self._current = TrainerReport(status, steps=steps), snapshot
            if not data:
                self._unsent.clear()
            self._changed.notify_all()

    # --- the process, in a thread of its own ----------------------------------

    def _supervise(self) -> None:
        """Train until `close`, in a process that is replaced when it dies or hangs, until it has died too often."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        while not self._closed:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), trainer.start_worker)
            try:
                self._run(self._pool)
            except TimeoutError:
                logger.error("the quality head's trainer has not answered for %g seconds", ANSWER_SECONDS)
            except Exception:  # it died or cannot be started, training raised, or the callback has a bug of its own
                if not self._closed:  # else it may have been killed
                    logger.exception("the quality head's trainer failed, or its report could not be handled")
            finally:
                self._kill_process()  # it has nothing to save: all that is kept was in its reports
                self._pool.shutdown(wait=False)
            if self._closed:
                return
            deaths.append(time.monotonic())
            if len(deaths) > MAX_DEATHS and deaths[-1] - deaths[0] < DEATH_SECONDS:
                logger.error("the quality head's trainer died %d times in an hour; it is not restarted", len(deaths))
                self.is_lost = True
                return
            logger.warning("the quality head's trainer died and is restarted")

    def _run(self, pool: ProcessPoolExecutor) -> None:
        """Send restores and labels to the process, and apply its reports, until the head is closed.

        Raises:
            BrokenExecutor: the process has died.
            TimeoutError: it hangs.
        """
        restores, due = -1, 0.0  # a new process first restores the newest state

        def is_due(labels: int) -> bool:
            return self._closed or restores != self._restores or len(self._unsent) >= labels

        while True:
            with self._changed:
                self._changed.wait_for(lambda: is_due(1))
                until_due = max(0.0, due - time.monotonic())
                self._changed.wait_for(lambda: is_due(self.settings.new_labels), until_due)
                if self._closed:
                    return
                # Submitted under the lock: `close` sees the process that this starts, and labels stay unsent if the
                # last one has died since. Nothing waits here: a thread of the pool sends, however full the pipe is.
                if restores != self._restores:
                    answer, restores = pool.submit(self._train, self._state, []), self._restores
                else:
                    answer = pool.submit(self._train, None, list(self._unsent))
                    self._unsent.clear()
            report, state = answer.result(ANSWER_SECONDS)
            due = time.monotonic() + self.settings.max_delay
            self._apply(report, state, restores)

    def _kill_process(self) -> None:
        """Kill the process of the pool, if it has one; `ProcessPoolExecutor.kill_workers` comes with Python 3.14."""
        processes = None if self._pool is None else self._pool._processes
        for process in list((processes or {}).values()):
            process.kill()

    def _apply(self, report: TrainerReport, state: bytes, restores: int) -> None:
        """Score by the new state from now on, unless there was a restore after those that it was trained from."""
        snapshot = Snapshot.from_bytes(state, self.width, self.settings.hidden) if state else None
        with self._changed:
            if restores != self._restores:
                return
            self._current = report, snapshot or self._current[1]
            self._state = state or self._state
        self._on_report(report, state)
