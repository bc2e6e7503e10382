import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

OFF = "off"
AUTO = "auto"
MAX_GROUP_SIZE = 1024
"""Trainers use groups of 8 to 64, so a larger n is likely a mistake."""
POLICIES: Mapping[str, str] = {
    OFF: "unshaped",
    "uniform": "the same number of candidates for every prompt",
    "darts": "more candidates for prompts whose lengths vary more",
    "darts_cut": "as darts, with a sampled tail that is cut at a deadline",
    "cap": "no more candidates than are returned, all of them cut at the deadline",
    "arrol": (
        "candidates are scored while they run, and some are pruned at random by their probability of being correct"
    ),
    "darts+arrol": "darts and arrol together",
    "informative": (
        "more candidates than are returned, all run to their end; trajectories are sampled by their rewards, with "
        "weights that make the gradient that of all candidates"
    ),
    AUTO: "as off; in a batch that carries prompts over, it chooses how many prompts run at once",
}
"""Descriptions of the policies that `policy.shaping.build_policies` builds."""


class FinishReason(StrEnum):
    """Why a candidate finished, in vLLM's words: at a stop token or string, or at its token limit."""

    STOP = "stop"
    LENGTH = "length"


class DiscardReason(StrEnum):
    """Why a candidate is not in its group."""

    MIDDLE = "middle"
    """Finished, but neither among the shortest nor selected for the tail."""
    LONGER_THAN_NEEDED = "longer_than_needed"
    """Stopped because it was too long to be among the shortest."""
    PRUNED = "pruned"
    """Stopped by its quality score while it ran (ARRoL)."""
    TRUNCATED = "truncated"
    """Reached its token limit, while enough other candidates finished below theirs."""
    TAIL_PRUNED = "tail_pruned"
    """Stopped because other candidates were sampled for the tail."""
    FAILED = "failed"
    """The engine failed on the candidate, or aborted it without our request."""
    ABORTED = "aborted"
    """Aborted, alone or with its group, so that the caller got the partial output."""
    CANCELLED = "cancelled"
    """The group was cancelled: its caller disconnected, it was aborted, or too few candidates could finish."""
    RESTARTED = "restarted"
    """The group was restarted with new weights."""
    DECIDED = "decided"
    """Stopped because the vote was decided, or because enough others had unequal rewards."""
    CARRIED = "carried"
    """The group resumes in a later batch."""
    NOT_SAMPLED = "not_sampled"
    """Finished, and others were selected by their rewards."""
    ZERO_VARIANCE = "zero_variance"
    """In a group that its batch did not return, because all rewards are equal."""


GONE = frozenset({DiscardReason.FAILED, DiscardReason.ABORTED})
"""Reasons of candidates that the group could never select, and cannot resume."""


class SelectedAs(StrEnum):
    """Why a trajectory was selected."""

    SHORT = "short"
    """Among the shortest. In an unshaped group, every trajectory."""
    LONG = "long"
    LONG_TRUNCATED = "long_truncated"
    FILL = "fill"
    """Reached its token limit, and too few candidates finished below theirs. Under `informative`: without a reward, as
    too few candidates have rewards."""
    SURVIVOR = "survivor"
    """Not pruned, and selected whatever its length and quality."""
    REWARD = "reward"
    """Selected by its reward, whatever its length."""


class Outcome(StrEnum):
    """How a group ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    """Its vote was decided early."""


class SessionEnd(StrEnum):
    """How a session of an agent ended."""

    FINISHED = "finished"
    """Its harness ended it."""
    STOPPED = "stopped"
    """Its group's rule stopped or cut it."""
    SILENT = "silent"
    """No request came for a while."""
    FAILED = "failed"
    """Its harness ended it as unusable."""
    ABORTED = "aborted"
    """Its group was ended from outside, or too few of its group's sessions could finish."""


class Measure(StrEnum):
    """What a group of sessions compares as the length of a session."""

    TOKENS = "tokens"
    """Generated tokens over all turns."""
    SECONDS = "seconds"
    """Seconds since the begin of the first turn, with tool time."""


