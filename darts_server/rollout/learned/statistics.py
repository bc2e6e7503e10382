"""Everything that is learned from rollouts, as one value."""

from darts_server.observers import GroupObserver
from darts_server.records import GroupRecord
from darts_server.rollout.learned.dataset import Dataset
from darts_server.rollout.learned.documents import DocumentStore
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.rewards import Rewards


class Statistics(GroupObserver):
    """Keep statistics of lengths, step times and rewards in ``documents``.

    ``capacity``: most sequences that the engine runs at once; ``kv_tokens``: most tokens in its KV cache; ``None`` if
    unknown.
    """

    def __init__(self, documents: DocumentStore, capacity: int | None = None, kv_tokens: int | None = None) -> None:
        self.documents = documents
        self.prompts = Prompts(documents)
        self.dataset = Dataset(documents)
        self.latency = Latency(documents, capacity, kv_tokens)
        self.rewards = Rewards(documents)

    def group_ended(self, record: GroupRecord) -> None:
        """Learn the group's lengths."""
        self.dataset.learn(record, self.prompts.learn(record))

    def flush(self) -> None:
        """Write everything that is pending to ``documents``."""
        self.dataset.flush()
        self.latency.flush()
