"""A head that is trained in another process behaves as one that is trained directly."""

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from darts_server.exceptions import StateDamaged
from darts_server.quality import remote, trainer
from darts_server.quality.head import Head
from darts_server.quality.remote import RemoteHead
from darts_server.quality.types import HeadSettings, Score, TrainerReport
from darts_server.types import PruningStatus
from tests.quality import fake_trainers
from tests.quality.synthetic import QUICK, WIDTH, SyntheticTask, scorer, trained_head

AFTER_64_LABELS = replace(QUICK, max_delay=3600.0, max_steps=30, max_seconds=3600.0)
"""Whatever the load of the machine, each 64 labels are followed by a training of 30 steps."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 180.0
    while not condition():
        assert time.monotonic() < end, f"timeout: {what}"
        time.sleep(0.005)


def wait_for_training(head: RemoteHead, steps: int) -> None:
    """Wait until the head has made more steps than these."""
    wait_until(lambda: head.report.steps > steps, "it is trained")


class Threads(ThreadPoolExecutor):
    """In place of a pool of one process, where it does not matter."""

    _processes: ClassVar[dict[int, Any]] = {}

    def __init__(self, workers: int, *_: object) -> None:
        super().__init__(workers)


def process_of(head: RemoteHead) -> Any:
    """Return the process of the trainer; ``None`` while there is none."""
    return None if head._pool is None else next(iter((head._pool._processes or {}).values()), None)


@contextmanager
def running_head(settings: HeadSettings = AFTER_64_LABELS, **more: Any) -> Iterator[RemoteHead]:
    head = RemoteHead(WIDTH, settings, **more)
    with closing(head):
        head.start()
        yield head


def train(head: RemoteHead, task: SyntheticTask, rounds: int = 1) -> None:
    for _ in range(rounds):
        steps = head.report.steps
        for hidden, target in task.trajectories(64):
            head.learn(hidden.astype(np.float32), 512, target)
        wait_for_training(head, steps)


def test_scores_metrics_and_status_equal_those_of_a_head_that_is_trained_directly(
    nightly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process needs seconds of a core to import torch.
    if not nightly:
        monkeypatch.setattr(trainer, "_head", None)
        monkeypatch.setattr(remote, "ProcessPoolExecutor", Threads)
    local = Head(WIDTH, QUICK)
    task = SyntheticTask(seed=3)
    states: list[bytes] = []
    with running_head(on_report=lambda _, state: states.append(state)) as trained:
        for hidden, _ in SyntheticTask(seed=4).trajectories(3):
            assert trained.score(hidden, 512) == scorer(local).score(hidden, 512) == Score(0.5, PruningStatus.NO_LABELS)
        for _ in range(3):
            steps = trained.report.steps
            for hidden, target in task.trajectories(64):
                single = hidden.astype(np.float32)
                for head in (local, trained):
                    head.learn(single, 512, target, 0.5 + target / 4)
            local.train(30)
            wait_for_training(trained, steps)
            report = trained.report
            assert replace(report, trained_seconds=0.0) == replace(local.report, trained_seconds=0.0)
            for hidden, _ in SyntheticTask(seed=5).trajectories(20):
                assert trained.score(hidden, 512) == scorer(local).score(hidden, 512)
        assert trained.report.trained_steps == 90
        assert [state for state in states if state][-1] == local.state()


def test_a_few_labels_are_trained_after_the_maximum_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(trainer, "train", fake_trainers.count_labels)
    with running_head(replace(QUICK, max_delay=0.05)) as head:
        for hidden, target in SyntheticTask().trajectories(8):
            head.learn(hidden, 512, target)
        wait_until(lambda: head.report.labels, "few labels are trained on")


def test_states_that_are_not_finite_have_no_score() -> None:
    head = RemoteHead(WIDTH)
    hidden = np.zeros(WIDTH)
    for bad in (math.nan, math.inf, 1e300):
        hidden[2] = bad
        assert head.score(hidden, 512).status is None


@pytest.mark.nightly
def test_a_restored_head_scores_at_once_and_replaces_the_head_of_a_running_process() -> None:
    saved = trained_head(SyntheticTask())
    task = SyntheticTask(seed=6)
    head = RemoteHead(WIDTH, AFTER_64_LABELS)
    head.restore(saved.state())
    for hidden, _ in task.trajectories(5):
        assert head.score(hidden, 512) == Score(scorer(saved).score(hidden, 512).value, PruningStatus.READY)
    with closing(head):
        head.start()
        train(head, task, rounds=2)
        assert head.report.steps == saved.steps + 60
        head.restore(saved.state())
        assert head.report.steps == saved.steps
        train(head, task)
        assert head.report.steps == saved.steps + 30
        head.restore(b"")
        assert head.status is PruningStatus.NO_LABELS
        train(head, task)
        assert head.report.steps == 30


def test_an_invalid_state_and_a_report_from_before_a_restore_change_nothing() -> None:
    head = RemoteHead(WIDTH, QUICK)
    head.restore(trained_head(SyntheticTask(), rounds=1).state())
    before = head.report, head.score(np.ones(WIDTH), 512)
    with pytest.raises(StateDamaged):
        head.restore(b"nonsense")
    head._apply(TrainerReport(PruningStatus.ONE_CLASS), b"", restores_sent=0)
    assert (head.report, head.score(np.ones(WIDTH), 512)) == before


@pytest.mark.nightly
def test_a_killed_trainer_is_replaced_and_continues_from_its_last_state(caplog: pytest.LogCaptureFixture) -> None:
    with running_head() as head:
        train(head, SyntheticTask(), rounds=2)
        killed = process_of(head)
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        assert head.status is PruningStatus.READY
        train(head, SyntheticTask(seed=1))
        assert process_of(head).pid != killed.pid
        assert head.report.steps == 90
    assert "died and is restarted" in caplog.text


@pytest.mark.parametrize(
    ("train", "logged", "pool"),
    [
        (fake_trainers.die, "terminated abruptly", ProcessPoolExecutor),
        (fake_trainers.hang, "has not answered", ProcessPoolExecutor),
        (fake_trainers.fail, "MemoryError", Threads),
        (fake_trainers.report_nonsense, "could not be handled", Threads),
    ],
)
def test_a_trainer_that_always_fails_is_given_up_and_leaves_no_process_or_thread(
    train: Any, logged: str, pool: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_DEATHS", 1)
    monkeypatch.setattr(remote, "ProcessPoolExecutor", pool)
    reported = threading.Event()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.2 if train is fake_trainers.hang else 60.0)
    monkeypatch.setattr(trainer, "train", train)
    head = RemoteHead(WIDTH, QUICK, on_report=lambda *_: reported.set())
    head.start()
    wait_until(lambda: head.is_lost, "it is given up")
    head.close()
    head.restore(trained_head(SyntheticTask(), rounds=1).state())
    assert head.score(np.zeros(WIDTH), 512).status is head.status is PruningStatus.TRAINER_LOST
    head.learn(np.zeros(WIDTH), 512, 1.0)
    assert not reported.is_set()
    assert caplog.text.count("died and is restarted") == 1
    assert "it is not restarted" in caplog.text
    # The queues of the pool are closed when they are collected.
    gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1, "all but the resource tracker's pipe is closed")
    assert logged in caplog.text


def test_a_trainer_that_dies_rarely_is_always_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "DEATH_SECONDS", 0.0)
    deaths = 0

    class CountingHead(RemoteHead):
        def _train_until_closed(self, pool: ProcessPoolExecutor) -> None:
            nonlocal deaths
            deaths += 1
            self._closed = deaths == 20
            raise BrokenExecutor

    head = CountingHead(WIDTH)
    head.start()
    wait_until(lambda: deaths == 20, "it has died often")
    head.close()
    assert not head.is_lost


def test_learning_does_not_wait_for_a_trainer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(trainer, "train", fake_trainers.hang)
    head = RemoteHead(4096, AFTER_64_LABELS)
    head.start()
    wait_until(lambda: process_of(head), "it runs")
    stopped = process_of(head)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        # 64 MB do not fit into a pipe.
        for _ in range(head.settings.capacity + 10):
            head.learn(np.zeros(4096, np.float32), 512, 1.0)
        assert len(head._unsent_examples) <= head.settings.capacity
        wait_until(lambda: process_of(head) not in (None, stopped), "it is replaced")
    finally:
        last = process_of(head)
        head.close()
    wait_until(lambda: not (last and last.is_alive()), "it was killed")


@pytest.mark.nightly
def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import time\nfrom darts_server.quality.remote import RemoteHead\nhead = RemoteHead(16)\nhead.start()\n"
        "while not head.report.labels:\n    head.learn(__import__('numpy').zeros(16), 512, 1.0)\n    time.sleep(.05)\n"
        "print(*head._pool._processes, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child), "the trainer has ended")


def is_alive(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_scoring_does_not_import_torch() -> None:
    code = "import sys, darts_server.quality.remote; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
