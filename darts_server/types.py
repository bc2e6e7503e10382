"""Values that every room speaks of: how candidates end and what a finished group looked like.

Nothing here imports another room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a candidate stopped generating by itself, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"


class DiscardReason(StrEnum):
    """Why a candidate is not in its group. Every discarded candidate has exactly one."""

    MIDDLE = "middle"
    """Finished, but neither among the shortest nor in the tail."""
    LONGER_THAN_NEEDED = "longer_than_needed"
    """Already longer than the longest of the shortest that are wanted."""
    PRUNED = "pruned"
    """Scored as hopeless while it ran (ARRoL)."""
    TRUNCATED = "truncated"
    """Hit the length limit while enough others finished by themselves."""
    TAIL_PRUNED = "tail_pruned"
    """Could only have been in the tail, and the tail went to others."""
    FAILED = "failed"
    """The engine failed or lost it."""
    WATCHED = "watched"
    """Ran only to learn what shaping would have done with it (shadow)."""
    CANCELLED = "cancelled"
    """The whole group was given up: the caller went away, or too few could finish."""
    RESTARTED = "restarted"
    """Its group was started anew, under new weights."""
    DECIDED = "decided"
    """The vote it was for is certain without it."""


class SelectedAs(StrEnum):
    """From which end of the length order a selected trajectory came."""

    SHORT = "short"
    LONG = "long"
    FILL = "fill"
    """Hit the length limit; returned because too few finished by themselves, or because the tail drew it."""
    BALANCED = "balanced"
    """From neither: chosen by quality, whatever its length."""


class Outcome(StrEnum):
    """How a group ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    """The vote it was for was certain before all of it was there."""


class VoteOutcome(StrEnum):
    """How a vote ended that came to its end."""

    DECIDED_EARLY = "decided_early"
    """Some candidates were stopped, since they could not change the answer."""
    COUNTED = "counted"
    """All candidates came to their end."""
    NO_ANSWER = "no_answer"
    """None of them had one."""


class PruningStatus(StrEnum):
    """Whether trajectories are pruned by quality and, where not, why: then all of them are kept."""

    READY = "ready"
    UNUSED = "unused"
    """No trajectory was scored yet."""
    NO_LABELS = "no_labels"
    """No reward was reported for a scored trajectory."""
    COLD = "cold"
    """The first steps, which learn only."""
    FEW_LABELS = "few_labels"
    UNTRAINED = "untrained"
    """The head has labels enough, and was not trained yet."""
    ONE_CLASS = "one_class"
    """All labels are right, or all are wrong."""
    DIVERGED = "diverged"
    """The head's last training went wrong and was undone."""
    TRAINER_LOST = "trainer_lost"
    """The process that trains the head died too often."""
    PROBE_LOST = "probe_lost"
    """The engine no longer sends hidden states."""


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """What became of one candidate.

    ``tokens`` counts generated tokens: all of them for one that finished by itself, those known to have been generated
    when it was stopped for the others, and the token limit for one that was cut. ``end`` is set when it was selected,
    ``reason`` when it was not. Times are seconds on the runner's clock, ``None`` where it never came to that.
    ``quality``: its chance to end correct by its latest score; ``None`` if it was not scored. ``survival``: the
    probability with which it was to be kept, over all its scores: 1 where the group could not have spared it.
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


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """What became of one group, told to observers once, when it has ended."""

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
    deadline: int | None = None
    """Tokens at which its tail was cut or, in an explored group, would have been; ``None`` without a deadline."""
    explored: bool = False
    """Whether it was let run past its deadline, to see what that takes away."""
    tokens_needed: int | None = None
    """Tokens after which groups of its cohort are usually complete; ``None`` without a cohort, or if it never was."""
    request_ids: tuple[str, ...] = ()
    """Ids of the requests that it answered, where there are several."""
    shadow: "ShadowRecord | None" = None
    restarted_from: int = 0
    """Index of the first candidate since it was started anew, or at all: those before were of other weights."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Where it belongs in the trace of the caller that began it: ``traceparent`` and ``tracestate``."""

    @property
    def selected(self) -> list[CandidateRecord]:
        """The returned trajectories, by candidate index."""
        return [c for c in self.candidates if c.selected_as is not None]

    @property
    def generated_tokens(self) -> int:
        return sum(c.tokens for c in self.candidates)

    @property
    def returned_tokens(self) -> int:
        return sum(c.tokens for c in self.selected)

    @property
    def mixed_versions(self) -> bool:
        """Whether the returned trajectories were not all generated by one version of the weights."""
        versions = {v for c in self.selected for v in (c.weight_version_start, c.weight_version_end)}
        return len(versions) > 1


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """What shaping would have made of an unshaped group's candidates, had they all run at one token a step.

    ``policy``: whose choice it is. ``selection``: candidate indices. ``generated``, ``returned``: tokens. ``steps``:
    decode steps until the group would have been complete.
    """

    policy: str
    selection: tuple[int, ...]
    generated: int
    returned: int
    steps: int


@dataclass(frozen=True, slots=True)
class CohortRecord:
    """What became of groups that were allocated together, told to observers when the last of them has ended.

    ``mean_candidates``: M' that was decided on. ``deadline``: in tokens, ``None`` if none was known in time. Seconds
    are from the allocation to the end of the last group; ``predicted_seconds`` is ``None`` where nothing was predicted.
    Tokens are those of its candidates, and of those that were returned.
    """

    policy: str
    groups: int
    mean_candidates: float
    deadline: int | None
    explored: bool
    predicted_seconds: float | None
    measured_seconds: float
    generated_tokens: int = 0
    returned_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Returned:
    """A trajectory as it was handed to its caller. ``started_at``: its group's, on the runner's clock.

    The token ids are the engine's own lists: not to be changed or kept.
    """

    group_id: str
    prompt_key: str | None
    started_at: float
    index: int
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]


class UpdateOutcome(StrEnum):
    """How a weight update ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Before the engine was touched: the weights were bad, or could not be transferred completely."""
    FAILED = "failed"
    """After that; the old version is served."""
    LOST = "lost"
    """The old version could not be restored: nothing is served."""


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


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller asked of shaping for one request; ``None`` leaves it to the server's setting.

    ``prompt_key``: the name under which the prompt's lengths are remembered. ``group_id`` and ``group_size``: which
    single requests make one group, and of how many trajectories.
    """

    policy: str | None = None
    prompt_key: str | None = None
    group_id: str | None = None
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt as a caller gives it: exactly one of token ids, chat messages and text; and the caller's key for it.

    ``metadata`` is the caller's, and comes back with the group.
    """

    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, object]] | None = None
    text: str | None = None
    key: str | None = None
    metadata: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What a trajectory holds: its tokens, their log-probs if these were asked for, its text, and why it ended."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason
