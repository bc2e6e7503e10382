"""Types that all rooms share: outcomes, records for observers, and the values that requests are made of.

This module imports no other room.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a candidate finished, in vLLM's words: a stop token or string, or its token limit."""

    STOP = "stop"
    LENGTH = "length"


class DiscardReason(StrEnum):
    """Why a candidate is not in its group. Every discarded candidate has exactly one."""

    MIDDLE = "middle"
    """Finished, but selected neither among the shortest nor for the tail."""
    LONGER_THAN_NEEDED = "longer_than_needed"
    """Stopped because it was already too long to be among the shortest."""
    PRUNED = "pruned"
    """Stopped by its quality score while it ran (ARRoL)."""
    TRUNCATED = "truncated"
    """Reached its token limit, while enough others finished below it."""
    TAIL_PRUNED = "tail_pruned"
    """Stopped because only the tail was left for it, and others were sampled for the tail."""
    FAILED = "failed"
    """The engine failed on it, or aborted it without a request from us."""
    ABORTED = "aborted"
    """It was aborted, alone or with the other candidates of its group, and its caller got what it had generated."""
    SHADOW = "shadow"
    """Ran only to measure what shaping would have done with it."""
    CANCELLED = "cancelled"
    """Its group was cancelled: the caller disconnected, it was aborted, or too few candidates could finish."""
    RESTARTED = "restarted"
    """Its group was restarted under new weights."""
    DECIDED = "decided"
    """Its vote was decided without it."""
    CARRIED = "carried"
    """Its group goes on in a later batch, with what it has generated."""
    LOAD = "load"
    """Given up before anything of its group was generated: the engine was fuller than `auto` had expected."""


GONE = frozenset({DiscardReason.FAILED, DiscardReason.ABORTED, DiscardReason.LOAD})
"""Of candidates with which no other group goes on."""
UNCOUNTED = GONE | {DiscardReason.SHADOW}
"""Of candidates that were never to be chosen from: replaced, given up before they ran, or run only to be observed."""


class SelectedAs(StrEnum):
    """Why a trajectory was selected: from which end of the group's length order it comes, if from any."""

    SHORT = "short"
    LONG = "long"
    LONG_TRUNCATED = "long_truncated"
    """Sampled for the tail, and reached its token limit."""
    FILL = "fill"
    """Reached its token limit; selected because too few finished below it."""
    BALANCED = "balanced"
    """Selected by quality, whatever its length."""
    SURVIVOR = "survivor"
    """Not pruned; selected whatever its length and quality."""


class Outcome(StrEnum):
    """How a group ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    """Its vote was decided before the group was complete."""


class TurnKind(StrEnum):
    """Whether a single request opens a trajectory, or why it is not joined to a group."""

    OPENING = "opening"
    SESSION = "session"
    """Its session had an answer."""
    TOKENS = "tokens"
    """Its tokens begin with a prompt and an answer to it."""
    HISTORY = "history"
    """Its chat history has an answer of ours."""
    GREEDY = "greedy"
    """Temperature 0: all trajectories of a group would be the same."""
    SCORING = "scoring"
    """One token, or log-probs of the prompt."""


class VoteOutcome(StrEnum):
    """How a vote ended that was not cancelled."""

    DECIDED_EARLY = "decided_early"
    """The remaining candidates were stopped, as they could not change the answer."""
    COUNTED = "counted"
    """All candidates finished."""
    NO_ANSWER = "no_answer"
    """All candidates finished, and none has an answer."""


class PruningStatus(StrEnum):
    """Whether candidates are pruned by quality, or the reason why all of them are kept."""

    READY = "ready"
    UNUSED = "unused"
    """No trajectory has been scored yet."""
    NO_LABELS = "no_labels"
    """No reward has been reported for a scored trajectory yet."""
    COLD = "cold"
    """During the first training steps, which only collect labels."""
    FEW_LABELS = "few_labels"
    UNTRAINED = "untrained"
    """The head has enough labels, but its first training has not finished."""
    ONE_CLASS = "one_class"
    """All labels are of correct trajectories, or all are of wrong ones."""
    DIVERGED = "diverged"
    """The head's last training diverged and was undone."""
    TRAINER_LOST = "trainer_lost"
    """The process that trains the head died too often."""
    PROBE_LOST = "probe_lost"
    """The engine no longer sends hidden states."""


VersionSpans = tuple[tuple[int, int], ...]
"""Weight versions in the order in which they sampled a candidate's tokens, and how many tokens each of them did."""


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
class Checkpoint:
    """Where a candidate could have been pruned.

    ``tokens``: generated by then. ``survival``: the probability below 1 with which it was kept, given that it was kept
    so far. ``value``: its probability to end correct as predicted there; ``None`` without a score.
    """

    tokens: int
    survival: float
    value: float | None


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """How one candidate ended.

    ``tokens``: number of generated tokens; for a stopped candidate those generated when it was stopped, for a cut one
    the deadline. ``selected_as`` is set if it was selected, ``reason`` if it was discarded. ``cut``: whether it was
    truncated at the group's deadline. Times are seconds on the runner's clock, ``None`` if it never got that far.
    ``quality``: its predicted probability of being correct, by its last score; ``None`` without a score. ``survival``:
    the probability that pruning kept it, over all its scores; 1 if the group needed it in any case. ``weight``: 1 /
    (its probability to be returned, given all candidates of its group), ``None`` if it was not returned or if some
    candidates can never be. ``checkpoints``: where it could have been pruned, in order; at the last one it was, if it
    was. ``version_spans``: of its ``tokens``.
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
    checkpoints: tuple[Checkpoint, ...] = ()
    version_spans: VersionSpans = ()


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
    explored: bool = False
    """Whether it ran past its deadline, to measure what the deadline discards."""
    tokens_needed: int | None = None
    """Length at which enough of its candidates had finished, as reported to its cohort; ``None`` if not reported."""
    request_ids: tuple[str, ...] = ()
    """Ids of the requests that it answered, and the response ids that it can be looked up by."""
    chosen: "ChosenOption | None" = None
    """What `auto` did with its cohort, and why; ``None`` under other policies."""
    shadow: "ShadowRecord | None" = None
    restarted_from: int = 0
    """Index of the first candidate since its last restart: earlier ones were generated with older weights."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Trace context of the request that started it: ``traceparent`` and ``tracestate``."""
    owner: str | None = None
    """Name of the caller that started it; ``None`` for callers without a key."""

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
    def selected(self) -> list[CandidateRecord]:
        """The returned trajectories, by candidate index."""
        return [c for c in self.candidates if c.selected_as is not None]

    @property
    def counted(self) -> int:
        """N: candidates that the weights stand for, without failed ones, those before a restart and observed ones."""
        return sum(c.reason not in UNCOUNTED for c in self.candidates[self.restarted_from :])

    @property
    def all_truncated(self) -> bool:
        """Whether no returned trajectory ended before a length limit, the deadline or the bound."""
        return bool(self.selected) and all(c.finish_reason is not FinishReason.STOP for c in self.selected)

    @property
    def generated_tokens(self) -> int:
        """Without those that were carried over, which count in the group that goes on with them."""
        return sum(c.tokens for c in self.candidates if c.reason is not DiscardReason.CARRIED)

    @property
    def returned_tokens(self) -> int:
        return sum(c.tokens for c in self.selected)

    @property
    def mixed_versions(self) -> bool:
        """Whether the returned trajectories were generated with more than one weight version."""
        versions = {v for c in self.selected for v in (c.weight_version_start, c.weight_version_end)}
        # Weights may have been switched there and back again.
        return len(versions.union(v for c in self.selected for v, _ in c.version_spans)) > 1


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """What shaping would have done with an unshaped group's candidates, if all generated one token a step.

    ``policy``: the policy that was simulated. ``selection``: candidate indices. ``generated``, ``returned``: tokens.
    ``steps``: decode steps until the group would have been complete.
    """

    policy: str
    selection: tuple[int, ...]
    generated: int
    returned: int
    steps: int


@dataclass(frozen=True, slots=True)
class ChosenOption:
    """What `auto` does with a cohort: the name of an ``option``, and the ``reason`` in words."""

    option: str
    reason: str

    @property
    def rule(self) -> str:
        """The option's rule, without its numbers."""
        return self.option.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class CohortRecord:
    """How groups that were allocated together ended; reported to observers when the last of them has ended.

    ``mean_candidates``: M', the mean number of candidates per group. ``deadline``: in tokens; ``None`` if it was never
    set. Seconds are measured from the start of the first group to the end of the last one;
    ``predicted_seconds`` is ``None`` without a prediction. Tokens are summed over all candidates, and over the returned
    ones.

    ``chosen``: what `auto` did with it, and why; ``None`` under other policies. ``candidates``: that were started.
    ``completed``: groups. ``interrupted``: whether a group was restarted, or ran under several weight versions.
    ``reduced``: whether a group gave up candidates because of the load. ``returned``, ``cut``: returned trajectories,
    and those of them that were cut at the deadline. ``max_tokens``: of the candidates that were truncated at their
    token limit, the most tokens; ``None`` if none was. ``longest``: tokens of the longest candidate.
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
    chosen: "ChosenOption | None" = None
    candidates: int = 0
    completed: int = 0
    interrupted: bool = False
    reduced: bool = False
    returned: int = 0
    cut: int = 0
    max_tokens: int | None = None
    longest: int = 0


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """A trajectory that was returned to its caller. ``started_at``: start of its group, on the runner's clock.

    The token ids are the engine's own lists: do not change or keep them.
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
    """Shaping options of one request; ``None`` means the server's setting.

    ``prompt_key``: key of the prompt's statistics. ``group_id``: single requests with the same id form one group, of
    ``group_size`` trajectories. ``session``: name of the request's trajectory, which its later turns have, too.
    """

    policy: str | None = None
    prompt_key: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A caller's prompt: exactly one of token ids, chat messages and text.

    ``key``: the caller's key for the prompt's statistics. ``metadata``: a JSON object, returned with the group
    unchanged; as Python objects it would take many times the memory.
    """

    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, object]] | None = None
    text: str | None = None
    key: str | None = None
    metadata: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, roughly: as JSON, or 36 for each token id in a list."""
        messages = 0 if self.messages is None else len(json.dumps(self.messages, default=str))
        return 36 * len(self.token_ids or ()) + messages + len(self.text or "") + len(self.metadata or b"")


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of a trajectory.

    ``logprobs``: one per token, ``None`` if the request asks for none. ``finish_reason``: ``None`` if it was aborted.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason | None
