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
        self.prefixes: dict[int, TokenSlice] = {}
        """Of each pruned candidate for which `keep_prefix` was called: its tokens up to where it was pruned."""
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

    def keep_prefix(self, index: int) -> None:
        """Keep what a candidate that is being pruned has generated, up to the checkpoint at which that was decided."""
        # The decision comes in the turn of the loop in which its tokens were read, so the candidate still has them.
        generated = self._running[index].tokens_from(0)
        assert generated is not None
        end = self._group.candidates[index].checkpoints[-1].tokens
        has_logprobs = generated.logprobs is not None and generated.logprobs_requested
        logprobs = generated.logprobs[:end] if has_logprobs and generated.logprobs is not None else None
        self.prefixes[index] = TokenSlice(generated.token_ids[:end], logprobs)

    def _running_at(self, index: int) -> RunningCandidate[Any] | None:
        return self._running.get(index) if self._group.candidates[index].running else None
