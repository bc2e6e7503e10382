"""A head in a process of its own is the head in this one."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from darts_server.exceptions import InvalidRequest, StateDamaged
from darts_server.quality.head import Head
from darts_server.quality.remote import DEATH_SECONDS, DEATHS, RemoteHead
from darts_server.quality.report import TrainerReport, TrainingSchedule
from darts_server.quality.types import HeadSettings, HeadStatus, Score
from tests.quality.synthetic import QUICK, WIDTH, World, taught

STEADY = TrainingSchedule(labels=64, seconds=3600.0, steps=30, limit=3600.0)
"""Trained after each 64 labels, however busy the machine is."""
PATIENCE = 60.0


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.005)


@contextmanager
def a_head(settings: HeadSettings = QUICK, schedule: TrainingSchedule = STEADY, **more: Any) -> Iterator[RemoteHead]:
    head = RemoteHead(WIDTH, settings, schedule=schedule, **more)
    head.start()
    try:
        yield head
    finally:
        head.close()


def teach(head: RemoteHead, world: World, rounds: int = 1) -> None:
    for _ in range(rounds):
        steps = head.report.steps
        for hidden, target in world.trajectories(64):
            head.learn(hidden.astype(np.float32), 512, target)
        until(lambda before=steps: head.report.steps > before, "it is trained")  # type: ignore[misc]


def test_scores_figures_and_status_are_those_of_the_head_in_this_process() -> None:
    here, world = Head(WIDTH, QUICK), World(seed=3)
    states: list[bytes] = []
    with a_head(trained=lambda _, state: states.append(state)) as there:
        for hidden, _ in World(seed=4).trajectories(3):
            assert there.score(hidden, 512) == here.score(hidden, 512) == Score(0.5, HeadStatus.NO_LABELS)
        for _ in range(6):
            steps = there.report.steps
            for hidden, target in world.trajectories(64):
                single = hidden.astype(np.float32)
                for head in (here, there):
                    head.learn(single, 512, target, 0.5 + target / 4)
            here.train(30)
            until(lambda before=steps: there.report.steps > before, "it is trained")  # type: ignore[misc]
            assert (there.status, there.report.steps, there.report.prior) == (here.status, here.steps, here.prior)
            assert there.metrics() == here.metrics()
            for hidden, _ in World(seed=5).trajectories(20):
                assert there.score(hidden, 512) == here.score(hidden, 512)
        assert there.report.made == 180
        assert [state for state in states if state][-1] == here.state()


def test_labels_that_are_few_and_alone_are_learned_after_a_while() -> None:
    with a_head(replace(QUICK, fewest=4), TrainingSchedule(labels=64, seconds=0.05, steps=5)) as head:
        for hidden, target in World().trajectories(8):
            head.learn(hidden, 512, target)
        until(lambda: head.status is HeadStatus.READY, "few labels are trained on")
        assert 0 < head.score(hidden, 512).value < 1


def test_before_it_is_started_and_with_labels_of_one_class_it_is_neutral() -> None:
    hidden = np.zeros(WIDTH)
    assert RemoteHead(WIDTH).score(hidden, 512) == Score(0.5, HeadStatus.NO_LABELS)
    with a_head() as head:
        for x, _ in World().trajectories(64):
            head.learn(x, 512, 1.0)
        until(lambda: head.status is HeadStatus.ONE_CLASS, "all labels are learned")
        assert head.score(hidden, 512).value == pytest.approx(65 / 66)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_features_that_are_not_finite_are_counted_and_not_sent(bad: float) -> None:
    head, hidden = RemoteHead(WIDTH), np.zeros(WIDTH)
    hidden[2] = bad
    assert head.score(hidden, 512).status is HeadStatus.BAD_FEATURE
    assert not head.learn(hidden, 512, 1.0)
    assert head.rejected == 2
    with pytest.raises(ValueError, match="shape"):
        head.score(np.zeros(WIDTH + 1), 512)
    with pytest.raises(ValueError, match="target must be"):
        head.learn(np.zeros(WIDTH), 512, 2.0)


def test_one_that_diverges_is_neutral_and_says_so() -> None:
    with a_head(replace(QUICK, learning_rate=1e30)) as head:
        for hidden, target in World().trajectories(64):
            head.learn(hidden, 512, target)
        until(lambda: head.status is HeadStatus.DIVERGED, "it diverges")
        assert head.report.divergences == 1
        assert head.score(hidden, 512) == Score(head.report.prior, HeadStatus.DIVERGED)


def test_a_saved_head_scores_at_once_and_goes_on_in_another_process() -> None:
    saved, world = taught(World()), World(seed=6)
    head = RemoteHead(WIDTH, QUICK, schedule=STEADY)
    head.restore(saved.state())
    known = [(hidden, saved.score(hidden, 512).value) for hidden, _ in world.trajectories(5)]
    for hidden, value in known:
        assert head.score(hidden, 512) == Score(value, HeadStatus.READY)
    head.start()
    try:
        teach(head, world)
        assert head.report.steps == saved.steps + 30
    finally:
        head.close()


def test_what_is_restored_while_it_runs_replaces_what_it_was() -> None:
    saved = taught(World(seed=1))
    with a_head() as head:
        teach(head, World(), rounds=2)
        head.restore(saved.state())
        assert head.report.steps == saved.steps
        teach(head, World())
        assert head.report.steps == saved.steps + 30
        head.restore(b"")
        assert head.status is HeadStatus.NO_LABELS
        teach(head, World())
        assert head.report.steps == 30


def test_a_state_that_is_damaged_or_of_another_model_changes_nothing() -> None:
    head = RemoteHead(WIDTH, QUICK)
    head.restore(taught(World()).state())
    before = head.score(np.ones(WIDTH), 512)
    with pytest.raises(InvalidRequest, match="is of a quality head with 17 inputs"):
        head.restore(Head(WIDTH + 1, QUICK).state())
    with pytest.raises(StateDamaged):
        head.restore(b"nonsense")
    assert head.score(np.ones(WIDTH), 512) == before


def test_a_trainer_that_is_killed_is_replaced_and_goes_on_from_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    with a_head() as head:
        teach(head, World(), rounds=2)
        first = head.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: head.pid not in (None, first), "another one is there")
        assert head.status is HeadStatus.READY
        teach(head, World(seed=1))
        assert head.report.steps == 90
    assert "another one is started" in caplog.text


def test_a_trainer_that_always_dies_is_left_dead_and_the_head_is_neutral(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()
    head = RemoteHead(
        WIDTH, QUICK, command=(sys.executable, "-c", "raise SystemExit(3)"), trained=lambda *_: begun.set()
    )
    head.restore(taught(World()).state())
    assert head.score(np.zeros(WIDTH), 512).status is HeadStatus.READY
    head.start()
    until(lambda: head.lost, "nobody starts it any more")
    assert head.score(np.zeros(WIDTH), 512).status is head.status is HeadStatus.TRAINER_LOST
    assert caplog.text.count("another one is started") == DEATHS
    assert "it is left dead" in caplog.text
    assert head.learn(np.zeros(WIDTH), 512, 1.0)
    assert not begun.is_set()
    head.close()


def test_rare_deaths_are_forgiven() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += DEATH_SECONDS / 2
        return now

    deaths = 0

    class Counting(RemoteHead):
        def _live(self) -> None:
            nonlocal deaths
            deaths += 1
            if deaths == 20:
                self._closed = True

    head = Counting(WIDTH, clock=clock)
    head.start()
    until(lambda: deaths == 20, "it has died often")
    head.close()
    assert not head.lost


@pytest.mark.parametrize("says", [b"not a message, but long enough for one", b"\x02\0\0\0" + b"\0" * 8 + b"[]"])
def test_a_trainer_that_talks_nonsense_counts_as_dead(says: bytes, caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", f"import sys; sys.stdout.buffer.write({says!r})")
    head = RemoteHead(WIDTH, QUICK, command=command)
    head.start()
    until(lambda: head.lost, "nobody starts it any more")
    head.close()
    assert "cannot be read" in caplog.text


def test_one_that_cannot_be_started_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    head = RemoteHead(WIDTH, QUICK, command=("/nonexistent/python",))
    head.start()
    until(lambda: head.lost, "nobody starts it any more")
    head.close()
    assert "cannot be started" in caplog.text


def test_one_that_does_not_read_is_killed() -> None:
    head = RemoteHead(4096, command=(sys.executable, "-c", "import time; time.sleep(600)"), grace=0.1)
    head.start()
    until(lambda: head.pid, "it runs")
    for _ in range(64):
        head.learn(np.zeros(4096, np.float32), 512, 1.0)
    head.close()
    assert head.pid is None


def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import time\nfrom darts_server.quality.remote import RemoteHead\nhead = RemoteHead(16)\nhead.start()\n"
        "while not head.report.learned:\n    head.learn(__import__('numpy').zeros(16), 512, 1.0)\n    time.sleep(.05)\n"
        "print(head.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not alive(child), "the trainer has ended")


def alive(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_process_that_scores_does_not_import_torch() -> None:
    code = "import sys, darts_server.quality.remote; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_report_of_before_a_restore_does_not_undo_it() -> None:
    head = RemoteHead(WIDTH, QUICK)
    head.restore(taught(World()).state())
    before = head.report
    head._hear(TrainerReport(HeadStatus.ONE_CLASS, epoch=0), b"")
    assert head.report == before
