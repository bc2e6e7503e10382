"""Types that all rooms share: names of policies, how candidates, groups and other things end, values of requests."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

OFF = "off"
AUTO = "auto"
MAX_GROUP_SIZE = 1024
"""Maximum trajectories of a group. Trainers use groups of 8 to 64, and 1,024 candidates of one prompt fill most
engines. A larger n is more likely a mistake than a wish."""
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
    AUTO: "as off; in a batch whose prompts go on in the next one, it chooses how many run at once",
}
"""The policies by name, and what each does; `policy.shaping.build_policies` says what they are composed of."""


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
    CANCELLED = "cancelled"
    """Its group was cancelled: the caller disconnected, it was aborted, or too few candidates could finish."""
    RESTARTED = "restarted"
    """Its group was restarted under new weights."""
    DECIDED = "decided"
    """Its vote was decided without it."""
    CARRIED = "carried"
    """Its group goes on in a later batch, with what it has generated."""


GONE = frozenset({DiscardReason.FAILED, DiscardReason.ABORTED})
"""Of candidates that were never to be chosen from, replaced or given up before they ran: no group goes on with them."""


class SelectedAs(StrEnum):
    """Why a trajectory was selected: from which end of the group's length order it comes, if from any."""

    SHORT = "short"
    """Among the shortest; in a group that is not shaped, every trajectory, however it finished."""
    LONG = "long"
    LONG_TRUNCATED = "long_truncated"
    """Sampled for the tail, and reached its token limit."""
    FILL = "fill"
    """Reached its token limit; selected because too few finished below it."""
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
    """Its tokens begin with a prompt and an answer to it, or with one that was aborted before its first token."""
    PROMPT = "prompt"
    """Its tokens begin with a whole prompt that was answered."""
    GREEDY = "greedy"
    """Temperature 0: all trajectories of a group would be the same."""
    SCORING = "scoring"
    """One token, or log-probs of the prompt."""


VoteWeights = Literal["majority", "rank", "log_odds"]
"""How votes are weighted, by name."""


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


class UpdateOutcome(StrEnum):
    """How a weight update ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Before the engine was touched: the weights were bad, or could not be transferred completely."""
    FAILED = "failed"
    """After that; the old version is served."""
    LOST = "lost"
    """The old version could not be restored: nothing is served."""


MAX_LOST_GROUPS = 0.005
"""One group in 200, a quarter of the limit for single answers: a group that loses all its right answers teaches the
policy that its prompt cannot be solved."""


@dataclass(frozen=True, slots=True)
class MaxLost:
    """What a deadline may take away.

    ``answers``: share of the right ones. ``groups``: share of those with right answers that lose all of them. It is
    smaller, since prompts that need many times as long answers as others are few: a share of all answers that hardly
    counts may be all that such prompts have, and the policy would unlearn them.
    """

    answers: float = 0.02
    groups: float = MAX_LOST_GROUPS


NO_LIMIT = MaxLost(1.0, 1.0)
"""The deadline may take away anything, so it is never moved."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Shaping options of one request; ``None`` means the server's setting.

    ``prompt_key``: key of the prompt's statistics. ``group_id``: single requests with the same id form one group, of
    ``group_size`` trajectories. ``session``: name of the request's trajectory, which its later turns have, too.
    ``on_stop``: what the caller gets if the server stops before the request has ended: ``fail``, an error, or
    ``answer``, what was generated.
    """

    policy: str | None = None
    prompt_key: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    session: str | None = None
    on_stop: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A caller's prompt: exactly one of token ids, chat messages and text.

    ``messages``: as JSON, and ``metadata``: a JSON object, returned with the group unchanged; as Python objects they
    would take many times the memory. ``key``: the caller's key for the prompt's statistics. ``chat_options``: how
    ``messages`` become tokens, a JSON object with fields of vLLM's chat route, such as ``tools``; ``None`` for none.
    """

    token_ids: Sequence[int] | None = None
    messages: bytes | None = None
    text: str | None = None
    key: str | None = None
    metadata: bytes | None = None
    chat_options: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that it takes: 36 for each token id in a list, and that of everything else."""
        others = (self.messages, self.text, self.metadata, self.chat_options)
        return 36 * len(self.token_ids or ()) + sum(sys.getsizeof(each) for each in others if each is not None)


@dataclass(frozen=True, slots=True)
class Sample:
    """The content of a trajectory.

    ``logprobs``: one per token, ``None`` if the request asks for none. ``finish_reason``: ``None`` if it was aborted.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    text: str
    finish_reason: FinishReason | None
