"""Advantages with an unbiased gradient for a batch of TRL's, from the weights in the server's records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt
from typing import Any, Self

from .._errors import NotFound
from .._records import GroupRecord
from ..advantages import unbiased_advantages
from ._server import Server


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """The id of an answer to a request for completions, and the number of tokens of each choice."""

    response_id: str
    lengths: Sequence[int]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Self:
        return cls(str(answer.get("id")), [len(choice["token_ids"]) for choice in answer["choices"]])

    def fetch_records(self, server: Server) -> list[GroupRecord]:
        """Return the record of each group, in the order of the prompts.

        Raises:
            DartsError: the server has no records of the answer.
            ValueError: the records are not of these choices.
        """
        try:
            with server.client() as client:
                records = client.groups.get(self.response_id)
        except NotFound as error:
            raise NotFound(
                f"the server has no groups of answer {self.response_id}, whose weights advantages='unbiased' needs: "
                "under 'off' it has none"
            ) from error
        recorded_lengths = [candidate.length for record in records for candidate in record.selected]
        if recorded_lengths != list(self.lengths):
            raise ValueError(
                f"the groups of answer {self.response_id} have {len(recorded_lengths)} trajectories, which are not its "
                f"{len(self.lengths)} choices: their lengths differ"
            )
        return records


def weighted_advantages(
    records: Sequence[GroupRecord],
    rewards: Sequence[float],
    *,
    scale: bool,
    by_pass_rate: bool = False,
) -> list[float]:
    """Return the advantage of each completion, group after group.

    Args:
        rewards: NaN for a completion without a reward. A group without any reward has advantages of 0.
        scale: whether to divide all advantages by their root mean square. It is one number for the whole batch, so the
            gradient keeps its direction.
        by_pass_rate: whether the baseline is the prompt's pass rate before the group, where it is known.

    Raises:
        ValueError: a group has no weights, or only some of its completions have rewards.
    """
    advantages: list[float] = []
    for record in records:
        start = len(advantages)
        group_rewards = rewards[start : start + len(record.selected)]
        num_missing = sum(map(isnan, group_rewards))
        if 0 < num_missing < len(group_rewards):
            raise ValueError(
                f"{num_missing} of {len(group_rewards)} completions of group {record.group_id} have no reward, so its "
                "gradient cannot be unbiased: let the reward function return a number for each of them"
            )
        if num_missing:
            advantages += [0.0] * num_missing
        else:
            baseline = record.earlier_pass_rate if by_pass_rate else None
            advantages += unbiased_advantages(record, group_rewards, baseline)
    if not scale or not advantages:
        return advantages
    root_mean_square = sqrt(sum(value**2 for value in advantages) / len(advantages))
    if root_mean_square == 0:
        return advantages
    return [value / root_mean_square for value in advantages]
