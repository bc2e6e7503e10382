"""What is known of the lengths of each prompt's trajectories, kept where it outlives a restart."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from darts_server.exceptions import StateError
from darts_server.policy.lengths.estimate import Observation
from darts_server.policy.lengths.stats import PromptStats, make_prompt_key, update_stats
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.types import CandidateRecord, FinishReason, GroupRecord, Outcome

logger = logging.getLogger(__name__)

KIND = "prompt"


def key_of(token_ids: Sequence[int], *beside: str) -> str:
    """The key of a prompt whose caller named none: a hash of its token ids and of what else sets it apart."""
    # Token ids are not negative, so what stands beside them cannot be taken for more of them.
    return make_prompt_key([*token_ids, *(-1 - byte for text in beside for byte in text.encode())])


class Prompts:
    """Length statistics by prompt key."""

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents
        self._unreadable = False

    def stats(self, key: str) -> PromptStats | None:
        """What is known of a prompt; ``None`` if it was never seen, or by a version that kept something else.

        Raises:
            StateError: what is known cannot be read.
        """
        document = self._documents.get(KIND, key)
        try:
            return None if document is None else PromptStats(**document)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            logger.warning("what is kept of a prompt is not what this version writes; it counts as new: %r", error)
            return None

    def std(self, key: str) -> float | None:
        """The prompt's length std in tokens (EMA over its groups); ``None`` if it is not known or cannot be read."""
        with self._reading():
            stats = self.stats(key)
            return None if stats is None else stats.std_ema
        return None

    def mean(self, key: str) -> float | None:
        """The prompt's mean length in tokens (EMA over its groups); ``None`` if it is not known or cannot be read."""
        with self._reading():
            stats = self.stats(key)
            return None if stats is None else stats.mean_ema
        return None

    def learn(self, record: GroupRecord) -> PromptStats | None:
        """Take in the lengths of a completed group, those of stopped candidates as censored; what is known then.

        A group that was given up or cancelled tells how long someone waited, not how long trajectories are.
        """
        seen = observations(record)
        if record.prompt_key is None or record.outcome is not Outcome.COMPLETED or not seen:
            return None
        with self._reading():
            return self._add(record.prompt_key, seen, record)
        return None

    def _add(self, key: str, seen: Sequence[Observation], record: GroupRecord) -> PromptStats:
        versions = [c.weight_version_end for c in record.selected if c.weight_version_end is not None]
        stats = update_stats(self.stats(key), seen, max(versions, default=0))
        self._documents.put(KIND, key, asdict(stats))
        return stats

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Statistics that cannot be read cost shaping some of its aim, and nobody a rollout. Said once."""
        try:
            yield
        except StateError as error:
            if not self._unreadable:
                logger.warning("statistics of prompts cannot be read; all count as new: %s", error)
            self._unreadable = True
        else:
            self._unreadable = False


def observations(record: GroupRecord, *, beyond_limit: bool = True) -> list[Observation]:
    """How long the group's candidates became, those that were stopped or cut as the longer ones they are.

    ``beyond_limit``: whether one that hit its length limit counts as longer, too.
    """

    def whole(c: CandidateRecord) -> bool:
        truncated = c.finish_reason is FinishReason.LENGTH and not c.cut
        return c.finish_reason is FinishReason.STOP or (truncated and not beyond_limit)

    return [
        Observation(c.tokens, censored=not whole(c)) for c in record.candidates[record.restarted_from :] if c.tokens > 0
    ]
