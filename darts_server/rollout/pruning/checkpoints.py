"""Candidates come to checkpoints, at which they may be pruned without a score."""

from collections.abc import Mapping
from typing import Any

from darts_server.engine.port import RunningCandidate
from darts_server.policy.events import Scored
from darts_server.policy.pruning.survival import SurvivalRule


class Checkpoints:
    """Watch the candidates of one group. ``running``: by index."""

    def __init__(self, rule: SurvivalRule, running: Mapping[int, RunningCandidate[Any]]) -> None:
        self._rule = rule
        self._points = rule.checkpoints
        self._running = running
        self._passed: dict[int, int] = {}

    def poll(self) -> list[Scored]:
        """Return an event for each running candidate that has come to a new checkpoint.

        Of several that it passed since the last poll, the last one counts: survival there contains that at the others.
        """
        if not self._points:
            return []
        return [
            Scored(index, None, self._rule.at_checkpoint(index, tokens), tokens)
            for index, candidate in self._running.items()
            if (tokens := self._last_new(index, candidate.tokens())) is not None
        ]

    def _last_new(self, index: int, tokens: int | None) -> int | None:
        first = passed = self._passed.get(index, 0)
        while tokens is not None and passed < len(self._points) and tokens >= self._points[passed]:
            passed += 1
        self._passed[index] = passed
        return self._points[passed - 1] if passed > first else None
