"""Running and recently ended groups, for viewers of the server's monitor. Without viewers it costs nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.kept import Kept

MAX_GROUPS = 256
"""Ended groups that a new viewer gets, and likewise running ones: the last step or two."""
MAX_CANDIDATES = 2048
"""Candidates of all ended groups together, and likewise of running ones."""
MAX_CANDIDATES_PER_GROUP = 1024
"""Of a very large group only the first candidates are shown."""

Fields = dict[str, Any]
"""JSON values by name, without those that are unknown or do not apply."""
MaySee = Callable[[str | None], bool]
"""Whether the groups of an owner may be seen."""


class Monitor:
    """Keep the records of the last groups that ended, and count what runs. At the limits, see `Kept`.

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
        self.ended = 0
        """Number of groups that have ended so far."""
        self.rollouts = rollouts
        self._max_candidates = max_candidates
        self._records: Kept[int, GroupRecord] = Kept(max_groups, max_candidates)  # by their place among all that ended

    def group_ended(self, record: GroupRecord) -> None:
        self.ended += 1
        self._records.put(record.owner, self.ended, record, _shown_candidates(record))

    def ended_after(self, count: int, may_see: MaySee) -> list[GroupRecord]:
        """The kept records of these owners' groups after the first ``count``, in the order in which they ended."""
        found: list[tuple[int, GroupRecord]] = []
        for owner, records in self._records:
            if not may_see(owner):
                continue
            for place in reversed(list(records)):
                if place <= count:
                    break
                found.append((place, records[place]))
        found.sort(key=itemgetter(0))
        return [record for _, record in found]

    def newest(self, may_see: MaySee) -> Iterator[GroupRun[Any, Any]]:
        """Running groups of these owners, the newest first, as many as are shown."""
        room = self._max_candidates
        visible = (run for run in reversed(self.rollouts.runs) if may_see(run.owner))
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
    _running: dict[str, Fields] = field(default_factory=dict)

    def next_update(self) -> Fields:
        """Return what changed since the previous update, as in `MonitorAnswer`, without ``health``.

        A group that is new to the viewer, as all are in the first update, has ``began`` and all fields of its
        candidates. Otherwise it has only the fields that changed, and the ``index`` of each candidate. Times are
        seconds on the runner's clock.
        """
        monitor, changes, previous, self._running = self.monitor, [], self._running, {}
        for record in monitor.ended_after(self._groups_seen, self.may_see):
            now = _group(record, record) | _without_none(
                {
                    "ended": record.ended_at,
                    "outcome": record.outcome.value,
                    "deadline": record.deadline,
                    "error": record.error,
                    "candidates": [_candidate(c) for c in record.candidates[:MAX_CANDIDATES_PER_GROUP]],
                }
            )
            changes.append(_changes(now, previous.pop(record.group_id, None)))
        self._groups_seen = monitor.ended
        for run in monitor.newest(self.may_see):
            group_id = run.spec.group_id
            if group_id in self._running:
                continue  # callers have chosen the same id, and viewers know groups by their ids: the newest is shown
            before = previous.pop(group_id, None)
            # The last states of candidates that do not change any more are used again.
            old = [] if before is None or before["began"] != run.started_at else before["candidates"]
            final = [c if "stop" in c and c["state"] in ("selected", "discarded") else None for c in old]
            final += [None] * (_shown_candidates(run) - len(final))
            now = self._running[group_id] = _group(run.spec, run)
            now["candidates"] = [c or _candidate(run.runner.record(index)) for index, c in enumerate(final)]
            changes.append(_changes(now, before))
        return {
            "now": monitor.clock(),
            "running": monitor.rollouts.running,
            "candidates": sum(len(run.candidates) for run in monitor.rollouts.runs),
            "groups": [group for group in changes if len(group) > 2 or group["candidates"]],  # always has its id
            "left": list(previous),
        }


def _shown_candidates(group: GroupRecord | GroupRun[Any, Any]) -> int:
    return min(len(group.candidates), MAX_CANDIDATES_PER_GROUP)


def _group(spec: GroupRecord | GroupSpec[Any], group: GroupRecord | GroupRun[Any, Any]) -> Fields:
    fields = {
        "group_id": spec.group_id,
        "began": group.started_at,
        "prompt_key": spec.prompt_key,
        "policy": spec.policy if isinstance(spec, GroupRecord) else spec.plan.policy,
        "size": group.size,
        "started": len(group.candidates),
    }
    return _without_none(fields)


def _candidate(record: CandidateRecord) -> Fields:
    if record.selected_as is not None:
        state = "selected"
    elif record.reason is not None:
        state = "discarded"
    elif record.finish_reason is not None:
        state = "finished"
    else:
        state = "waiting" if record.started_at is None else "running"
    fields = {
        "index": record.index,
        "state": state,
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


def _without_none(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _changes(now: Fields, before: Fields | None) -> Fields:
    """Return the changes of a group; all of it if there was none before, or if a new group has reused its id."""
    if before is None or before["began"] != now["began"]:
        return now
    candidates, old = [], before["candidates"]
    for index, fields in enumerate(now["candidates"]):
        if index >= len(old):
            candidates.append(fields)
        elif fields is not old[index] and (changed := _changed_fields(fields, old[index])):
            candidates.append({"index": fields["index"], **changed})
    changed = _changed_fields(now, before, but="candidates")
    return {"group_id": now["group_id"], **changed, "candidates": candidates}


def _changed_fields(now: Fields, before: Fields, but: str | None = None) -> Fields:
    return {name: value for name, value in now.items() if name != but and before.get(name) != value}
