"""Completion lengths of the latest groups, from which groups get a deadline that are too few for one of their own."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from darts_server.policy.checks import check_count
from darts_server.policy.deadline import MIN_GROUPS, Deadline

WINDOW = 256
"""Groups that stand in for the cohort when they come one at a time: a usual number of prompts a step."""


class RecentCompletionLengths:
    """Completion lengths of the last `WINDOW` groups, in tokens, for groups that come one at a time.

    0 stands for a group that was cut at the bound before it had one. Such groups count as longer than the others.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """
        Raises:
            ValueError: a length is no whole number of at least 0.
        """
        self._lengths: deque[int] = deque(lengths, maxlen=WINDOW)
        for tokens in self._lengths:
            check_count("lengths", tokens)

    @property
    def state(self) -> list[int]:
        """Argument of the constructor that restores it, oldest first."""
        return list(self._lengths)

    def add(self, tokens: int) -> None:
        self._lengths.append(tokens)

    def deadline(self, rule: Deadline) -> int | None:
        """Return the deadline of the next group; ``None`` while fewer than `MIN_GROUPS` are known.

        If more than a quarter was cut, it is later the more these are, and there is none if fewer than `MIN_GROUPS`
        were not: then groups show their lengths again.
        """
        if len(self._lengths) < MIN_GROUPS:
            return None
        known = self._known()
        return replace(rule, recent=self.quantile(rule)).of_cohort(known, [None] * (len(self._lengths) - len(known)))

    def quantile(self, rule: Deadline) -> int | None:
        """Return the quantile of those that were not cut, before it is stretched; ``None`` below `MIN_GROUPS`."""
        known = self._known()
        return rule.quantile_of(known, len(known)) if len(known) >= MIN_GROUPS else None

    def _known(self) -> list[int]:
        return [tokens for tokens in self._lengths if tokens]
