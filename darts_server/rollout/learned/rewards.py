"""What rewards said of each prompt and of the whole data set, kept where it outlives a restart."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add

from darts_server.policy.reward_stats import Moments, RewardStats, TailPattern, restore_stats
from darts_server.rollout.learned.documents import DocumentStore, StoredValues

PROMPT_KIND = "prompt_rewards"
DATASET_KIND = "dataset_rewards"
KEY = "all"


@dataclass(frozen=True, slots=True)
class MeanLength:
    """In tokens. ``se``: its standard error, ``None`` for a single trajectory."""

    mean: float
    se: float | None
    count: int


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """What statistics come to, where there is a reward. Lengths and their difference (right minus wrong) in tokens."""

    rewarded: int
    right: int
    pass_rate: float
    zero_variance_groups: int
    rewarded_groups: int
    length_right: MeanLength | None
    length_wrong: MeanLength | None
    pattern: TailPattern | None
    difference: float | None
    difference_se: float | None


class Rewards:
    """Statistics of rewards, by prompt key and over all prompts."""

    def __init__(self, documents: DocumentStore) -> None:
        self._prompts = StoredValues(documents, PROMPT_KIND, restore_stats)
        self._dataset = StoredValues(documents, DATASET_KIND, restore_stats)

    def of_prompt(self, key: str) -> RewardStats | None:
        """``None`` if none of its trajectories got a reward."""
        stats: RewardStats | None = self._prompts.load(key)
        return stats

    @property
    def dataset(self) -> RewardStats:
        """Over all prompts, and trajectories whose prompt has no key."""
        return self._dataset.load(KEY) or RewardStats()

    def mean_length(self, answer: str) -> float | None:
        """Of ``right`` or ``wrong`` trajectories of all prompts, in tokens; ``None`` without any."""
        lengths = {"right": self.dataset.right, "wrong": self.dataset.wrong}[answer]
        return lengths.mean if lengths.count else None

    def learn(self, news: Mapping[str | None, RewardStats]) -> None:
        """Take in what is new, by prompt key."""
        for key, stats in news.items():
            if key is not None:
                self._prompts.save(key, ((self.of_prompt(key) or RewardStats()) + stats).state)
        if news:
            self._dataset.save(KEY, reduce(add, news.values(), self.dataset).state)


def summary(stats: RewardStats | None) -> RewardSummary | None:
    """``None`` without any reward."""
    if stats is None or stats.pass_rate is None:
        return None
    return RewardSummary(
        rewarded=stats.rewarded,
        right=stats.right.count,
        pass_rate=stats.pass_rate,
        zero_variance_groups=stats.zero_variance,
        rewarded_groups=stats.groups,
        length_right=_mean(stats.right),
        length_wrong=_mean(stats.wrong),
        pattern=stats.difference.pattern,
        difference=stats.difference.tokens,
        difference_se=stats.difference.error,
    )


def _mean(lengths: Moments) -> MeanLength | None:
    return MeanLength(lengths.mean, lengths.error, lengths.count) if lengths.count else None
