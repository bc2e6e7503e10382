"""Record a running group, for the :class:`~darts_server.records.GroupRecord` that observers get."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from darts_server.policy.candidate import Candidate
from darts_server.policy.group import Group, sampled_from, selection_weights, tail_share
from darts_server.records import (
    CandidateRecord,
    GroupKey,
    GroupRecord,
    TrajectoryRecord,
    VersionSpans,
    extend_spans,
)
from darts_server.rollout.allocation.cohort import Cohort
from darts_server.serving.admission import caller
from darts_server.types import Outcome


@dataclass(slots=True)
class _Entry:
    started_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    version_start: int | None = None
    version_end: int | None = None
    version_spans: VersionSpans = ()
    resumed: int = 0


class GroupRecorder:
    """Record times, weight versions and token counts of one group's candidates, by candidate index."""

    def __init__(self, group_id: str, policy: str, clock: Callable[[], float], prompt_key: str | None = None) -> None:
        self.group_id = group_id
        self.prompt_key = prompt_key
        self.earlier_pass_rate: float | None = None
        """See `GroupRecord.earlier_pass_rate`."""
        self.closed = False
        self.request_ids: tuple[str, ...] = ()
        self.policy = policy
        self._clock = clock
        who = caller.get()  # the group may end in the context of another request
        self._trace = who.trace
        self.owner = who.name
        self.opened_at = clock()
        self._entries: list[_Entry] = []
        self._finish_times: list[float] = []

    @property
    def key(self) -> GroupKey:
        return (self.owner, self.group_id)

    def candidates_requested(self, count: int) -> None:
        self._entries += [_Entry() for _ in range(count)]

    def candidate_started(self, index: int, weight_version: int, carried: VersionSpans = ()) -> None:
        """``carried``: of tokens that it had before."""
        self._entries[index].started_at = self._clock()
        self._entries[index].version_start = carried[0][0] if carried else weight_version
        self._entries[index].version_spans = carried
        self._entries[index].resumed = sum(tokens for _, tokens in carried)

    def weights_change(self, index: int, weight_version: int, tokens: int) -> None:
        """Record that a candidate has so many tokens of this version or earlier ones, and continues with another."""
        entry = self._entries[index]
        entry.version_spans = extend_spans(entry.version_spans, weight_version, tokens)

    def candidate_ended(self, index: int, weight_version: int, *, finished: bool) -> None:
        """Record a candidate's end; one that comes after the group's own end changes nothing.

        ``finished``: it was neither stopped nor aborted.
        """
        entry = self._entries[index]
        entry.ended_at = entry.ended_at or self._clock()
        entry.version_end = weight_version
        if finished:
            self._finish_times.append(entry.ended_at)

    def candidate_stopped(self, index: int, tokens: int) -> None:
        """Record that a candidate was stopped after ``tokens`` generated tokens."""
        self._entries[index].ended_at = self._clock()
        self._entries[index].tokens = tokens

    def version_spans(self, index: int, tokens: int) -> VersionSpans:
        """Return which weights sampled the first ``tokens`` tokens of a candidate; none before it has started."""
        entry = self._entries[index]
        version = entry.version_start if entry.version_end is None else entry.version_end
        return () if version is None else extend_spans(entry.version_spans, version, tokens)

    def first_version(self, index: int) -> int | None:
        """Return the oldest weight version under which a candidate, from that one on, has started."""
        versions = [entry.version_start for entry in self._entries[index:] if entry.version_start is not None]
        return min(versions, default=None)

    def restart(self) -> None:
        """Discard the finish times recorded so far."""
        self._finish_times.clear()

    def returned(self, index: int, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> TrajectoryRecord:
        """Describe a trajectory that goes to its caller."""
        return TrajectoryRecord(
            *(self.group_id, self.prompt_key, self.opened_at, index, prompt_token_ids, token_ids, self.owner)
        )

    def tokens(self, candidate: Candidate) -> int:
        """Tokens that the candidate has generated, as far as recorded; constant after its end."""
        return max(candidate.tokens, self._entries[candidate.index].tokens)

    def close(
        self,
        group: Group,
        error: Exception | None,
        cohort: Cohort | None,
        tokens_needed: int | None,
    ) -> GroupRecord:
        """Create the record of a group that has an outcome.

        ``tokens_needed``: the length that it reported to its ``cohort``.
        """
        assert group.outcome is not None
        self.closed = True
        now = self._clock()
        would_be = cohort if cohort is not None and cohort.terms.explored else None
        rule = None if cohort is None else cohort.terms.deadline
        weights = selection_weights(group)
        deadline = group.deadline if would_be is None else would_be.tokens
        return GroupRecord(
            group_id=self.group_id,
            prompt_key=self.prompt_key,
            policy=self.policy,
            size=group.size if group.is_open else len(group.candidates),
            outcome=group.outcome,
            candidates=tuple(replace(self.record(c), weight=weights.get(c.index)) for c in group.candidates),
            started_at=self.opened_at,
            ended_at=now,
            tail_wait=self._tail_wait(group, now),
            error=None if error is None else str(error),
            cohort_deadline=deadline,
            max_lost=None if rule is None else rule.max_lost,
            bound=group.bound if would_be is None else would_be.bound,
            stretch=1.0 if rule is None or deadline is None else rule.stretch_in(deadline),
            completion_length=group.completion_length if group.is_open else None,
            num_shortest=group.rule.num_shortest if weights and group.rule.samples_rest else None,
            sampled_from=sampled_from(group),
            tail_share=tail_share(group),
            earlier_pass_rate=self.earlier_pass_rate,
            explored=would_be is not None,
            tokens_needed=tokens_needed,
            request_ids=self.request_ids,
            chosen=None if cohort is None else cohort.terms.chosen,
            restarted_from=group.restarted_from,
            trace=self._trace,
            owner=self.owner,
        )

    def _tail_wait(self, group: Group, now: float) -> float | None:
        if group.outcome is not Outcome.COMPLETED or len(self._finish_times) < group.rule.num_shortest:
            return None
        return now - self._finish_times[group.rule.num_shortest - 1]

    def record(self, candidate: Candidate, tokens: int | None = None) -> CandidateRecord:
        """The present state of a candidate. ``tokens``: a newer count than the recorded one."""
        entry = self._entries[candidate.index]
        tokens = self.tokens(candidate) if tokens is None else tokens
        return CandidateRecord(
            index=candidate.index,
            tokens=tokens,
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
            version_spans=self.version_spans(candidate.index, tokens),
            resumed=entry.resumed,
        )
