"""Records for observers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from darts_server.types import GONE, DiscardReason, FinishReason, MaxLost, Outcome, SelectedAs, UpdateOutcome

VersionSpans = tuple[tuple[int, int], ...]
"""Weight versions of a candidate's tokens, in order, each with its number of tokens."""

GroupKey = tuple[str | None, str]
"""Owner and id of a group. Callers choose ids, so two owners may choose the same id."""


def extend_spans(spans: VersionSpans, version: int, total_tokens: int) -> VersionSpans:
    """Extend spans to ``total_tokens`` with tokens of ``version``, or cut the spans to fewer tokens."""
    extended: list[tuple[int, int]] = []
    # The new span could have all tokens, but gets only the tokens that earlier spans leave.
    tokens_left = total_tokens
    for span_version, span_tokens in (*spans, (version, total_tokens)):
        count = min(span_tokens, tokens_left)
        if count <= 0:
            continue
        tokens_left -= count
        if extended and extended[-1][0] == span_version:
            count += extended.pop()[1]
        extended.append((span_version, count))
    return tuple(extended)


def append_spans(spans: VersionSpans, later_spans: VersionSpans) -> VersionSpans:
    total_tokens = sum(tokens for _, tokens in spans)
    for version, tokens in later_spans:
        total_tokens += tokens
        spans = extend_spans(spans, version, total_tokens)
    return spans


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """Times are seconds on the runner's clock."""

    index: int
    tokens: int
    """Number of generated tokens, or kept tokens of a cut candidate."""
    finish_reason: FinishReason | None
    selected_as: SelectedAs | None
    reason: DiscardReason | None
    cut: bool
    """Whether the group's deadline truncated the candidate."""
    started_at: float | None
    ended_at: float | None
    weight_version_start: int | None
    weight_version_end: int | None
    quality: float | None = None
    """Predicted probability of being correct."""
    survival: float = 1.0
    """Probability that pruning kept the candidate; 1 if the group needed it."""
    weight: float | None = None
    """1 / (probability to be returned, given all candidates of the group), if every candidate can be returned."""
    version_spans: VersionSpans = ()
    resumed: int = 0
    """Number of carried tokens."""
    reward: float | None = None
    """Reward by the verifier, if its verdict came before the group ended."""
    correct: bool | None = None
    advantage: float | None = None
    """Advantage of a returned trajectory, if the group was selected by rewards."""
    turns: int | None = None
    """Answered turns of a session, or None for a candidate that is no session."""
    tool_seconds: float | None = None
    """Seconds between the turns of a session."""
    tool_times: Sequence[float] = ()
    """Begin and end of each of a session's first intervals of tool time; the last end is missing while a tool runs."""
    milliseconds: int | None = None
    """Length of a session whose group compares sessions by seconds, or None in groups that compare tokens."""

    @property
    def length_order(self) -> tuple[int, int]:
        """Sort key of the group's rule: the shortest candidate comes first."""
        length = self.tokens if self.milliseconds is None else self.milliseconds
        return (length, self.index)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    group_id: str
    prompt_key: str | None
    policy: str
    size: int
    outcome: Outcome
    candidates: Sequence[CandidateRecord]
    started_at: float
    ended_at: float
    tail_wait: float | None
    """Seconds from the finish of the K-th shortest trajectory to completion."""
    error: str | None = None
    cohort_deadline: int | None = None
    """Deadline of the cohort in tokens, unless the group was complete before."""
    max_lost: MaxLost | None = None
    factor: float = 1.0
    """Factor of the deadline that keeps right answers from being discarded."""
    cut_length: int | None = None
    """Length in tokens at which all candidates were cut, or would have been cut in an explored group."""
    completion_length: int | None = None
    """Length of the valid candidate that the group waits for, as a rule the M-th shortest."""
    num_shortest: int | None = None
    """K, if the K shortest are returned and the other places are sampled from the rest."""
    sampled_from: int | None = None
    """S, if the returned trajectories are a sample of S candidates that were not pruned."""
    tail_share: float = 1.0
    """Sampled share of the candidates that were not pruned and are not among the K shortest."""
    earlier_pass_rate: float | None = None
    """Share of right answers among the rewards of the prompt when the group started."""
    explored: bool = False
    """Whether the group ran past its deadline, to measure discarded answers."""
    tokens_needed: int | None = None
    """Tokens that the group reported to the cohort."""
    request_ids: tuple[str, ...] = ()
    """Ids and names that the group can be looked up by."""
    auto_choice: str | None = None
    """Number of prompts that `auto` has run, and its reason, in words."""
    restarted_from: int = 0
    """Index of the first candidate since the last restart."""
    owner: str | None = None
    """Name of the caller's key."""
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    """Maximum tokens of a candidate."""
    num_rewarded: int | None = None
    """Number of candidates with rewards, if the group was selected by rewards."""
    decided_early: bool = False
    """Whether candidates were stopped because enough others had unequal rewards."""
    run_probability: float = 1.0
    """Probability that the batch ran the prompt. The group's weight is its inverse."""
    weight_version: int = 0
    """Version when the group ended."""
    key: GroupKey = field(init=False, repr=False, compare=False)
    selected: list[CandidateRecord] = field(init=False, repr=False, compare=False)
    """Returned trajectories, by candidate index."""
    generated_tokens: int = field(init=False, repr=False, compare=False)
    returned_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Most observers read these sums, so they are computed once.
        selected = []
        generated = 0
        returned = 0
        for c in self.candidates:
            # Tokens of a carried candidate count in the group that resumes it.
            if c.reason is not DiscardReason.CARRIED:
                generated += c.tokens
            if c.selected_as is not None:
                selected.append(c)
                returned += c.tokens
        object.__setattr__(self, "key", (self.owner, self.group_id))
        object.__setattr__(self, "selected", selected)
        object.__setattr__(self, "generated_tokens", generated)
        object.__setattr__(self, "returned_tokens", returned)

    @property
    def deadline(self) -> int | None:
        """Length in tokens at which the tail was cut, or would have been cut in an explored group."""
        if self.cohort_deadline is None:
            return None
        if self.completion_length is None:
            # Too few candidates were valid, so only the cut length remains.
            return self.cut_length
        # Even beyond the cohort's deadline, the group waited until its last needed candidate had finished.
        deadline = max(self.cohort_deadline, self.completion_length)
        if self.cut_length is None:
            return deadline
        # Longer candidates are cut, even a candidate that the group waits for.
        return min(deadline, self.cut_length)

    @property
    def current_candidates(self) -> Sequence[CandidateRecord]:
        return self.candidates[self.restarted_from :]

    @property
    def num_eligible(self) -> int:
        """N: number of candidates since the last restart that did not fail and were not aborted."""
        return sum(c.reason not in GONE for c in self.current_candidates)

    @property
    def all_truncated(self) -> bool:
        """Whether trajectories were returned, and none ended at a stop token or string."""
        return bool(self.selected) and all(c.finish_reason is not FinishReason.STOP for c in self.selected)

    @property
    def mixed_versions(self) -> bool:
        versions: set[int | None] = set()
        for c in self.selected:
            versions.add(c.weight_version_start)
            versions.add(c.weight_version_end)
            # The spans count too, because weights may have been switched back again.
            versions.update(version for version, _ in c.version_spans)
        return len(versions) > 1


