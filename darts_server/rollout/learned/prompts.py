"""Length statistics of each prompt, kept over restarts."""

from collections.abc import Sequence
from dataclasses import asdict

from darts_server.policy.lengths import Observation, PromptStats, make_prompt_key, update_stats
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.documents import Document, DocumentStore, StoredDocuments
from darts_server.types import FinishReason, Outcome

KIND = "prompt"


def key_of(token_ids: Sequence[int], *other_inputs: str) -> str:
    """The key of a prompt without a key of its caller's: a hash of its token ids and of its other inputs."""
    # Token ids are not negative, so negative numbers cannot be mistaken for more of them.
    return make_prompt_key([*token_ids, *(-1 - byte for text in other_inputs for byte in text.encode())])


def parse_stats(document: Document) -> PromptStats:
    """Parse the statistics of a prompt; raises if they are not such."""
    return PromptStats(**document)  # type: ignore[arg-type]  # it checks the types itself


class Prompts:
    """Keep length statistics by prompt key in ``documents``."""

    def __init__(self, documents: DocumentStore) -> None:
        self._stats = StoredDocuments(documents, KIND, parse_stats)

    def stats(self, key: str) -> PromptStats | None:
        """Statistics of a prompt; ``None`` for a new one, and for statistics that cannot be used."""
        stats: PromptStats | None = self._stats.load(key)
        return stats

    def std(self, key: str) -> float | None:
        """The prompt's length std in tokens (EMA over its groups); ``None`` if it is new."""
        stats = self.stats(key)
        return None if stats is None else stats.std_ema

    def mean(self, key: str) -> float | None:
        """The prompt's mean length in tokens (EMA over its groups); ``None`` if it is new."""
        stats = self.stats(key)
        return None if stats is None else stats.mean_ema

    def learn(self, record: GroupRecord) -> PromptStats | None:
        """Learn the lengths of a completed group, those of stopped candidates as censored; the statistics before it.

        Failed and cancelled groups are ignored: their lengths depend on when they were stopped.
        """
        observed = observations(record)
        if record.prompt_key is None or record.outcome is not Outcome.COMPLETED or not observed:
            return None
        earlier = self.stats(record.prompt_key)
        versions = [c.weight_version_end for c in record.selected if c.weight_version_end is not None]
        self._stats.put(record.prompt_key, asdict(update_stats(earlier, observed, max(versions, default=0))))
        return earlier


def observations(record: GroupRecord, *, beyond_limit: bool = True) -> list[Observation]:
    """Lengths of the group's candidates; censored for those that were stopped or cut, as they would be longer.

    ``beyond_limit``: whether the length of a truncated candidate is censored too.
    """

    def is_complete(c: CandidateRecord) -> bool:
        truncated = c.finish_reason is FinishReason.LENGTH and not c.cut
        return c.finish_reason is FinishReason.STOP or (truncated and not beyond_limit)

    return [
        Observation(c.tokens, censored=not is_complete(c))
        for c in record.candidates[record.restarted_from :]
        if c.tokens > 0
    ]
