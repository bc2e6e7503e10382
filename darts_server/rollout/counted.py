import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from darts_server.caller import caller
from darts_server.engine.port import RequestTokens
from darts_server.observers import GroupEvents
from darts_server.records import CandidateRecord, GroupRecord, TrajectoryRecord, VersionSpans, extend_spans
from darts_server.rollout.spec import JoinRequest
from darts_server.serving.fair_cache import FairCache
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs

MOST_MEMBERS = 4
"""Requests per seat: requests that left may be sent again."""
MAX_IDLE = 4096
"""Groups that wait for requests without a running request: four steps of 1,024 groups."""


@dataclass(slots=True, eq=False)
class Member:
    group: "_CountedGroup"
    index: int
    count_tokens: Callable[[], int]
    """The engine may have forgotten tokens after the end."""
    started_at: float | None = None
    """None while the request waits for the engine."""
    version_start: int | None = None
    spans: VersionSpans = ()
    """Versions of tokens before the last change of weights."""
    record: CandidateRecord | None = None

    def start(self) -> None:
        self.started_at = self.group.registry.clock()
        self.version_start = self.group.registry.weight_version()

    def finish(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], reason: FinishReason) -> None:
        """Report the trajectory. Called before the caller gets the last tokens."""
        group = self.group
        trajectory = TrajectoryRecord(
            group.group_id,
            group.prompt_key,
            group.started_at,
            self.index,
            prompt_token_ids,
            token_ids,
            group.owner,
        )
        group.registry.observer.trajectory_returned(trajectory)
        self._end(len(token_ids), reason, None)

    def leave(self, reason: DiscardReason, tokens: int = 0) -> None:
        """End a running request without a trajectory. ``tokens``: tokens that the caller got."""
        if self.record is None:
            self._end(max(tokens, self.count_tokens()), None, reason)

    def _end(self, tokens: int, finish_reason: FinishReason | None, reason: DiscardReason | None) -> None:
        registry = self.group.registry
        version = registry.weight_version()
        selected_as = None
        weight = None
        # Truncated trajectories count too: a counted group selects nothing.
        if finish_reason is not None:
            selected_as = SelectedAs.SHORT
            weight = 1.0
        self.record = CandidateRecord(
            index=self.index,
            tokens=tokens,
            finish_reason=finish_reason,
            selected_as=selected_as,
            reason=reason,
            cut=False,
            started_at=self.started_at,
            ended_at=registry.clock(),
            weight_version_start=self.version_start,
            weight_version_end=version,
            weight=weight,
            version_spans=extend_spans(self.spans, version, tokens),
        )
        self.group.end_if_over()


@dataclass(slots=True, eq=False)
class _CountedGroup:
    registry: "CountedGroups"
    group_id: str
    join_key: str
    size: int
    policy: str
    prompt_key: str
    owner: str | None
    tokens: RequestTokens
    started_at: float
    request_ids: tuple[str, ...] = ()
    members: list[Member] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    ends_when_idle: bool = False

    @property
    def taken_seats(self) -> int:
        # A request that has left gives its seat to another request.
        return sum(member.record is None or member.record.reason is None for member in self.members)

    @property
    def has_used_replacements(self) -> bool:
        return len(self.members) >= MOST_MEMBERS * self.size

    @property
    def has_free_seat(self) -> bool:
        return self.taken_seats < self.size and not self.has_used_replacements

    def expire(self) -> None:
        self.ends_when_idle = True
        self.end_if_over()

    def end_if_over(self) -> None:
        """Report the group if no request runs or is expected."""
        # A request that runs has no record yet.
        records = [member.record for member in self.members if member.record is not None]
        if len(records) < len(self.members):
            return
        registry = self.registry
        is_full = self.taken_seats == self.size
        if not (is_full or self.ends_when_idle or self.has_used_replacements):
            # If too many groups wait, the oldest groups end.
            for dropped, _ in registry.idle_groups.put(self.owner, self, None):
                dropped.expire()
            return

        registry.forget(self)
        if self.timer is not None:
            self.timer.cancel()
        returned = sum(record.selected_as is not None for record in records)
        outcome = Outcome.COMPLETED
        # Statistics must not learn the lengths of a part of the trajectories. Seats that no request has taken do not
        # count.
        if returned < min(self.size, len(records)):
            is_failed = any(record.reason is DiscardReason.FAILED for record in records)
            outcome = Outcome.FAILED if is_failed else Outcome.CANCELLED
        if not registry.draining:
            registry.report_group_closed(is_full=is_full, planned_size=self.size)
        registry.observer.group_ended(
            GroupRecord(
                group_id=self.group_id,
                prompt_key=self.prompt_key,
                policy=self.policy,
                size=returned if outcome is Outcome.COMPLETED else self.size,
                outcome=outcome,
                candidates=records,
                started_at=self.started_at,
                ended_at=registry.clock(),
                tail_wait=None,
                request_ids=self.request_ids,
                owner=self.owner,
                prompt_tokens=self.tokens.prompt,
                max_tokens=self.tokens.max_tokens,
            )
        )


