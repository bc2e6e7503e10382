"""What observers get: records of candidates, groups, cohorts, returned trajectories and weight updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from darts_server.types import GONE, DiscardReason, FinishReason, MaxLost, Outcome, SelectedAs, UpdateOutcome

VersionSpans = tuple[tuple[int, int], ...]
"""Weight versions in the order in which they sampled a candidate's tokens, and how many tokens each of them did."""

GroupKey = tuple[str | None, str]
"""Owner and id of a group: callers choose ids, so two of them may have chosen the same."""


def extend_spans(spans: VersionSpans, version: int, tokens: int) -> VersionSpans:
    """Make spans of ``tokens`` tokens in all: those beyond ``spans`` are of ``version``. Fewer shorten ``spans``."""
    extended: list[tuple[int, int]] = []
    for each, count in (*spans, (version, tokens)):
        if (count := min(count, tokens)) > 0:
            tokens -= count
            if extended and extended[-1][0] == each:
                count += extended.pop()[1]
            extended.append((each, count))
    return tuple(extended)


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """How one candidate ended.

    ``tokens``: number of generated tokens; for a stopped candidate those generated when it was stopped, for a cut one
    the deadline. ``selected_as`` is set if it was selected, ``reason`` if it was discarded. ``cut``: whether it was
    truncated at the group's deadline. Times are seconds on the runner's clock, ``None`` if it never got that far.
    ``quality``: its predicted probability of being correct, by its last score; ``None`` without a score. ``survival``:
    the probability that pruning kept it, over all its scores; 1 if the group needed it in any case. ``weight``: 1 /
    (its probability to be returned, given all candidates of its group), ``None`` if it was not returned or if some
    candidates can never be. ``version_spans``: of its ``tokens``. ``resumed``: those of them that an earlier batch has
    generated.
    """

    index: int
    tokens: int
    finish_reason: FinishReason | None
    selected_as: SelectedAs | None
    reason: DiscardReason | None
    cut: bool
    started_at: float | None
    ended_at: float | None
    weight_version_start: int | None
    weight_version_end: int | None
    quality: float | None = None
    survival: float = 1.0
    weight: float | None = None
    version_spans: VersionSpans = ()
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """How one group ended; reported to observers once."""

    group_id: str
    prompt_key: str | None
    policy: str
    size: int
    outcome: Outcome
    candidates: Sequence[CandidateRecord]
    started_at: float
    ended_at: float
    tail_wait: float | None
    """Seconds from the finish of the K-th shortest trajectory to completion; ``None`` unless completed."""
    error: str | None = None
    cohort_deadline: int | None = None
    """Deadline of its cohort in tokens; ``None`` if there is none, or if the group was complete before it was known."""
    max_lost: MaxLost | None = None
    """What its deadline may take of right answers; ``None`` if its policy has no deadlines."""
    stretch: float = 1.0
    """Factor that ``cohort_deadline`` contains, so that it does not discard too many right answers."""
    bound: int | None = None
    """Tokens at which all its candidates were cut or, if explored, would have been cut; ``None`` without a deadline."""
    completion_length: int | None = None
    """Length of its M-th shortest valid candidate, or of the one that its rule waits for; ``None`` without one."""
    num_shortest: int | None = None
    """K, where the K shortest are returned and the other places are sampled from the rest; else ``None``."""
    sampled_from: int | None = None
    """S, where the returned trajectories are a sample of S that were not pruned; else ``None``."""
    tail_share: float = 1.0
    """Share of those that were not pruned, and are not among the K shortest, that was sampled for the tail."""
    earlier_pass_rate: float | None = None
    """Share of right ones among its prompt's trajectories that had rewards when it started; ``None`` without any."""
    explored: bool = False
    """Whether it ran past its deadline, to measure what the deadline discards."""
    tokens_needed: int | None = None
    """Length at which enough of its candidates had finished, as reported to its cohort; ``None`` if not reported."""
    request_ids: tuple[str, ...] = ()
    """Ids of the requests that it answered, and the response ids that it can be looked up by."""
    chosen: str | None = None
    """How many prompts of its batch `auto` has run, and why, in words; ``None`` where `auto` had no choice."""
    restarted_from: int = 0
    """Index of the first candidate since its last restart: earlier ones were generated with older weights."""
    owner: str | None = None
    """Name of the caller that started it; ``None`` for callers without a key."""
    prompt_tokens: int | None = None
    """Tokens of its prompt; ``None`` if they are not known."""
    max_tokens: int | None = None
    """Tokens that its request allows a candidate to generate; ``None`` if that is not known."""
    key: GroupKey = field(init=False, repr=False, compare=False)
    selected: list[CandidateRecord] = field(init=False, repr=False, compare=False)
    """The returned trajectories, by candidate index."""
    generated_tokens: int = field(init=False, repr=False, compare=False)
    """Without those that were carried over, which count in the group that goes on with them."""
    returned_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive once what most observers read."""
        selected, generated, returned = [], 0, 0
        for c in self.candidates:
            generated += 0 if c.reason is DiscardReason.CARRIED else c.tokens
            if c.selected_as is not None:
                selected.append(c)
                returned += c.tokens
        object.__setattr__(self, "key", (self.owner, self.group_id))
        object.__setattr__(self, "selected", selected)
        object.__setattr__(self, "generated_tokens", generated)
        object.__setattr__(self, "returned_tokens", returned)

    @property
    def deadline(self) -> int | None:
        """Tokens at which its tail was cut or, if explored, would have been cut; ``None`` without a deadline."""
        if self.cohort_deadline is None:
            return None
        if self.completion_length is None:
            return self.bound
        own = max(self.cohort_deadline, self.completion_length)
        return own if self.bound is None else min(own, self.bound)

    @property
    def counted(self) -> int:
        """N: candidates that the weights stand for, without failed ones and those before a restart."""
        return sum(c.reason not in GONE for c in self.candidates[self.restarted_from :])

    @property
    def all_truncated(self) -> bool:
        """Whether no returned trajectory ended before a length limit, the deadline or the bound."""
        return bool(self.selected) and all(c.finish_reason is not FinishReason.STOP for c in self.selected)

    @property
    def mixed_versions(self) -> bool:
        """Whether the returned trajectories were generated with more than one weight version."""
        versions: set[int | None] = set()
        for c in self.selected:
            # With the spans, as weights may have been switched there and back again.
            versions |= {c.weight_version_start, c.weight_version_end, *dict(c.version_spans)}
        return len(versions) > 1


@dataclass(slots=True)
class CohortRecord:
    """How groups that were allocated together ended; reported to observers when the last of them has ended.

    It is filled by `add` until then, and does not change any more.

    ``mean_candidates``: M', the mean number of candidates per group. ``deadline``: in tokens; ``None`` if it was never
    set. ``measured_seconds``: from the start of the first group to the end of the last one. Tokens are summed over all
    candidates, and over the returned ones. ``stale_tokens``: returned tokens that other weights have generated than the
    last of their group. ``new_tokens``: generated tokens without those that candidates went on from.

    ``chosen``: see `GroupRecord`. ``completed``: number of complete groups. ``returned_lengths``: tokens of the
    returned trajectories of each group that returned any.
    """

    policy: str
    groups: int
    mean_candidates: float
    deadline: int | None = None
    explored: bool = False
    measured_seconds: float = 0.0
    generated_tokens: int = 0
    returned_tokens: int = 0
    chosen: str | None = None
    completed: int = 0
    stale_tokens: int = 0
    new_tokens: int = 0
    returned_lengths: list[list[int]] = field(default_factory=list)

    def add(self, group: GroupRecord) -> None:
        """Add a group that has ended."""
        self.generated_tokens += group.generated_tokens
        self.returned_tokens += group.returned_tokens
        self.completed += group.outcome is Outcome.COMPLETED
        newest = 0  # of the weights that its candidates have run with
        for c in group.candidates:
            self.new_tokens += max(c.tokens - c.resumed, 0)  # one that went on may be cut before where it went on
            newest = max([newest, *dict(c.version_spans)])
        # What was returned, and how much of it is of older weights than the newest.
        lengths: list[int] = []
        for c in group.selected:
            lengths.append(c.tokens)
            for version, tokens in c.version_spans:
                self.stale_tokens += 0 if version == newest else tokens
        if lengths:
            self.returned_lengths.append(lengths)


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """A trajectory that was returned to its caller, ``owner``.

    ``started_at``: start of its group, on the runner's clock.

    The token ids are the engine's own lists: do not change or keep them.
    """

    group_id: str
    prompt_key: str | None
    started_at: float
    index: int
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """The result of a weight update, passed to observers.

    ``version``: served after it. ``source``: how the weights arrived. ``rule``: ``None`` if the trainer paused the
    engine itself. ``seconds``: by phase, of the phases that began: ``transfer``, ``check``, ``wait`` for groups,
    ``pause``, ``load``, ``restore``, ``resume``. ``lora``: name of the LoRA adapter that was updated; ``None`` for the
    model itself.
    """

    version: int
    outcome: UpdateOutcome
    source: str
    rule: str | None
    partial: bool
    seconds: Mapping[str, float]
    error: str | None = None
    lora: str | None = None
