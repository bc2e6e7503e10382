"""How one group's candidates are scored while they run: what is asked of the engine, and what of the scorer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from darts_server.engine.port import Generated, Probe, Probed, Running
from darts_server.policy.candidate import Candidate
from darts_server.policy.events import Scored
from darts_server.policy.pruning.survival import Pruning
from darts_server.rollout.pruning.scorer import Assessment, CandidateScorer


class GroupScorer:
    """Has the scorer score each candidate of a group at its detection points, once at each.

    By log-probs, alone or beside hidden states, these are of exactly the first so many tokens, however late they are
    looked at: the same tokens have the same score.

    ``running``: the running candidates by index. ``on_score``: called with scores from hidden states, in the
    event loop; also of candidates that have ended since, but never of those that were dropped.
    """

    def __init__(
        self,
        scorer: CandidateScorer,
        group_id: str,
        pruning: Pruning,
        running: Mapping[int, Running[Any]],
        on_score: Callable[[Scored], None],
    ) -> None:
        self._scorer = scorer
        self._group_id = group_id
        self._pruning = pruning
        self._running = running
        self._on_score = on_score
        self._detect_at = scorer.detect_at
        self._uses_hidden_states = scorer.uses_hidden_states
        self._uses_logprobs = scorer.uses_logprobs
        self._waiting: dict[int, list[Probed]] = {}  # hidden states whose log-probs are to be looked up
        self._started: set[int] = set()
        self._early: dict[int, list[Scored]] = {}  # of candidates that nobody has said to have started yet
        self._passed: dict[int, int] = {}  # detection points at which a candidate's log-probs were looked at
        self._dropped: set[int] = set()

    def probe_for(self, index: int) -> Probe:
        """What the engine is to tell of a candidate."""
        points = self._detect_at if self._uses_hidden_states else ()
        return Probe(points, partial(self._told, index), logprobs=self._uses_logprobs)

    def mark_started(self, index: int) -> list[Scored]:
        """The engine says that a candidate has started; its scores that came before that."""
        self._started.add(index)
        return self._early.pop(index, [])

    def poll(self) -> list[Scored]:
        """The scores that need log-probs and are due, of all candidates that run."""
        if self._uses_hidden_states:
            return [scored for index in list(self._waiting) for scored in self._by_both(index)]
        return [
            scored
            for index, candidate in self._running.items()
            if index not in self._dropped and self._due(index, candidate.tokens())
            for scored in self._by_tokens(index, candidate.generated(0))
        ]

    def record_kept(self, index: int, survival: float) -> None:
        """A candidate was kept, with that probability."""
        self._scorer.record_kept(self._group_id, index, survival)

    def drop(self, index: int) -> None:
        """A candidate will not be returned. Said to the scorer once, however often it is said here."""
        if index not in self._dropped:
            self._dropped.add(index)
            self._scorer.record_dropped(self._group_id, index)

    def close(self, candidates: Iterable[Candidate]) -> None:
        """The group has ended: nobody will reward those that were not selected."""
        for candidate in candidates:
            if candidate.selected_as is None:
                self.drop(candidate.index)

    def _told(self, index: int, probed: Probed) -> None:
        if index in self._dropped:
            return
        if self._uses_logprobs:
            self._waiting.setdefault(index, []).append(probed)
            scores = list(self._by_both(index))
        else:
            scores = [_scored(index, self._scorer.score_state(self._group_id, index, probed, (), self._pruning))]
        for scored in scores:
            if index in self._started:
                self._on_score(scored)
            else:
                self._early.setdefault(index, []).append(scored)

    def _by_both(self, index: int) -> Iterator[Scored]:
        """A state may be here before the engine told its tokens, and waits for these. One that has ended has none."""
        states, running = self._waiting.pop(index), self._running.get(index)
        if running is None and index not in self._started:
            self._waiting[index] = states
            return
        generated = None if index in self._dropped or running is None else running.generated(0)
        logprobs = None if generated is None else generated.logprobs
        if logprobs is None:
            return
        for probed in states:
            if probed.tokens > len(logprobs):
                self._waiting.setdefault(index, []).append(probed)
                continue
            so_far = tuple(logprobs[: probed.tokens])
            yield _scored(index, self._scorer.score_state(self._group_id, index, probed, so_far, self._pruning))

    def _due(self, index: int, tokens: int | None) -> bool:
        passed = self._passed.get(index, 0)
        return passed < len(self._detect_at) and tokens is not None and tokens >= self._detect_at[passed]

    def _by_tokens(self, index: int, generated: Generated | None) -> Iterator[Scored]:
        if generated is None:
            return
        if generated.logprobs is None:
            self._passed[index] = len(self._detect_at)  # nor will they ever be at hand
            return
        while self._due(index, len(generated.logprobs)):
            passed = self._passed.get(index, 0)
            self._passed[index] = passed + 1
            logprobs = tuple(generated.logprobs[: self._detect_at[passed]])
            yield _scored(index, self._scorer.score_logprobs(self._group_id, index, logprobs, self._pruning))


def _scored(index: int, assessment: Assessment) -> Scored:
    return Scored(index, assessment.quality, assessment.survival)
