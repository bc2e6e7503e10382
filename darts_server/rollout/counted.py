"""Groups that are only counted: under a policy that shapes nothing, each request is served by itself.

A group gives its requests one record, so that rewards, statistics and placement work as for shaped groups.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from darts_server.caller import caller
from darts_server.engine.port import RequestTokens
from darts_server.observers import GroupEvents
from darts_server.records import CandidateRecord, GroupRecord, TrajectoryRecord, VersionSpans, extend_spans
from darts_server.rollout.spec import JoinRequest
from darts_server.serving.kept import Kept
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs

MOST_MEMBERS = 4
"""Limit of the requests of a counted group, as a multiple of its size. A request that leaves may be sent again, and its
record stays with the group."""
MAX_RESTING = 4096
"""Counted groups of all callers that wait for further requests while none of their own runs: four steps of 1,024
groups. Of too many, the oldest of the caller that has most ends as it is."""


@dataclass(slots=True, eq=False)
class Member:
    """One request of a group that is only counted. It runs on the engine by itself.

    ``generated``: returns how many tokens it has so far. ``started_at``, ``version_start``: ``None`` while it waits for
    the engine to be resumed. ``spans``: of its tokens from before the weights changed last. ``record``: ``None`` until
    it has ended.
    """

    group: "_CountedGroup"
    index: int
    generated: Callable[[], int]
    started_at: float | None = None
    version_start: int | None = None
    spans: VersionSpans = ()
    record: CandidateRecord | None = None

    def start(self) -> None:
        """Record that the engine gets the request now."""
        self.started_at = self.group.groups.clock()
        self.version_start = self.group.groups.weight_version()

    def finish(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], reason: FinishReason) -> None:
        """Record its trajectory, before its caller gets the end of it."""
        group = self.group
        trajectory = TrajectoryRecord(
            group.group_id, group.prompt_key, group.started_at, self.index, prompt_token_ids, token_ids, group.owner
        )
        group.groups.observer.trajectory_returned(trajectory)
        self._end(len(token_ids), reason, None)

    def leave(self, reason: DiscardReason, tokens: int = 0) -> None:
        """Record that it has ended without a trajectory. Harmless after it has finished.

        ``tokens``: that its caller got. The engine may have forgotten it.
        """
        if self.record is None:
            self._end(max(tokens, self.generated()), None, reason)

    def _end(self, tokens: int, finish_reason: FinishReason | None, reason: DiscardReason | None) -> None:
        # A truncated trajectory counts like the others: nothing is selected in a counted group by how it finished.
        selected_as = None if finish_reason is None else SelectedAs.SHORT
        groups = self.group.groups
        version = groups.weight_version()
        self.record = CandidateRecord(
            index=self.index,
            tokens=tokens,
            finish_reason=finish_reason,
            selected_as=selected_as,
            reason=reason,
            cut=False,
            started_at=self.started_at,
            ended_at=groups.clock(),
            weight_version_start=self.version_start,
            weight_version_end=version,
            weight=None if selected_as is None else 1.0,
            version_spans=extend_spans(self.spans, version, tokens),
        )
        self.group.end_if_over()


@dataclass(slots=True, eq=False)
class _CountedGroup:
    """``is_over_at_rest``: whether the group ends as soon as none of its requests runs."""

    groups: "CountedGroups"
    group_id: str
    join_key: str
    size: int
    policy: str
    prompt_key: str | None
    owner: str | None
    tokens: RequestTokens
    started_at: float
    request_ids: tuple[str, ...] = ()
    members: list[Member] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    is_over_at_rest: bool = False

    @property
    def seats(self) -> int:
        """Number of members that run or have finished."""
        return sum(member.record is None or member.record.reason is None for member in self.members)

    @property
    def has_most(self) -> bool:
        """Whether so many requests have left the group that no further request joins it."""
        return len(self.members) >= MOST_MEMBERS * self.size

    def expire(self) -> None:
        self.is_over_at_rest = True
        self.end_if_over()

    def end_if_over(self) -> None:
        """Report the group once nothing of it runs, and it is full or has waited long enough for further requests."""
        records = [member.record for member in self.members if member.record is not None]
        is_full = self.seats == self.size
        groups = self.groups
        if len(records) < len(self.members):
            return
        if not (is_full or self.is_over_at_rest or self.has_most):
            for dropped, _ in groups.resting.put(self.owner, self, None):
                dropped.expire()
            return
        groups.forget(self)
        if self.timer is not None:
            self.timer.cancel()
        returned = sum(record.selected_as is not None for record in records)
        outcome = Outcome.COMPLETED
        # Lengths are learned of all trajectories of a group, or of none.
        if returned < min(self.size, len(records)):
            is_failed = any(record.reason is DiscardReason.FAILED for record in records)
            outcome = Outcome.FAILED if is_failed else Outcome.CANCELLED
        if not groups.draining:
            groups.report_sealed(full=is_full, planned=self.size)
        groups.observer.group_ended(
            GroupRecord(
                group_id=self.group_id,
                prompt_key=self.prompt_key,
                policy=self.policy,
                size=returned if outcome is Outcome.COMPLETED else self.size,
                outcome=outcome,
                candidates=records,
                started_at=self.started_at,
                ended_at=groups.clock(),
                tail_wait=None,
                request_ids=self.request_ids,
                owner=self.owner,
                prompt_tokens=self.tokens.prompt,
                max_tokens=self.tokens.most,
            )
        )


class CountedGroups:
    """Find a group for each single request that the engine serves by itself, so that there is a record of the group.

    Nothing waits for other requests, and no answer is exchanged. A group takes requests until it has as many as its
    size. It ends when they have, or when none of it runs and no further one has come for a while. A request that is
    aborted, or whose caller disconnects, leaves its place to another one.

    Args: see `GroupJoiner`. ``report_sealed``: called with ``full`` and ``planned`` when a group ends.
    """

    def __init__(
        self,
        observer: GroupEvents,
        report_sealed: Callable[..., None],
        weight_version: Callable[[], int],
        timeout: float,
        named_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.observer = observer
        self.report_sealed = report_sealed
        self.weight_version = weight_version
        self.clock = clock
        self.draining = False
        self._timeout = timeout
        self._named_timeout = named_timeout
        self._groups: dict[str, list[_CountedGroup]] = {}  # by join key
        self.resting: Kept[_CountedGroup, None] = Kept(MAX_RESTING)
        """Groups that wait for further requests, and of which none runs, of each caller."""

    def join(self, request: JoinRequest[Any], generated: Callable[[], int]) -> Member:
        """Add a request to a group. Its `Member` must finish or leave."""
        groups = self._groups.setdefault(request.join_key, [])
        group = next((group for group in groups if group.seats < group.size and not group.has_most), None)
        if group is None:
            group = _CountedGroup(
                groups=self,
                group_id=f"group-{request.request_id}",
                join_key=request.join_key,
                size=request.plan.size,
                policy=request.plan.policy,
                prompt_key=request.prompt_key,
                owner=caller.get().name,
                tokens=request.tokens,
                started_at=self.clock(),
                request_ids=() if request.name is None else (request.name,),
                is_over_at_rest=self.draining,
            )
            groups.append(group)
        self.resting.pop(group.owner, group)
        member = Member(group, len(group.members), generated)
        group.members.append(member)
        group.request_ids += (request.request_id,)
        if group.timer is not None:
            group.timer.cancel()
        if not self.draining:
            group.is_over_at_rest = False
            timeout = self._timeout if request.name is None else self._named_timeout
            group.timer = asyncio.get_running_loop().call_later(timeout, group.expire)
        self.observer.candidates_started(1)
        return member

    def weights_change(self) -> None:
        """Record what running requests have generated so far, before the paused model gets other weights."""
        for group in [group for groups in self._groups.values() for group in groups]:
            for member in group.members:
                if member.record is None:
                    member.spans = extend_spans(member.spans, self.weight_version(), member.generated())

    def drain(self) -> None:
        """End every group, from now on, as soon as nothing of it runs."""
        self.draining = True
        for group in [group for groups in self._groups.values() for group in groups]:
            group.expire()

    def forget(self, group: _CountedGroup) -> None:
        """Let no further request join a group that has ended."""
        self.resting.pop(group.owner, group)
        self._groups[group.join_key].remove(group)
        if not self._groups[group.join_key]:
            del self._groups[group.join_key]
