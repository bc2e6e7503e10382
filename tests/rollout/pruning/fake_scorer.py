"""A scorer whose scores are set by the test, and which records its calls."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from darts_server.engine.port import NO_TOKENS, HiddenState, Probe, TokenSlice
from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine
from darts_server.group.events import Scored
from darts_server.policy.survival import Pruning
from darts_server.records import GroupKey
from darts_server.rollout.pruning.pruner import Pruner


class FakeScorer(Pruner):
    """A hidden state is quality and survival; by log-probs alone quality is a half and survival ``survival``."""

    uses_hidden_states = True
    uses_logprobs = False

    def __init__(
        self, *detect_at: int, uses_hidden_states: bool = True, uses_logprobs: bool = False, survival: float = 0.0
    ) -> None:
        self.detect_at = detect_at or (4,)
        self.uses_hidden_states = uses_hidden_states
        self.uses_logprobs = uses_logprobs
        self.survival = survival
        self.scored_states: list[tuple[int, int]] = []
        """Candidates and their numbers of tokens."""
        self.scored_logprobs: list[tuple[int, int]] = []
        """The same."""
        self.kept: list[tuple[int, float]] = []
        self.dropped: list[int] = []

    def score(
        self, group: GroupKey, index: int, state: HiddenState | None, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Scored:
        tokens = len(logprobs) if state is None else state.tokens
        assert logprobs == (tuple(-token / 8 for token in range(tokens)) if self.uses_logprobs else ())
        if state is None:
            self.scored_logprobs.append((index, tokens))
            return Scored(index, 0.5, self.survival)
        self.scored_states.append((index, tokens))
        return Scored(index, *map(float, state.vector))

    def record_kept(self, group: GroupKey, index: int, survival: float) -> None:
        self.kept.append((index, survival))

    def record_dropped(self, group: GroupKey, index: int) -> None:
        self.dropped.append(index)


def create_script(
    lengths: Sequence[int], scores: Mapping[int, tuple[float, float]], lag: int = 0
) -> Callable[[str, int], Script]:
    """Script candidates of these lengths, later ones of the last; their hidden states are quality and survival."""

    def script(_: str, index: int) -> Script:
        score = scores.get(index, (0.5, 1.0))
        return Script(lengths[min(index, len(lengths) - 1)], hidden=lambda _: score, lag=lag)

    return script


class EarlyStateEngine(ScriptedEngine):
    """Sends a hidden state before its ``start`` returns."""

    async def start(
        self,
        request: str,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> ScriptedCandidate:
        candidate = await super().start(request, index, probe, order, prefix)
        if probe is not None and candidate.script.hidden is not None:
            probe.on_state(HiddenState(4, np.asarray(candidate.script.hidden(4), dtype=np.float32)))
        return candidate