class CountedGroups:
    """Counts groups of single requests that are not shaped, and that the engine serves without us.

    A group gives its requests a record, so that rewards, statistics and placement work as for shaped groups. No request
    waits for other requests. A group ends when it is full and all its requests have finished, or when no request runs
    and no further request has arrived for a while. A request without a trajectory leaves its seat to another request.

    Args:
        report_group_closed, timeout, named_timeout: see `GroupJoiner`.
    """

    def __init__(
        self,
        observer: GroupEvents,
        report_group_closed: Callable[..., None],
        weight_version: Callable[[], int],
        timeout: float,
        named_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.observer = observer
        self.report_group_closed = report_group_closed
        self.weight_version = weight_version
        self.clock = clock
        self.draining = False
        self.idle_groups: FairCache[_CountedGroup, None] = FairCache(MAX_IDLE)
        self._timeout = timeout
        self._named_timeout = named_timeout
        # Groups by join key.
        self._groups: dict[str, list[_CountedGroup]] = {}

    def join(self, request: JoinRequest[Any], count_tokens: Callable[[], int]) -> Member:
        """The returned `Member` must finish or leave."""
        groups = self._groups.setdefault(request.join_key, [])
        group = next((group for group in groups if group.has_free_seat), None)
        if group is None:
            # Do not keep the engine's request: thousands of groups with long prompts may be idle.
            group = _CountedGroup(
                registry=self,
                group_id=f"group-{request.request_id}",
                join_key=request.join_key,
                size=request.plan.size,
                policy=request.plan.policy,
                prompt_key=request.prompt_key,
                owner=caller.get().name,
                tokens=request.tokens,
                started_at=self.clock(),
                request_ids=() if request.name is None else (request.name,),
                ends_when_idle=self.draining,
            )
            groups.append(group)
        self.idle_groups.pop(group.owner, group)
        member = Member(group, len(group.members), count_tokens)
        group.members.append(member)
        group.request_ids += (request.request_id,)

        if group.timer is not None:
            group.timer.cancel()
        if not self.draining:
            group.ends_when_idle = False
            timeout = self._timeout if request.name is None else self._named_timeout
            group.timer = asyncio.get_running_loop().call_later(timeout, group.expire)
        self.observer.candidates_started(1)
        return member

    def record_weight_version(self) -> None:
        version = self.weight_version()
        for group in self._all_groups():
            for member in group.members:
                if member.record is None:
                    member.spans = extend_spans(member.spans, version, member.count_tokens())

    def drain(self) -> None:
        """From now on, end every group when no request runs."""
        self.draining = True
        for group in self._all_groups():
            group.expire()

    def forget(self, group: _CountedGroup) -> None:
        self.idle_groups.pop(group.owner, group)
        self._groups[group.join_key].remove(group)
        if not self._groups[group.join_key]:
            del self._groups[group.join_key]

    def _all_groups(self) -> list[_CountedGroup]:
        return [group for groups in self._groups.values() for group in groups]
