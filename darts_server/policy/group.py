"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rng=rng)
    act_on(group.open(Shortest(8), candidates=12))
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

A group whose size is not known yet may `add_candidate` candidates one by one before it is opened.

Every candidate that was started ends exactly once, selected or discarded with one reason. What is decided is never
taken back: a stopped candidate does not return and a delivered one stays in the group.
"""

from collections.abc import Iterator
from typing import Protocol

from darts_server.exceptions import GroupFailed, IllegalMove
from darts_server.policy.candidate import Candidate
from darts_server.policy.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Deliver,
    Event,
    Failed,
    Finished,
    GiveUp,
    Keep,
    Lost,
    Scored,
    Start,
    Started,
    Stop,
)
from darts_server.policy.selection.rules import SelectionRule, Verdict
from darts_server.types import DiscardReason, Outcome, SelectedAs


class Lots(Protocol):
    """A numpy ``Generator``, or what stands for one."""

    def random(self) -> float: ...


class Group:
    """One prompt's group.

    Args:
        rng: the group's own generator; it numbers the lots of the tail.
        spare: how many more candidates may be started, in all, to replace ones that failed; ``None`` means one for each
            seat: an engine that fails more often is not worth waiting for.
        early: decide ``Deliver`` as soon as a trajectory is known to belong, for callers that stream.
        chances: the generator of the lots of survival, apart from ``rng`` so that the tail's are the same without it;
            ``None`` prunes nobody, whatever is scored.
    """

    def __init__(
        self, *, rng: Lots, spare: int | None = None, early: bool = False, chances: Lots | None = None
    ) -> None:
        self.candidates: list[Candidate] = []
        self.outcome: Outcome | None = None
        self.deadline: int | None = None
        self.check_at: dict[int, int] = {}
        """Running candidate -> token count at which its progress should be reported. Nobody need look before."""
        self._rule: SelectionRule | None = None
        self._rng = rng
        self._chances = chances
        self._wanted_spare = spare
        self._spare = 0
        self._beyond_help = False
        self._early = early
        self._finish_count = 0
        self._most = 0
        self._scored: list[Scored] = []
        self._freed = 0  # places of pruned candidates that may be given to new ones
        self._granted = 0
        self._owed: int | None = None  # candidates to start once the group goes on; None while it does
        self.restarted_from = 0
        """Index of the first candidate since the group was started anew, or at all."""
        self._last_error: Exception | None = None
        self._delivered: set[int] = set()
        self._undecided = True  # something was heard that may change what is certain

    @property
    def rule(self) -> SelectionRule:
        """How the group is chosen; its ``size`` is the number of trajectories returned. Known once it is open."""
        if self._rule is None:
            raise IllegalMove("the group is not open yet")
        return self._rule

    @property
    def size(self) -> int:
        return self.rule.size

    @property
    def is_open(self) -> bool:
        return self._rule is not None

    @property
    def all_delivered(self) -> bool:
        """Whether all its trajectories were delivered, though it may still watch others."""
        return self.is_open and len(self._delivered) == self.size

    @property
    def completion_length(self) -> int | None:
        """Length of the M-th shortest valid candidate so far; ``None`` before so many have finished by themselves."""
        return self.nth_shortest(self.size)

    def nth_shortest(self, place: int) -> int | None:
        """Length of the valid candidate at that ``place``, from 1, among those that have finished so far."""
        lengths = sorted(c.tokens for c in self.candidates[self.restarted_from :] if c.valid)
        return lengths[place - 1] if len(lengths) >= place else None

    def add_candidate(self) -> list[Decision]:
        """Start one candidate of a group that is not open yet. Nothing is decided about it before that."""
        if self._rule is not None:
            raise IllegalMove("the group is open already")
        if self._owed is not None:
            self._owed += 1
            return []
        return [self._start(1)] if self.outcome is None else []

    def open(self, rule: SelectionRule, candidates: int, most: int = 0) -> list[Decision]:
        """Start what is missing of ``candidates``, at least ``rule.size``, and begin to decide.

        ``most``: while fewer candidates than that were started in all, a new one is for each that is pruned.
        """
        if candidates < rule.size:
            raise ValueError(f"candidates must be at least the group size {rule.size}, got {candidates}")
        if self._rule is not None:
            raise IllegalMove("the group is open already")
        if self.outcome is not None:
            return []
        self._rule = rule
        self._most = most
        self._granted = candidates
        self._spare = rule.size if self._wanted_spare is None else self._wanted_spare
        if self._owed is not None:
            self._owed = max(self._owed, candidates)
            return []
        missing = candidates - sum(c.alive for c in self.candidates)
        return [*([self._start(missing)] if missing > 0 else []), *self.handle()]

    def handle(self, *events: Event) -> list[Decision]:
        """Take events in, in their order, and say what to do about them.

        Raises:
            IllegalMove: an event that cannot happen; nothing is decided.
        """
        for event in events:
            self._hear(event)
        if self.outcome is not None or not self.candidates or self.is_paused:
            return []
        if self._rule is None:
            return list(self._give_up()) if self._beyond_help else []
        return [*self._prune(), *self._decide()]

    def cancel(self) -> list[Decision]:
        """The caller went away: stop everything."""
        return list(self._close(Outcome.CANCELLED)) if self.outcome is None else []

    def end_decided(self) -> list[Decision]:
        """The caller needs no more than what was delivered: stop the rest."""
        return list(self._close(Outcome.DECIDED, DiscardReason.DECIDED)) if self.outcome is None else []

    @property
    def is_paused(self) -> bool:
        """Whether it waits for `resume`."""
        return self._owed is not None

    @property
    def can_restart(self) -> bool:
        """Whether it may be started anew: nothing of it has gone out."""
        return self.outcome is None and not self._delivered and not self.is_paused

    def restart(self) -> list[Decision]:
        """Stop everything and decide nothing, until `resume` starts as many candidates anew.

        Raises:
            IllegalMove: it cannot be.
        """
        if not self.can_restart:
            raise IllegalMove("the group cannot be started anew")
        alive = [c for c in self.candidates if c.alive]
        stops: list[Decision] = [Stop(c.index, DiscardReason.RESTARTED) for c in alive if c.running]
        for candidate in alive:
            candidate.discard(DiscardReason.RESTARTED)
        self._owed = self._granted if self.is_open else len(alive)
        self._most += len(self.candidates) - self.restarted_from
        self.restarted_from = len(self.candidates)
        self._finish_count = self._freed = 0
        self._scored, self.check_at = [], {}
        return stops

    def resume(self) -> list[Decision]:
        """Start the candidates that are owed since `restart`, and decide again."""
        owed, self._owed = self._owed, None
        if self.outcome is not None or not owed:
            return []
        self._undecided = True
        return [self._start(owed), *self.handle()]

    # --- hearing ------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if not isinstance(event, Started | Scored):  # these make nobody certain or hopeless
            self._undecided = True
        if isinstance(event, DeadlineSet):
            # What was decided under one limit cannot be taken back under another.
            self.deadline = event.tokens if self.deadline is None else self.deadline
            return
        if not 0 <= event.index < len(self.candidates):
            raise IllegalMove(f"no candidate {event.index} was started: {event}")
        candidate = self.candidates[event.index]
        news = candidate.running  # or else it was stopped from here
        candidate.hear(event)
        match event:
            case Scored() if news:
                self._scored.append(event)
            case Finished() if news:
                self._finish_count += 1
                candidate.finish_position = self._finish_count
            case Failed(error=error, retryable=retryable):
                self._last_error = error
                if not retryable:
                    self._beyond_help = True
                    self._spare = 0
            case Lost(index=index) if news:
                self._last_error = GroupFailed(f"the engine aborted candidate {index}")

    # --- deciding -----------------------------------------------------------

    def _prune(self) -> Iterator[Decision]:
        """Draw for those that were scored, in that order. One that the group cannot spare is kept for sure."""
        scored, self._scored = self._scored, []
        for score in scored:
            candidate = self.candidates[score.index]
            if not candidate.running:
                continue
            survival = score.survival if self._can_spare_one() else 1.0
            if candidate.draw_for(survival):
                yield Keep(score.index, survival)
            else:
                candidate.discard(DiscardReason.PRUNED)
                self._freed += 1
                self._undecided = True
                yield Stop(score.index, DiscardReason.PRUNED)

    def _can_spare_one(self) -> bool:
        """Whether M are left without it. Truncated ones do not count: nothing is pruned to make room for these."""
        returnable = sum(c.running or c.valid for c in self.candidates if c.alive)
        return self._chances is not None and returnable > self.size

    def _decide(self) -> Iterator[Decision]:
        if not self._undecided:
            return
        self._undecided = False
        missing = self.size - sum(c.alive for c in self.candidates)
        if missing > self._spare:
            yield from self._give_up()
            return
        if missing > 0:  # from now on all that are left are needed, so what was delivered or cut stays in the group
            yield self._start(missing)
            self._spare -= missing
        verdict = self._assess()
        if refill := self._refill(verdict):
            yield refill
            verdict = self._assess()
        yield from self._stop_hopeless(verdict)
        if cuts := list(self._cut(verdict)):
            yield from cuts
            verdict = self._assess()
        if len(verdict.settled) >= self.size and not verdict.observing:
            yield from self._complete()
            return
        self.check_at = dict(verdict.check_at)
        if self._early:
            yield from self._deliver(verdict)

    def _assess(self) -> Verdict:
        running = [c for c in self.candidates if c.running]
        return self.rule.assess(running, self._finished(), self._early, self.deadline)

    def _finished(self) -> list[Candidate]:
        return [c for c in self.candidates if c.alive and not c.running]

    def _start(self, count: int) -> Start:
        first = len(self.candidates)
        self.candidates += [
            Candidate(index, tail_draw=float(self._rng.random()), survival_draw=self._lot())
            for index in range(first, first + count)
        ]
        return Start(tuple(range(first, first + count)))

    def _lot(self) -> float:
        return 0.0 if self._chances is None else float(self._chances.random())

    def _refill(self, verdict: Verdict) -> Start | None:
        """Give the places of pruned candidates to new ones, while that can take nothing back of what was decided."""
        count, self._freed = min(self._freed, self._most - len(self.candidates)), 0
        binding = self._delivered or any(c.cut for c in self.candidates) or len(verdict.settled) >= self.size
        return None if count <= 0 or binding else self._start(count)

    def _stop_hopeless(self, verdict: Verdict) -> Iterator[Decision]:
        for index, reason in verdict.hopeless.items():
            self.candidates[index].discard(reason)
            yield Stop(index, reason)

    def _cut(self, verdict: Verdict) -> Iterator[Cut]:
        """Cut what is to be cut, whether it still runs or ended beyond that before anyone looked."""
        for index, tokens in verdict.cuts.items():
            if index not in self._delivered:
                self.candidates[index].cut_at(tokens)
                yield Cut(index, tokens)

    def _deliver(self, verdict: Verdict) -> Iterator[Decision]:
        for index in sorted(verdict.settled - self._delivered):
            self._delivered.add(index)
            yield Deliver(index)

    # --- ending -------------------------------------------------------------

    def _complete(self) -> Iterator[Decision]:
        selection = self.rule.select(self._finished(), self.deadline)
        for candidate in self.candidates:
            if candidate.index in selection:
                candidate.select(selection[candidate.index])
            elif candidate.alive:
                candidate.discard(self.rule.discard_reason(candidate))
        self.outcome = Outcome.COMPLETED
        self.check_at = {}
        yield Complete(dict(sorted(selection.items())))

    def _give_up(self) -> Iterator[Decision]:
        error = self._last_error or GroupFailed("too few candidates could finish")
        yield from self._close(Outcome.FAILED)
        yield GiveUp(error)

    def _close(self, outcome: Outcome, reason: DiscardReason = DiscardReason.CANCELLED) -> Iterator[Decision]:
        """End without a group. What was delivered has gone out, and stays selected."""
        ends = self.rule.select(self._finished(), self.deadline) if self._delivered else {}
        for candidate in self.candidates:
            if candidate.running:
                yield Stop(candidate.index, reason)
            if candidate.index in self._delivered:
                candidate.select(ends.get(candidate.index, SelectedAs.SHORT))
            elif candidate.alive:
                candidate.discard(reason)
        self.outcome = outcome
        self.check_at = {}
