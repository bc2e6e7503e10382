from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from darts_server.engine.port import HiddenState, Probe, RunningCandidate
from darts_server.group.candidate import Candidate
from darts_server.group.events import Scored
from darts_server.policy.survival import Pruning
from darts_server.records import GroupKey
from darts_server.rollout.pruning.pruner import Pruner


class GroupScorer:
    """Scores each candidate of a group once at each detection point.

    Scores use the log-probs of exactly the tokens up to the detection point, so that equal tokens get equal scores.

    ``on_score``: called in the event loop with scores from hidden states, unless the candidate was dropped.
    """

    def __init__(
        self,
        pruner: Pruner,
        group: GroupKey,
        pruning: Pruning,
        running: Mapping[int, RunningCandidate[Any]],
        on_score: Callable[[Scored], None],
    ) -> None:
        self._pruner = pruner
        self._group = group
        self._pruning = pruning
        self._running = running
        self._on_score = on_score
        # Detection points of each candidate, with their hidden states if they are used.
        self._unscored_points: dict[int, list[tuple[int, HiddenState | None]]] = {}
        # Scores before `begin_reporting`.
        self._early_scores: dict[int, list[Scored]] = {}
        self._dropped: set[int] = set()

    def create_probe(self, index: int) -> Probe:
        """The probe's scores are kept until `begin_reporting`."""
        self._early_scores[index] = []
        points = self._pruner.detect_at if self._pruner.uses_hidden_states else ()
        return Probe(points, partial(self._receive_state, index), logprobs=self._pruner.uses_logprobs)

    def begin_reporting(self, index: int) -> list[Scored]:
        """Report all further scores of a started candidate, and return its scores so far."""
        if not self._pruner.uses_hidden_states:
            self._unscored_points[index] = [(tokens, None) for tokens in self._pruner.detect_at]
        # Hidden states may arrive before the engine has confirmed the start.
        return self._early_scores.pop(index, [])

    def poll(self) -> list[Scored]:
        scores = []
        for index in list(self._unscored_points):
            scores += self._score_reached_points(index)
        return scores

    def record_kept(self, index: int, survival: float) -> None:
        self._pruner.record_kept(self._group, index, survival)

    def drop(self, index: int) -> None:
        """Record that a candidate will not be returned. Harmless if it was dropped before."""
        if index not in self._dropped:
            self._dropped.add(index)
            self._unscored_points.pop(index, None)
            self._pruner.record_dropped(self._group, index)

    def drop_unselected(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate.selected_as is None:
                self.drop(candidate.index)

    def _receive_state(self, index: int, state: HiddenState) -> None:
        if index in self._dropped:
            return
        if self._pruner.uses_logprobs:
            # The state can arrive before the log-probs. Then `poll` scores it.
            self._unscored_points.setdefault(index, []).append((state.tokens, state))
            scores = self._score_reached_points(index)
        else:
            scores = [self._pruner.score(self._group, index, state, (), self._pruning)]
        if index in self._early_scores:
            self._early_scores[index] += scores
            return
        for scored in scores:
            self._on_score(scored)

    def _score_reached_points(self, index: int) -> list[Scored]:
        points = self._unscored_points[index]
        running = self._running.get(index)
        if running is None:
            has_started = index not in self._early_scores
            # A candidate that has started and does not run has ended, and its tokens are gone.
            if has_started:
                del self._unscored_points[index]
            return []
        # Tokens are counted before they are read, because reading copies them.
        next_point, _ = points[0]
        if (running.count_tokens() or 0) < next_point:
            return []
        generated = running.tokens_from(0)
        if generated is None:
            return []

        scores = []
        if generated.logprobs is None:
            # A candidate that has no log-probs now never has log-probs.
            points.clear()
        else:
            while points and points[0][0] <= len(generated.logprobs):
                tokens, state = points.pop(0)
                logprobs = tuple(generated.logprobs[:tokens])
                scores.append(self._pruner.score(self._group, index, state, logprobs, self._pruning))
        if not points:
            del self._unscored_points[index]
        return scores