class TurnKind(StrEnum):
    """Whether a single request opens a trajectory, or why it is not joined to a group."""

    OPENING = "opening"
    SESSION = "session"
    """The session had an answer."""
    TOKENS = "tokens"
    """The tokens begin with a prompt and its answer, or the request was aborted before a token."""
    PROMPT = "prompt"
    """The tokens begin with a whole prompt that was answered."""
    GREEDY = "greedy"
    """The temperature is 0, so all trajectories of a group would be the same."""
    SCORING = "scoring"
    """The request is for one token, or for log-probs of the prompt."""


VoteWeights = Literal["majority", "rank", "log_odds"]


class VoteOutcome(StrEnum):
    """How a vote ended, unless it was cancelled."""

    DECIDED_EARLY = "decided_early"
    """Candidates were stopped because they could not change the answer."""
    COUNTED = "counted"
    NO_ANSWER = "no_answer"


class VerifierResult(StrEnum):
    """How a verifier's call for an answer ended."""

    REWARD = "reward"
    NONE = "none"
    """The verifier gave no reward, without an error."""
    TIMEOUT = "timeout"
    ERROR = "error"
    """The verifier's function raised, or its server answered with an error."""
    INVALID = "invalid"
    """The verifier returned something else than a finite number."""
    CRASH = "crash"
    """The verifier's process died."""
    UNREACHABLE = "unreachable"
    """The verifier's server did not answer."""


class PruningStatus(StrEnum):
    """Whether candidates are pruned by quality, or the reason why all of them are kept."""

    READY = "ready"
    UNUSED = "unused"
    NO_LABELS = "no_labels"
    """No scored trajectory has a reward yet."""
    COLD = "cold"
    """The first training steps only collect labels."""
    FEW_LABELS = "few_labels"
    UNTRAINED = "untrained"
    """The head's first training has not finished."""
    ONE_CLASS = "one_class"
    """All labelled trajectories are correct, or all are wrong."""
    DIVERGED = "diverged"
    """The head's last training was undone."""
    TRAINER_LOST = "trainer_lost"
    """The process that trains the head died too often."""
    PROBE_LOST = "probe_lost"
    """The engine no longer sends hidden states."""


class UpdateOutcome(StrEnum):
    """How a weight update ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """The weights were bad or incomplete, and the engine was not touched."""
    FAILED = "failed"
    """A later phase failed, and the old version is served."""
    LOST = "lost"
    """The old version could not be restored, and nothing is served."""


MAX_LOST_GROUPS = 0.005
"""One group in 200: a group that loses all its right answers teaches the policy that its prompt cannot be solved."""


@dataclass(frozen=True, slots=True)
class MaxLost:
    """Limits of the right answers that a deadline may discard.

    The limit for groups is smaller: the few prompts that need the longest answers have a negligible share of all right
    answers.
    """

    answers: float = 0.02
    """Share of right answers."""
    groups: float = MAX_LOST_GROUPS
    """Share of groups with right answers that lose all of them."""


NO_LIMIT = MaxLost(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Shaping options of a request. None means the server's setting."""

    policy: str | None = None
    prompt_key: str | None = None
    """Key of the prompt's statistics."""
    group_id: str | None = None
    """Name that the single requests of a group have in common."""
    group_size: int | None = None
    session: str | None = None
    """Name that all turns of a trajectory have in common."""
    on_stop: str | None = None
    """Answer if the server stops: ``fail`` for an error, ``answer`` for the partial output."""


TOKEN_ID_BYTES = 36
"""Memory of a token id in a list: the pointer and the integer."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A caller's prompt: exactly one of token ids, chat messages and text.

    JSON stays encoded, because Python objects would take many times the memory.
    """

    token_ids: Sequence[int] | None = None
    messages: bytes | None = None
    text: str | None = None
    key: str | None = None
    """Key of the prompt's statistics."""
    metadata: bytes | None = None
    chat_options: bytes | None = None
    """Fields of vLLM's chat route that render the messages, such as ``tools``."""
    verifier: Sequence[str] | None = None
    """Names of the verifiers, empty to verify nothing, or None for the choice of the batch."""

    @property
    def size_bytes(self) -> int:
        parts = (self.messages, self.text, self.metadata, self.chat_options)
        encoded = sum(sys.getsizeof(part) for part in parts if part is not None)
        return TOKEN_ID_BYTES * len(self.token_ids or ()) + encoded


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of a trajectory."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    """None if the request asks for no log-probs."""
    text: str
    finish_reason: FinishReason | None
    """None if the trajectory was aborted."""
