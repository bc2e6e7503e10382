"""What is written down about a running group, for the record that observers get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darts_server.policy.candidate import Candidate
from darts_server.policy.group import Group
from darts_server.policy.replay import replay
from darts_server.policy.selection.rules import Shadow
from darts_server.serving.admission import caller
from darts_server.types import CandidateRecord, GroupRecord, Outcome, Returned, ShadowRecord


@dataclass(slots=True)
class _Entry:
    started_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    version_start: int | None = None
    version_end: int | None = None


class Ledger:
    """Times, weight versions and token counts of one group's candidates, by candidate index."""

    def __init__(self, group_id: str, policy: str, clock: Callable[[], float], prompt_key: str | None = None) -> None:
        self.group_id = group_id
        self.prompt_key = prompt_key
        self.closed = False
        self.members: tuple[str, ...] = ()
        self.policy = policy
        self._clock = clock
        self._trace = caller.get().trace  # its end may come in another's context
        self.opened_at = clock()
        self._entries: list[_Entry] = []
        self._finish_times: list[float] = []

    def requested(self, count: int) -> None:
        self._entries += [_Entry() for _ in range(count)]

    def started(self, index: int, weight_version: int) -> None:
        self._entries[index].started_at = self._clock()
        self._entries[index].version_start = weight_version

    def ended(self, index: int, weight_version: int, *, by_itself: bool) -> None:
        """A candidate's end; one that comes after the group's own end changes nothing."""
        entry = self._entries[index]
        entry.ended_at = entry.ended_at or self._clock()
        entry.version_end = weight_version
        if by_itself:
            self._finish_times.append(entry.ended_at)

    def stopped(self, index: int, tokens: int) -> None:
        """A candidate was stopped when it had generated ``tokens`` tokens."""
        self._entries[index].ended_at = self._clock()
        self._entries[index].tokens = tokens

    def restarted(self) -> None:
        """What has finished so far does not count."""
        self._finish_times.clear()

    def returned(self, index: int, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Returned:
        """What is told of a candidate that goes to the caller."""
        return Returned(self.group_id, self.prompt_key, self.opened_at, index, prompt_token_ids, token_ids)

    def tokens(self, candidate: Candidate) -> int:
        """Tokens it is known to have generated. It does not change after the candidate's end."""
        return max(candidate.tokens, self._entries[candidate.index].tokens)

    def close(
        self, group: Group, error: Exception | None, deadline: int | None, explored: bool, needed: int | None
    ) -> GroupRecord:
        """The record of a group that has an outcome.

        ``deadline``: its limit or, if ``explored``, what would be. ``needed``: what it told its batch.
        """
        assert group.outcome is not None
        self.closed = True
        now = self._clock()
        return GroupRecord(
            group_id=self.group_id,
            prompt_key=self.prompt_key,
            policy=self.policy,
            size=group.size if group.is_open else len(group.candidates),
            outcome=group.outcome,
            candidates=tuple(map(self.record, group.candidates)),
            started_at=self.opened_at,
            ended_at=now,
            tail_wait=self._tail_wait(group, now),
            error=None if error is None else str(error),
            deadline=None
            if deadline is None or group.completion_length is None
            else max(deadline, group.completion_length),
            explored=explored,
            needed=needed,
            members=self.members,
            shadow=shadow_of(group, self.policy),
            restarted_from=group.restarted_from,
            trace=self._trace,
        )

    def _tail_wait(self, group: Group, now: float) -> float | None:
        if group.outcome is not Outcome.COMPLETED or len(self._finish_times) < group.rule.num_shortest:
            return None
        return now - self._finish_times[group.rule.num_shortest - 1]

    def record(self, candidate: Candidate, tokens: int | None = None) -> CandidateRecord:
        """A candidate as it stands. ``tokens``: if more is known of them than is written down."""
        entry = self._entries[candidate.index]
        return CandidateRecord(
            index=candidate.index,
            tokens=self.tokens(candidate) if tokens is None else tokens,
            finish_reason=candidate.finish_reason,
            selected_as=candidate.selected_as,
            reason=candidate.reason,
            cut=candidate.cut,
            started_at=entry.started_at,
            ended_at=entry.ended_at,
            weight_version_start=entry.version_start,
            weight_version_end=entry.version_end,
            quality=candidate.quality,
            survival=candidate.survival,
        )


def shadow_of(group: Group, policy: str) -> ShadowRecord | None:
    """What the shadowed rule would have done, if the group is a shadow and enough candidates came to their end."""
    if not group.is_open or not isinstance(group.rule, Shadow) or group.outcome is not Outcome.COMPLETED:
        return None
    ended = [c for c in group.candidates[group.restarted_from :] if c.finish_reason is not None]
    if len(ended) < group.size:
        return None
    would = replay(group.rule.shadowed, ended, group.deadline)
    return ShadowRecord(
        policy=policy,
        selection=tuple(ended[i].index for i in would.selection),
        generated=would.generated,
        returned=would.returned,
        steps=would.steps,
    )
