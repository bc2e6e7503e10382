"""The tokens that a group's candidates have generated so far."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from darts_server.engine.port import RunningCandidate, TokenSlice
from darts_server.policy.group import Group
from darts_server.rollout.candidates.outputs import CandidateOutputs
from darts_server.rollout.recorder import GroupRecorder


class CandidateTokens:
    """Read the tokens of a group's candidates, by index, whether they run or have ended."""

    def __init__(
        self,
        group: Group,
        running: Mapping[int, RunningCandidate[Any]],
        outputs: CandidateOutputs[Any, Any],
        recorder: GroupRecorder,
    ) -> None:
        self._group = group
        self._running = running
        self._outputs = outputs
        self._recorder = recorder

    def count(self, index: int) -> int:
        """Return how many tokens a candidate has generated so far; of a cut one, those that are kept."""
        running = self._running_at(index)
        tokens = None if running is None else running.tokens()
        return self._recorder.tokens(self._group.candidates[index]) if tokens is None else tokens

    def read(self, index: int, start: int) -> TokenSlice | None:
        """Return the tokens of a candidate from ``start`` on; ``None`` while none are certain. Never blocks."""
        if self._outputs.is_done(index):
            return self._outputs.tokens_from(index, start)
        running = self._running_at(index)
        generated = None if running is None else running.tokens_from(start)
        return generated if generated is None or generated.logprobs_requested else replace(generated, logprobs=None)

    def _running_at(self, index: int) -> RunningCandidate[Any] | None:
        return self._running.get(index) if self._group.candidates[index].running else None
