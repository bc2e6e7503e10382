"""A quality head that scores in this process, and is trained in another process.

A thread would share the interpreter lock with the event loop.
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
"""Deaths within `DEATH_SECONDS` after which the process is restarted. After one more death it is not."""
DEATH_SECONDS = 3600.0
NEW_LABELS = 64
"""Labels after which a training starts at once."""
GRACE_SECONDS = 5.0
"""Time to finish a training, which takes a second."""
ANSWER_SECONDS = 300.0
"""Importing torch from a slow disk may take minutes."""


class RemoteHead:
    """A head that all threads may use. Status and metrics are of the last report of its process.

    Args:
        width: size of the model's hidden states.
        on_report: called in a thread with each report and the new state, empty if no step was made.
    """

    def __init__(
        self,
        width: int,
        settings: HeadSettings | None = None,
        *,
        on_report: Callable[[TrainerReport, bytes], None] = lambda _, __: None,
    ) -> None:
        self.settings = settings or HeadSettings()
        self.width = width
        self.is_lost = False
        """Whether the process died too often, and is not restarted."""
        self._train = partial(trainer.train, width, self.settings)
        self._on_report = on_report
        # A single tuple, so that a reader in another thread never sees half of a change.
        self._report_and_snapshot: tuple[TrainerReport, Snapshot | None] = (TrainerReport(), None)

        # Guards the attributes below.
        self._changed = threading.Condition()
        # The replay buffer would not hold more.
        self._unsent_examples: deque[Example] = deque(maxlen=self.settings.capacity)
        self._state = b""
        self._num_restores = 0
        self._pool: ProcessPoolExecutor | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, name="darts-quality", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for a running training, at most `GRACE_SECONDS`, and end the process. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)
            # The process may still be starting, or hang.
            self._kill_process()
            self._thread.join()

    # --- scoring and learning -----------------------------------------------

    @property
    def status(self) -> PruningStatus:
        return PruningStatus.TRAINER_LOST if self.is_lost else self.report.status

    @property
    def report(self) -> TrainerReport:
        report, _ = self._report_and_snapshot
        return report

    def score(self, hidden: NDArray[np.floating], position: int) -> Score:
        """Score a trajectory by its hidden state after ``position`` tokens, or by the prior, see `Score`."""
        feature = assemble_feature(hidden, position)
        report, snapshot = self._report_and_snapshot
        if feature is None:
            # A value of the hidden state is not finite.
            return Score(report.prior, None)
        status = self.status
        if snapshot is None or status is not PruningStatus.READY:
            return Score(report.prior, status)
        return Score(snapshot.score(feature), status)

    def learn(
        self,
        hidden: NDArray[np.floating],
        position: int,
        target: float,
        survival: float = 1.0,
    ) -> None:
        """Add a label for the next training, see `head.Head.learn`."""
        with self._changed:
            self._unsent_examples.append((hidden, position, target, survival))
            self._changed.notify_all()

    def restore(self, data: bytes) -> None:
        """Continue from a saved state. Empty ``data`` stands for a new head.

        Raises:
            StateDamaged, InvalidRequest: see `Snapshot.from_bytes`; nothing was changed.
        """
        snapshot = self._parse_state(data)
        report = TrainerReport()
        if snapshot is not None and snapshot.steps:
            report = TrainerReport(PruningStatus.READY, steps=snapshot.steps)
        with self._changed:
            # With another number of restores, `_apply` drops the report of a training that runs now.
            self._num_restores += 1
            self._state = data
            self._report_and_snapshot = (report, snapshot)
            if not data:
                # A new head must not learn labels from before.
                self._unsent_examples.clear()
            self._changed.notify_all()

    def _parse_state(self, state: bytes) -> Snapshot | None:
        if not state:
            return None
        return Snapshot.from_bytes(state, self.width, self.settings.hidden)

    # --- the process, and the thread that supervises it -----------------------

    def _supervise(self) -> None:
        """Train until `close`. Replace a process that dies or hangs, unless it has died too often."""
        death_times: deque[float] = deque(maxlen=MAX_DEATHS + 1)
        while not self._closed:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), trainer.start_worker)
            try:
                self._train_until_closed(self._pool)
            except TimeoutError:
                logger.error("the quality head's trainer has not answered for %g seconds", ANSWER_SECONDS)
            except Exception:
                # The process died (`close` may have killed it) or could not be started, or training or the callback
                # raised.
                if not self._closed:
                    logger.exception("the quality head's trainer failed, or its report could not be handled")
            finally:
                # The reports of the process had the trained state. Only its labels are lost.
                self._kill_process()
                self._pool.shutdown(wait=False)
            if self._closed:
                return

            death_times.append(time.monotonic())
            if len(death_times) > MAX_DEATHS and death_times[-1] - death_times[0] < DEATH_SECONDS:
                logger.error(
                    "the quality head's trainer died %d times in an hour; it is not restarted", len(death_times)
                )
                self.is_lost = True
                return
            logger.warning("the quality head's trainer died and is restarted")

    def _train_until_closed(self, pool: ProcessPoolExecutor) -> None:
        """Send restores and labels to the process, and apply its reports, until the head is closed.

        Raises:
            BrokenExecutor: the process has died.
            TimeoutError: it hangs.
        """
        # No number of restores is -1, so a new process gets the newest state first.
        restores_sent = -1
        next_training_at = 0.0

        def has_work(min_examples: int) -> bool:
            is_state_new = restores_sent != self._num_restores
            return self._closed or is_state_new or len(self._unsent_examples) >= min_examples

        while True:
            with self._changed:
                # Wait for a label, and then for enough labels or the time of the next training.
                self._changed.wait_for(lambda: has_work(min_examples=1))
                pause = max(0.0, next_training_at - time.monotonic())
                self._changed.wait_for(lambda: has_work(min_examples=NEW_LABELS), pause)
                if self._closed:
                    return
                # The lock is held while `submit` starts the process, so that `close` finds it. `submit` does not wait,
                # because a thread sends. If the process has died, `submit` raises, and the labels are kept.
                if restores_sent != self._num_restores:
                    answer = pool.submit(self._train, self._state, [])
                    restores_sent = self._num_restores
                else:
                    answer = pool.submit(self._train, None, list(self._unsent_examples))
                    self._unsent_examples.clear()
            report, state = answer.result(ANSWER_SECONDS)
            next_training_at = time.monotonic() + self.settings.max_delay
            self._apply(report, state, restores_sent)

    def _kill_process(self) -> None:
        # `ProcessPoolExecutor.kill_workers` comes with Python 3.14.
        if self._pool is not None and self._pool._processes:
            for process in list(self._pool._processes.values()):
                process.kill()

    def _apply(self, report: TrainerReport, state: bytes, restores_sent: int) -> None:
        """Use a training's report, and its state if it is not empty."""
        new_snapshot = self._parse_state(state)
        with self._changed:
            # A restore since the training began makes its report outdated.
            if restores_sent != self._num_restores:
                return
            _, snapshot = self._report_and_snapshot
            self._report_and_snapshot = (report, new_snapshot or snapshot)
            self._state = state or self._state
        self._on_report(report, state)
