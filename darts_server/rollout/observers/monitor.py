"""Running and recently ended groups, for viewers of the server's monitor. Without viewers it costs nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from darts_server.observers import GroupObserver
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun

MAX_GROUPS = 256
"""Ended groups that a new viewer gets, and likewise running ones: the last step or two."""
MAX_CANDIDATES = 2048
"""Candidates of all ended groups together, and likewise of running ones."""
MAX_CANDIDATES_PER_GROUP = 1024
"""Of a very large group only the first candidates are shown."""

Fields = dict[str, Any]
"""Fields by name, without those that are unknown or do not apply."""
MaySee = Callable[[str | None], bool]
"""Whether the groups of an owner may be seen."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a group, or the changes of its state.

    A full state has ``began`` among its ``fields`` and all fields of its ``candidates``. Changes have only the fields
    that changed, and the ``index`` of each candidate. Times are seconds on the runner's clock.
    """

    group_id: str
    fields: Fields
    candidates: Sequence[Fields]


@dataclass(frozen=True, slots=True)
class MonitorUpdate:
    """What changed since a viewer's previous update.

    ``now``: on the runner's clock. ``dropped``: ids of running groups that get no more updates, as newer ones took
    their place. ``running``, ``candidates``: number of running groups, and of their candidates.
    """

    now: float
    groups: Sequence[GroupState]
    dropped: Sequence[str]
    running: int
    candidates: int


class Monitor(GroupObserver):
    """Keep the records of the last groups that ended, and count what runs.

    Args:
        rollouts: running groups.
        clock: the runner's.
        max_groups: most ended groups, and most running ones, that are shown.
        max_candidates: most candidates of these, likewise.
    """

    def __init__(
        self,
        rollouts: Rollouts[Any, Any],
        clock: Callable[[], float] = time.monotonic,
        max_groups: int = MAX_GROUPS,
        max_candidates: int = MAX_CANDIDATES,
    ) -> None:
        self.clock = clock
        self.max_groups = max_groups
        self.candidates = 0
        """Number of candidates of running groups."""
        self.ended = 0
        """Number of groups that have ended so far."""
        self._rollouts = rollouts
        self._max_candidates = max_candidates
        self._records: deque[GroupRecord] = deque()
        self._kept_candidates = 0

    def candidates_started(self, count: int) -> None:
        self.candidates += count

    def group_ended(self, record: GroupRecord) -> None:
        self.candidates -= len(record.candidates)
        self.ended += 1
        self._records.append(record)
        self._kept_candidates += _shown_candidates(record)
        limit = max(self._max_candidates, _shown_candidates(record))  # the newest group is kept in any case
        while len(self._records) > self.max_groups or self._kept_candidates > limit:
            self._kept_candidates -= _shown_candidates(self._records.popleft())

    @property
    def running(self) -> int:
        """Number of running groups."""
        return self._rollouts.running

    def ended_after(self, count: int) -> list[GroupRecord]:
        """The kept records of groups after the first ``count``, in the order in which they ended."""
        new = min(self.ended - count, len(self._records))
        return [self._records[place] for place in range(len(self._records) - new, len(self._records))]

    def newest(self, may_see: MaySee) -> Iterator[GroupRun[Any, Any]]:
        """Running groups of these owners, the newest first, as many as are shown."""
        room = self._max_candidates
        visible = (run for run in self._rollouts.newest if may_see(run.owner))
        for place, run in enumerate(visible):
            room -= _shown_candidates(run)
            if place and (place >= self.max_groups or room < 0):
                return
            yield run


@dataclass(slots=True)
class Viewer:
    """One viewer of the monitor.

    ``may_see``: whether it may see the groups of an owner.

    An update covers everything since the previous one, however long ago. So a viewer that updates rarely costs less.
    """

    monitor: Monitor
    may_see: MaySee
    _groups_seen: int = 0
    _running: dict[str, GroupState] = field(default_factory=dict)

    def next_update(self) -> MonitorUpdate:
        """Everything that changed since the previous update; the first one has full states."""
        changes, previous, self._running = [], self._running, {}
        for record in filter(lambda record: self.may_see(record.owner), self.monitor.ended_after(self._groups_seen)):
            changes.append(_changes(_state_of_record(record), previous.pop(record.group_id, None)))
        self._groups_seen = self.monitor.ended
        for run in self.monitor.newest(self.may_see):
            if run.spec.group_id in self._running:
                continue  # callers have chosen the same id, and viewers know groups by their ids: the newest is shown
            before = previous.pop(run.spec.group_id, None)
            state = self._running[run.spec.group_id] = _state_of_run(run, before)
            changes.append(_changes(state, before))
        groups = [group for group in changes if group.fields or group.candidates]
        return MonitorUpdate(
            self.monitor.clock(), groups, list(previous), self.monitor.running, self.monitor.candidates
        )


def _shown_candidates(group: GroupRecord | GroupRun[Any, Any]) -> int:
    return min(len(group.candidates), MAX_CANDIDATES_PER_GROUP)


def _state_of_record(record: GroupRecord) -> GroupState:
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
    candidates = [_candidate_fields(c) for c in record.candidates[:MAX_CANDIDATES_PER_GROUP]]
    return GroupState(record.group_id, _without_none(fields), candidates)


def _state_of_run(run: GroupRun[Any, Any], before: GroupState | None) -> GroupState:
    """The state of a running group. ``before``: its last state, of which candidates that have ended are reused."""
    fields = {
        "began": run.started_at,
        "prompt_key": run.spec.prompt_key,
        "policy": run.spec.policy,
        "size": run.size,
        "started": len(run.candidates),
    }
    old = [] if before is None or before.fields["began"] != run.started_at else before.candidates
    candidates = [
        old[index] if index < len(old) and _is_final(old[index]) else _candidate_fields(run.candidate_record(index))
        for index in range(_shown_candidates(run))
    ]
    return GroupState(run.spec.group_id, _without_none(fields), candidates)


def _candidate_fields(record: CandidateRecord) -> Fields:
    fields = {
        "index": record.index,
        "state": _candidate_state(record),
        "tokens": record.tokens,
        "start": record.started_at,
        "stop": record.ended_at,
        "selected_as": record.selected_as,
        "reason": record.reason,
        "cut": record.cut or None,
        "resumed": record.resumed or None,
        "quality": record.quality,
    }
    return _without_none(fields)


def _candidate_state(record: CandidateRecord) -> str:
    if record.selected_as is not None:
        return "selected"
    if record.reason is not None:
        return "discarded"
    if record.finish_reason is not None:
        return "finished"
    return "waiting" if record.started_at is None else "running"


def _is_final(fields: Fields) -> bool:
    """Whether no field of this candidate changes any more."""
    return "stop" in fields and fields["state"] in ("selected", "discarded")


def _without_none(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _changes(now: GroupState, before: GroupState | None) -> GroupState:
    """The changes of a group; its full state if there was none before, or if a new group has reused its id."""
    if before is None or before.fields["began"] != now.fields["began"]:
        return now
    candidates = []
    for index, fields in enumerate(now.candidates):
        if index >= len(before.candidates):
            candidates.append(fields)
        elif (old := before.candidates[index]) is not fields and (changed := _changed_fields(fields, old)):
            candidates.append({"index": fields["index"], **changed})
    return GroupState(now.group_id, _changed_fields(now.fields, before.fields), candidates)


def _changed_fields(now: Fields, before: Fields) -> Fields:
    return {name: value for name, value in now.items() if before.get(name) != value}
