"""What runs and what has just ended, for who watches the server at work. Nothing is made while nobody does."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from darts_server.observers import GroupObserver
from darts_server.rollout.run import GroupRun
from darts_server.types import CandidateRecord, GroupRecord

MOST_GROUPS = 256
"""Ended groups that a new viewer is told of, and running ones: the last step or two."""
MOST_CANDIDATES = 2048
"""Of all these groups together, of either kind."""
MOST_OF_GROUP = 1024
"""The first candidates of a very large group stand for it."""

Row = dict[str, Any]
"""Fields by name. One that is not there is not known, or does not apply."""


class Running(Protocol):
    """The part of the rollout room that is used here."""

    @property
    def running(self) -> int: ...

    @property
    def newest(self) -> Iterator[GroupRun[Any, Any]]: ...


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group, or what is new of one.

    A whole one has ``began`` among its ``fields`` and all fields in its ``candidates``; of others there is only what
    changed, with the ``index`` of each candidate. Times are seconds on the runner's clock.
    """

    group_id: str
    fields: Row
    candidates: Sequence[Row]


@dataclass(frozen=True, slots=True)
class View:
    """What a viewer has not been told yet.

    ``now``: on the runner's clock. ``left``: ids of running groups of which no more is told, as newer ones took their
    place. ``running``, ``candidates``: how many groups run, and candidates in these.
    """

    now: float
    groups: Sequence[GroupView]
    left: Sequence[str]
    running: int
    candidates: int


class Monitor(GroupObserver):
    """Implements the observer: keeps the last groups that ended.

    Args:
        rollouts: running groups.
        clock: the runner's.
    """

    def __init__(
        self,
        rollouts: Running,
        clock: Callable[[], float] = time.monotonic,
        most_groups: int = MOST_GROUPS,
        most_candidates: int = MOST_CANDIDATES,
    ) -> None:
        self.clock = clock
        self.most_groups = most_groups
        self.viewers = 0
        self.candidates = 0
        """Of running groups."""
        self.ended = 0
        """Groups so far."""
        self._rollouts = rollouts
        self._most_candidates = most_candidates
        self._records: deque[GroupRecord] = deque()
        self._kept = 0

    def candidates_started(self, count: int) -> None:
        self.candidates += count

    def group_ended(self, record: GroupRecord) -> None:
        self.candidates -= len(record.candidates)
        self.ended += 1
        self._records.append(record)
        self._kept += _shown(record)
        while len(self._records) > self.most_groups or self._kept > max(self._most_candidates, _shown(record)):
            self._kept -= _shown(self._records.popleft())

    @property
    def running(self) -> int:
        """Groups."""
        return self._rollouts.running

    def ended_after(self, count: int) -> list[GroupRecord]:
        """Those of the groups after the first ``count`` that are kept, in the order in which they ended."""
        new = min(self.ended - count, len(self._records))
        return [self._records[place] for place in range(len(self._records) - new, len(self._records))]

    def newest(self) -> Iterator[GroupRun[Any, Any]]:
        """Running groups, the newest first, as many as are shown."""
        room = self._most_candidates
        for place, run in enumerate(self._rollouts.newest):
            room -= _shown(run)
            if place and (place >= self.most_groups or room < 0):
                return
            yield run


@dataclass(slots=True)
class Viewer:
    """One who watches; counted while within ``with``.

    It is told what is new since it looked last, however long ago. So one that looks seldom costs less, not more.
    """

    live: Monitor
    _heard: int = 0
    _known: dict[str, GroupView] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.live.viewers += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.viewers -= 1

    def look(self) -> View:
        """What is new; everything at the first look."""
        groups, before, self._known = [], self._known, {}
        for record in self.live.ended_after(self._heard):
            groups.append(_news(_of_record(record), before.pop(record.group_id, None)))
        self._heard = self.live.ended
        for run in self.live.newest():
            known = before.pop(run.recorder.group_id, None)
            view = self._known[run.recorder.group_id] = _of_run(run, known)
            groups.append(_news(view, known))
        told = [group for group in groups if group.fields or group.candidates]
        return View(self.live.clock(), told, list(before), self.live.running, self.live.candidates)


def _shown(group: GroupRecord | GroupRun[Any, Any]) -> int:
    return min(len(group.candidates), MOST_OF_GROUP)


def _of_record(record: GroupRecord) -> GroupView:
    fields = {
        "began": record.started_at,
        "prompt_key": record.prompt_key,
        "policy": record.policy,
        "size": record.size,
        "started": len(record.candidates),
        "ended": record.ended_at,
        "outcome": record.outcome.value,
        "deadline": record.deadline,
        "error": record.error,
    }
    return GroupView(record.group_id, _known(fields), [_row(c) for c in record.candidates[:MOST_OF_GROUP]])


def _of_run(run: GroupRun[Any, Any], known: GroupView | None) -> GroupView:
    recorder = run.recorder
    fields = {
        "began": recorder.opened_at,
        "prompt_key": recorder.prompt_key,
        "policy": recorder.policy,
        "size": run.size,
        "started": len(run.candidates),
    }
    rows = [] if known is None or known.fields["began"] != recorder.opened_at else known.candidates
    now = [
        rows[index] if index < len(rows) and _settled(rows[index]) else _row(run.candidate_record(index))
        for index in range(_shown(run))
    ]
    return GroupView(recorder.group_id, _known(fields), now)


def _row(record: CandidateRecord) -> Row:
    fields = {
        "index": record.index,
        "state": _state(record),
        "tokens": record.tokens,
        "start": record.started_at,
        "stop": record.ended_at,
        "selected_as": record.selected_as,
        "reason": record.reason,
        "cut": record.cut or None,
        "quality": record.quality,
    }
    return _known(fields)


def _state(record: CandidateRecord) -> str:
    if record.selected_as is not None:
        return "selected"
    if record.reason is not None:
        return "discarded"
    if record.finish_reason is not None:
        return "finished"
    return "waiting" if record.started_at is None else "running"


def _settled(row: Row) -> bool:
    """Whether nothing of it changes any more."""
    return "stop" in row and row["state"] in ("selected", "discarded")


def _known(fields: Row) -> Row:
    return {name: value for name, value in fields.items() if value is not None}


def _news(now: GroupView, known: GroupView | None) -> GroupView:
    """What is not known of the group. One that took the id of another is whole."""
    if known is None or known.fields["began"] != now.fields["began"]:
        return now
    rows = []
    for index, row in enumerate(now.candidates):
        if index >= len(known.candidates):
            rows.append(row)
        elif (old := known.candidates[index]) is not row and (new := _changed(row, old)):
            rows.append({"index": row["index"], **new})
    return GroupView(now.group_id, _changed(now.fields, known.fields), rows)


def _changed(now: Row, old: Row) -> Row:
    return {name: value for name, value in now.items() if old.get(name) != value}
