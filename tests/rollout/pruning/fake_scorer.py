"""A judge that says what hidden states and log-probs tell it to, and remembers what it was asked and told."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from darts_server.engine.port import Probe, Probed
from darts_server.engine.scripted import Script, ScriptedCandidate, ScriptedEngine
from darts_server.policy.pruning.survival import Pruning
from darts_server.rollout.pruning.scorer import Assessment


class Oracle:
    """A hidden state is quality and survival; by log-probs they are ``quality`` and ``survival`` of the last token."""

    def __init__(
        self, *detect_at: int, uses_hidden_states: bool = True, uses_logprobs: bool = False, survival: float = 0.0
    ) -> None:
        self.detect_at = detect_at or (4,)
        self.uses_hidden_states = uses_hidden_states
        self.uses_logprobs = uses_logprobs
        self.survival = survival
        self.states: list[tuple[int, int]] = []
        """Candidate and its tokens, as it was scored by hidden states."""
        self.logprobs: list[tuple[int, int]] = []
        """The same by log-probs."""
        self.draws: list[tuple[int, float]] = []
        self.drops: list[int] = []

    def score_state(
        self, group_id: str, index: int, probed: Probed, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Assessment:
        self.states.append((index, probed.tokens))
        assert logprobs == (tuple(-token / 8 for token in range(probed.tokens)) if self.uses_logprobs else ())
        return Assessment(*map(float, probed.state))

    def score_logprobs(self, group_id: str, index: int, logprobs: tuple[float, ...], pruning: Pruning) -> Assessment:
        self.logprobs.append((index, len(logprobs)))
        assert logprobs == tuple(-token / 8 for token in range(len(logprobs)))
        return Assessment(0.5, self.survival)

    def record_kept(self, group_id: str, index: int, survival: float) -> None:
        self.draws.append((index, survival))

    def record_dropped(self, group_id: str, index: int) -> None:
        self.drops.append(index)


def states(
    lengths: Sequence[int], scores: Mapping[int, tuple[float, float]], lag: int = 0
) -> Callable[[str, int], Script]:
    """Candidate i has the i-th length, later ones the last; its hidden state is its quality and survival throughout."""

    def script(_: str, index: int) -> Script:
        score = scores.get(index, (0.5, 1.0))
        return Script(lengths[min(index, len(lengths) - 1)], hidden=lambda _: score, lag=lag)

    return script


class Hasty(ScriptedEngine):
    """It tells a state before it says that the candidate has started."""

    async def start(self, request: str, index: int, probe: Probe | None = None) -> ScriptedCandidate:
        candidate = await super().start(request, index, probe)
        if probe is not None and candidate.script.hidden is not None:
            probe.tell(Probed(4, np.asarray(candidate.script.hidden(4), dtype=np.float32)))
        return candidate
