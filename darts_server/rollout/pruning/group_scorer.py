"""Scores the candidates of one group while they run: between the engine, the scorer, and the group."""

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

    Log-probs, alone or together with hidden states, are always those of exactly the tokens up to the detection point,
    however many more a candidate has by then: equal tokens get equal scores.

    ``running``: the running candidates by index. ``on_score``: called in the event loop with scores from hidden states,
    also of candidates that have ended since, but not of dropped ones.
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
        self._uses_hidden_states = pruner.uses_hidden_states
        self._uses_logprobs = pruner.uses_logprobs
        # Numbers of tokens whose log-probs have not arrived yet, with the hidden states, if they are used.
        self._waiting: dict[int, list[tuple[int, HiddenState | None]]] = {}
        self._early: dict[int, list[Scored]] = {}  # scores of candidates before `mark_started`
        self._dropped: set[int] = set()

    def probe_for(self, index: int) -> Probe:
        """Create the probe to start a candidate with."""
        self._early[index] = []
        points = self._pruner.detect_at if self._uses_hidden_states else ()
        return Probe(points, partial(self._receive_state, index), logprobs=self._uses_logprobs)

    def mark_started(self, index: int) -> list[Scored]:
        """Mark a candidate as started; return its scores that came before: the engine may be faster than its answer."""
        if not self._uses_hidden_states:
            self._waiting[index] = [(tokens, None) for tokens in self._pruner.detect_at]
        return self._early.pop(index, [])

    def poll(self) -> list[Scored]:
        """Score all running candidates for which new log-probs make that possible."""
        return [scored for index in list(self._waiting) for scored in self._score_waiting(index)]

    def record_kept(self, index: int, survival: float) -> None:
        """Record that the group kept a candidate, and with which probability it was kept so far."""
        self._pruner.record_kept(self._group, index, survival)

    def drop(self, index: int) -> None:
        """Record, once per candidate, that it will not be returned."""
        if index not in self._dropped:
            self._dropped.add(index)
            self._waiting.pop(index, None)
            self._pruner.record_dropped(self._group, index)

    def close(self, candidates: Iterable[Candidate]) -> None:
        """Drop the candidates of the ended group that were not selected: no reward will come for them."""
        for candidate in candidates:
            if candidate.selected_as is None:
                self.drop(candidate.index)

    def _receive_state(self, index: int, probed: HiddenState) -> None:
        if index in self._dropped:
            return
        if self._uses_logprobs:
            self._waiting.setdefault(index, []).append((probed.tokens, probed))
            scores = self._score_waiting(index)
        else:
            scores = [self._pruner.score(self._group, index, probed, (), self._pruning)]
        for scored in scores:
            if (early := self._early.get(index)) is None:
                self._on_score(scored)
            else:
                early.append(scored)

    def _score_waiting(self, index: int) -> list[Scored]:
        """Score a candidate at the points whose tokens are there: a state can arrive before the engine reports them."""
        waiting, running = self._waiting[index], self._running.get(index)
        if running is None:
            if index not in self._early:  # it has ended, and its tokens are no longer here
                del self._waiting[index]
            return []
        if (running.tokens() or 0) < waiting[0][0] or (generated := running.tokens_from(0)) is None:
            return []
        if generated.logprobs is None:  # it will never have any
            del self._waiting[index]
            return []
        scores = []
        while waiting and waiting[0][0] <= len(generated.logprobs):
            tokens, probed = waiting.pop(0)
            so_far = tuple(generated.logprobs[:tokens])
            scores.append(self._pruner.score(self._group, index, probed, so_far, self._pruning))
        if not waiting:
            del self._waiting[index]
        return scores