@dataclass(slots=True)
class CohortRecord:
    """Groups that were allocated together. The record is complete when the last group has ended."""

    policy: str
    groups: int
    mean_candidates: float
    """M' in DARTS."""
    deadline: int | None = None
    """In tokens, if set."""
    explored: bool = False
    measured_seconds: float = 0.0
    """Seconds from the first group's start to the last group's end."""
    generated_tokens: int = 0
    returned_tokens: int = 0
    auto_choice: str | None = None
    completed: int = 0
    stale_tokens: int = 0
    """Returned tokens of older weights than at the end of their group."""
    new_tokens: int = 0
    """Generated tokens without carried tokens."""
    returned_lengths: list[list[int]] = field(default_factory=list)
    """Lengths in tokens of the returned trajectories of each group that returned any."""

    def add_ended_group(self, group: GroupRecord) -> None:
        self.generated_tokens += group.generated_tokens
        self.returned_tokens += group.returned_tokens
        if group.outcome is Outcome.COMPLETED:
            self.completed += 1
        for c in group.candidates:
            # A deadline may cut a candidate within its carried tokens.
            self.new_tokens += max(c.tokens - c.resumed, 0)

        for c in group.selected:
            for version, tokens in c.version_spans:
                if version != group.weight_version:
                    self.stale_tokens += tokens
        if group.selected:
            self.returned_lengths.append([c.tokens for c in group.selected])


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    group_id: str
    prompt_key: str | None
    started_at: float
    """Start of the group, on the runner's clock."""
    index: int
    # The token ids are the engine's own lists: do not change or keep them.
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    version: int
    """Version that is served after the update."""
    outcome: UpdateOutcome
    source: str
    """How the weights arrived."""
    rule: str | None
    """Rule for running groups, or None if the trainer paused the engine itself."""
    partial: bool
    seconds: Mapping[str, float]
    """Seconds of each phase: transfer, check, wait (for groups), pause, load, restore, resume."""
    error: str | None = None
    lora: str | None = None
    """Name of the updated LoRA adapter."""
