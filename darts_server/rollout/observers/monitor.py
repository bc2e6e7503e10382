import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import zip_longest
from operator import attrgetter, itemgetter
from typing import Any

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.sessions.registry import SessionRegistry
from darts_server.rollout.sessions.session_group import SessionGroup, SessionGroupSpec
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.fair_cache import FairCache

MAX_GROUPS = 256
"""Ended groups, and running groups: the last step or two."""
MAX_CANDIDATES = 2048
"""Candidates of all ended groups, and of all running groups."""
MAX_CANDIDATES_PER_GROUP = 1024
"""Further candidates of a group are not shown."""

Fields = dict[str, Any]
"""JSON values by name, without unknown values."""
MaySee = Callable[[str | None], bool]
RunningGroup = GroupRun[Any, Any] | SessionGroup


class Monitor:
    """Keeps records of ended groups, and finds running groups. At the limits, see `FairCache`.

    ``clock``: the runner's clock, in seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[Any, Any],
        sessions: SessionRegistry,
        clock: Callable[[], float] = time.monotonic,
        max_groups: int = MAX_GROUPS,
        max_candidates: int = MAX_CANDIDATES,
    ) -> None:
        self.clock = clock
        self.max_groups = max_groups
        self.num_ended = 0
        self._rollouts = rollouts
        self._sessions = sessions
        self._max_candidates = max_candidates
        # By owner, and by the value of `num_ended` at the end of the group.
        self._records: FairCache[int, GroupRecord] = FairCache(max_groups, max_candidates)

    def group_ended(self, record: GroupRecord) -> None:
        self.num_ended += 1
        self._records.put(record.owner, self.num_ended, record, _count_shown(record))

    def ended_after(self, count: int, may_see: MaySee) -> list[GroupRecord]:
        """Return kept records of visible groups after the first ``count``, in order of end."""
        found: list[tuple[int, GroupRecord]] = []
        for owner, records in self._records:
            if not may_see(owner):
                continue
            # The newest first, so that groups that the viewer has seen take no time.
            for end_number in reversed(list(records)):
                if end_number <= count:
                    break
                found.append((end_number, records[end_number]))
        found.sort(key=itemgetter(0))
        return [record for _, record in found]

    def running_groups(self) -> list[RunningGroup]:
        """The newest group comes first."""
        return list(
            merge(
                reversed(self._rollouts.runs),
                reversed(self._sessions.running),
                key=attrgetter("started_at"),
                reverse=True,
            )
        )

    def shown_groups(self, running: Iterable[RunningGroup], may_see: MaySee) -> Iterator[RunningGroup]:
        num_groups = 0
        num_candidates = 0
        for group in running:
            if not may_see(group.owner):
                continue
            num_groups += 1
            num_candidates += _count_shown(group)
            is_beyond_limit = num_groups > self.max_groups or num_candidates > self._max_candidates
            # The newest group is always shown.
            if is_beyond_limit and num_groups > 1:
                return
            yield group


@dataclass(slots=True)
class Viewer:
    monitor: Monitor
    may_see: MaySee
    _num_ended_seen: int = 0
    # Fields of the running groups in the previous update, by group id.
    _running_fields: dict[str, Fields] = field(default_factory=dict)

    def next_update(self) -> Fields:
        """Return the changes since the previous update, as in `MonitorAnswer`, without ``health``.

        A group that is new to the viewer has ``began`` and all fields. Any other group has only the fields that
        changed, and the ``index`` of each changed candidate. Times are seconds of the runner's clock.
        """
        monitor = self.monitor
        changes: list[Fields] = []
        previous = self._running_fields
        self._running_fields = {}

        for record in monitor.ended_after(self._num_ended_seen, self.may_see):
            now = _group_fields(record, record, record.policy)
            now["ended"] = record.ended_at
            now["outcome"] = record.outcome.value
            if record.deadline is not None:
                now["deadline"] = record.deadline
            if record.error is not None:
                now["error"] = record.error
            now["candidates"] = [_candidate_fields(c) for c in record.candidates[:MAX_CANDIDATES_PER_GROUP]]
            changes.append(_group_changes(now, previous.pop(record.group_id, None)))
        self._num_ended_seen = monitor.num_ended

        running = monitor.running_groups()
        for group in monitor.shown_groups(running, self.may_see):
            group_id = group.spec.group_id
            # If callers have chosen the same id, the newest group is shown.
            if group_id in self._running_fields:
                continue
            before = previous.pop(group_id, None)
            now = _group_fields(group.spec, group, group.spec.plan.policy)
            candidates_before: list[Fields] = []
            if before is not None and before["began"] == group.started_at:
                candidates_before = before["candidates"]
            candidates: list[Fields] = []
            for index in range(_count_shown(group)):
                if index < len(candidates_before) and _is_final(candidates_before[index]):
                    candidates.append(candidates_before[index])
                else:
                    candidates.append(_candidate_fields(group.make_candidate_record(index)))
            now["candidates"] = candidates
            self._running_fields[group_id] = now
            changes.append(_group_changes(now, before))

        return {
            "now": monitor.clock(),
            "running": len(running),
            "candidates": sum(len(group.candidates) for group in running),
            # A group without changes has two fields: its id and no candidates.
            "groups": [fields for fields in changes if len(fields) > 2 or fields["candidates"]],
            # Previous groups that are neither shown nor ended.
            "left": list(previous),
        }


def _count_shown(group: GroupRecord | RunningGroup) -> int:
    return min(len(group.candidates), MAX_CANDIDATES_PER_GROUP)


def _group_fields(
    spec: GroupRecord | GroupSpec[Any] | SessionGroupSpec,
    group: GroupRecord | RunningGroup,
    policy: str,
) -> Fields:
    fields = {
        "group_id": spec.group_id,
        "began": group.started_at,
        "prompt_key": spec.prompt_key,
        "policy": policy,
        "size": group.size,
        "started": len(group.candidates),
    }
    return _without_none(fields)


def _is_final(candidate: Fields) -> bool:
    return "stop" in candidate and candidate["state"] in ("selected", "discarded")


def _candidate_fields(record: CandidateRecord) -> Fields:
    if record.selected_as is not None:
        state = "selected"
    elif record.reason is not None:
        state = "discarded"
    elif record.finish_reason is not None:
        state = "finished"
    elif record.started_at is None:
        state = "waiting"
    else:
        state = "running"
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
        "turns": record.turns,
        "tool_seconds": record.tool_seconds,
        "tools": list(zip_longest(record.tool_times[::2], record.tool_times[1::2])) or None,
    }
    return _without_none(fields)


def _without_none(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _group_changes(now: Fields, before: Fields | None) -> Fields:
    # The group is new, or a newer group has the same id.
    if before is None or before["began"] != now["began"]:
        return now
    candidates_before = before["candidates"]
    candidates: list[Fields] = []
    for index, fields in enumerate(now["candidates"]):
        if index >= len(candidates_before):
            candidates.append(fields)
        elif fields is not candidates_before[index]:
            changed = _changed_fields(fields, candidates_before[index])
            if changed:
                candidates.append({"index": fields["index"], **changed})
    group_fields = {name: value for name, value in now.items() if name != "candidates"}
    return {"group_id": now["group_id"], **_changed_fields(group_fields, before), "candidates": candidates}


def _changed_fields(now: Fields, before: Fields) -> Fields:
    return {name: value for name, value in now.items() if before.get(name) != value}
