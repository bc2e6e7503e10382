"""Reward statistics of each prompt and of the whole data set, kept over restarts."""

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

from darts_server.policy.reward_stats import Moments, RewardStats, restore_stats
from darts_server.rollout.learned.documents import DocumentStore, StoredValues, json_kind

DATASET_KIND = "dataset_rewards"
PROMPT, DATASET = json_kind("prompt_rewards", restore_stats), json_kind(DATASET_KIND, restore_stats)
KEY = "all"


class Rewards:
    """Keep reward statistics in ``documents``, by prompt key and over all prompts."""

    def __init__(self, documents: DocumentStore) -> None:
        self._prompts = StoredValues(documents, PROMPT)
        self._dataset = StoredValues(documents, DATASET)

    def of_prompt(self, key: str) -> RewardStats | None:
        """Statistics of a prompt; ``None`` if none of its trajectories has a reward."""
        return self._prompts.load(key)

    @property
    def dataset(self) -> RewardStats:
        """Statistics over all prompts, including those without a key."""
        return self._dataset.load(KEY) or RewardStats()

    def mean_length(self, answer: str) -> float | None:
        """Mean length in tokens of all ``right`` or all ``wrong`` trajectories; ``None`` if there are none."""
        lengths = {"right": self.dataset.right, "wrong": self.dataset.wrong}[answer]
        return lengths.mean if lengths.count else None

    def learn(self, new_stats: Mapping[str | None, RewardStats]) -> None:
        """Add statistics of newly rewarded trajectories, by prompt key."""
        for key, stats in new_stats.items():
            if key is not None:
                self._prompts.save(key, ((self.of_prompt(key) or RewardStats()) + stats).state)
        if new_stats:
            self._dataset.save(KEY, reduce(add, new_stats.values(), self.dataset).state)


def summarize(stats: RewardStats | None) -> dict[str, Any] | None:
    """Summarize statistics as JSON values, with lengths in tokens; ``None`` without any reward.

    The difference is right minus wrong. ``se``: a standard error, ``None`` for a single length.
    """
    if stats is None or stats.pass_rate is None:
        return None

    def mean_length(lengths: Moments) -> dict[str, Any] | None:
        return {"mean": lengths.mean, "se": lengths.error, "count": lengths.count} if lengths.count else None

    return {
        "rewarded": stats.rewarded,
        "right": stats.right.count,
        "pass_rate": stats.pass_rate,
        "zero_variance_groups": stats.zero_variance,
        "rewarded_groups": stats.groups,
        "length_right": mean_length(stats.right),
        "length_wrong": mean_length(stats.wrong),
        "pattern": stats.difference.pattern,
        "difference": stats.difference.tokens,
        "difference_se": stats.difference.error,
    }
