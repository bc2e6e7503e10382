"""Scores the candidates of one group while they run: between the engine, the scorer, and the group."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from darts_server.engine.port import HiddenState, Probe, RunningCandidate
from darts_server.policy.candidate import Candidate
from darts_server.policy.events import Scored
from darts_server.policy.pruning.survival import Pruning
from darts_server.records import GroupKey


class CandidateScorer(Protocol):
    """Scores trajectories, identified by their group and candidate index, and learns from their rewards.

    All methods are called in the event loop, return fast and never raise.

    ``detect_at``: numbers of generated tokens, ascending, at which trajectories are scored; the latest score counts.
    ``uses_hidden_states``, ``uses_logprobs``: what scores are made from; both may be true.
    """

    @property
    def detect_at(self) -> tuple[int, ...]: ...

    @property
    def uses_hidden_states(self) -> bool: ...

    @property
    def uses_logprobs(self) -> bool: ...

    def score(
        self, group: GroupKey, index: int, probed: HiddenState | None, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Scored:
        """Score a trajectory by its hidden state and, if it uses both, by the log-probs of its tokens so far.

        Without a hidden state, by these log-probs alone, in nats.
        """
        ...

    def record_kept(self, group: GroupKey, index: int, survival: float) -> None:
        """Record that a trajectory was kept, and with which probability it was kept so far, over all decisions."""
        ...

    def record_dropped(self, group: GroupKey, index: int) -> None:
        """Record that a trajectory will not be returned, so that no reward will come for it."""
        ...


class GroupScorer:
    """Scores each candidate of a group once at each detection point.

    Log-probs, alone or together with hidden states, are always those of exactly the tokens up to the detection point,
    however many more a candidate has by then: equal tokens get equal scores.

    ``running``: the running candidates by index. ``on_score``: called in the event loop with scores from hidden states,
    also of candidates that have ended since, but not of dropped ones.
    """

    def __init__(
        self,
        scorer: CandidateScorer,
        group: GroupKey,
        pruning: Pruning,
        running: Mapping[int, RunningCandidate[Any]],
        on_score: Callable[[Scored], None],
    ) -> None:
        self._scorer = scorer
        self._group = group
        self._pruning = pruning
        self._running = running
        self._on_score = on_score
        self._detect_at = scorer.detect_at
        self._uses_hidden_states = scorer.uses_hidden_states
        self._uses_logprobs = scorer.uses_logprobs
        self._waiting: dict[int, list[HiddenState]] = {}  # hidden states whose log-probs have not arrived yet
        self._early: dict[int, list[Scored]] = {}  # scores of candidates before `mark_started`
        self._passed: dict[int, int] = {}  # detection points at which a candidate was scored by log-probs
        self._dropped: set[int] = set()

    def probe_for(self, index: int) -> Probe:
        """Create the probe to start a candidate with."""
        self._early[index] = []
        points = self._detect_at if self._uses_hidden_states else ()
        return Probe(points, partial(self._receive_state, index), logprobs=self._uses_logprobs)

    def mark_started(self, index: int) -> list[Scored]:
        """Mark a candidate as started; return its scores that came before: the engine may be faster than its answer."""
        return self._early.pop(index, [])

    def poll(self) -> list[Scored]:
        """Score all running candidates for which new log-probs make that possible."""
        if self._uses_hidden_states:
            return [scored for index in list(self._waiting) for scored in self._score_waiting(index)]
        scores = []
        for index, candidate in self._running.items():
            passed = self._passed.get(index, 0)
            if index in self._dropped or passed == len(self._detect_at):
                continue
            tokens = candidate.tokens()
            if tokens is None or tokens < self._detect_at[passed]:
                continue
            if (generated := candidate.tokens_from(0)) is None:
                continue
            if generated.logprobs is None:
                self._passed[index] = len(self._detect_at)  # this candidate will never have any
                continue
            for detect_at in self._detect_at[passed:]:
                if len(generated.logprobs) < detect_at:
                    break
                self._passed[index] = passed = passed + 1
                logprobs = tuple(generated.logprobs[:detect_at])
                scores.append(self._scorer.score(self._group, index, None, logprobs, self._pruning))
        return scores

    def record_kept(self, index: int, survival: float) -> None:
        """Record that the group kept a candidate, and with which probability it was kept so far."""
        self._scorer.record_kept(self._group, index, survival)

    def drop(self, index: int) -> None:
        """Record, once per candidate, that it will not be returned."""
        if index not in self._dropped:
            self._dropped.add(index)
            self._scorer.record_dropped(self._group, index)

    def close(self, candidates: Iterable[Candidate]) -> None:
        """Drop the candidates of the ended group that were not selected: no reward will come for them."""
        for candidate in candidates:
            if candidate.selected_as is None:
                self.drop(candidate.index)

    def _receive_state(self, index: int, probed: HiddenState) -> None:
        if index in self._dropped:
            return
        if self._uses_logprobs:
            self._waiting.setdefault(index, []).append(probed)
            scores = list(self._score_waiting(index))
        else:
            scores = [self._scorer.score(self._group, index, probed, (), self._pruning)]
        for scored in scores:
            if (early := self._early.get(index)) is None:
                self._on_score(scored)
            else:
                early.append(scored)

    def _score_waiting(self, index: int) -> Iterator[Scored]:
        """Score the hidden states of a candidate whose tokens are there.

        A state can arrive before the engine reports its tokens, and then waits for them. A candidate that has ended has
        none any more, so its states are dropped.
        """
        states, running = self._waiting.pop(index), self._running.get(index)
        if running is None and index in self._early:
            self._waiting[index] = states
            return
        generated = None if index in self._dropped or running is None else running.tokens_from(0)
        if generated is None or generated.logprobs is None:
            return
        for probed in states:
            if probed.tokens > len(generated.token_ids):
                self._waiting.setdefault(index, []).append(probed)
                continue
            so_far = tuple(generated.logprobs[: probed.tokens])
            yield self._scorer.score(self._group, index, probed, so_far, self._pruning)
