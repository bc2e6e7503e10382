"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rng=rng)
    act_on(group.open(DualEnd(8), candidates=12))
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

The rule's `Selector` keeps the candidates in the order of their lengths. An event costs O(log n), and O(n) where a
sampled tail may be decided: some microseconds for a group of usual size.

A group that is assembled from single requests starts with `Group.add_candidate`, before its size is known.

Two invariants hold under every rule. Every started candidate ends exactly once: selected, or discarded with one reason.
And decisions are final: a stopped candidate never returns, a delivered one stays in the group. So a rule may only
decide what no future event can change.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import isfinite
from typing import Protocol

from darts_server.exceptions import GroupAborted, GroupFailed, IllegalMove
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
from darts_server.policy.pruning.survival import weight_factor
from darts_server.policy.selection import AllSurvivors, SelectionRule, Selector
from darts_server.types import GONE, DiscardReason, Outcome, SelectedAs


class UniformGenerator(Protocol):
    """A numpy ``Generator``, or a stand-in."""

    def random(self) -> float: ...


UNOPENED = AllSurvivors(0)
"""The rule of a group that is not open yet: it stops none."""
MAX_LOSSES = 3
"""How often a group may lose all that it returns with its engine."""


class Group:
    """One prompt's group.

    Args:
        rng: the group's own generator, for the random numbers that decide who gets a sampled tail.
        max_replacements: how many candidates may be started, in all, to replace ones that failed; ``None`` means as
            many as the group returns, as an engine that fails more often is not worth waiting for; and for those that
            are lost with their engine `MAX_LOSSES` times as many.
        deliver_early: deliver each trajectory as soon as it is certain to belong to the group, for callers that stream.
        survival_rng: generator for pruning, separate from ``rng`` so that pruning does not change which candidates get
            a sampled tail; ``None`` prunes nothing, whatever is scored.
    """

    def __init__(
        self,
        *,
        rng: UniformGenerator,
        max_replacements: int | None = None,
        deliver_early: bool = False,
        survival_rng: UniformGenerator | None = None,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.outcome: Outcome | None = None
        self.deadline: int | None = None
        """The cohort's deadline in tokens, once it is set."""
        self.bound: int | None = None
        """Length at which every candidate is cut, set with the deadline."""
        self.restarted_from = 0
        """Index of the first candidate since the last restart."""
        self.delivered: set[int] = set()
        """Candidates that were delivered before the group was complete."""
        self.is_open = False
        self.rule: SelectionRule = UNOPENED
        """The rule that selects the group, once it is open."""
        self.standings: Selector = UNOPENED.selector_type(UNOPENED, deliver_early)
        """Its candidates in the order of lengths, without discarded ones and those before a restart."""
        self._rng = rng
        self._survival_rng = survival_rng
        self._max_replacements = max_replacements
        self._replacements_left = 0
        self._losses_left = 0  # that do not count as replacements
        self._failed_for_good = False
        self._deliver_early = deliver_early
        self._max_candidates = 0
        self._has_cuts = False
        self._finished_late: list[int] = []  # cut at the bound; the decision is not returned yet
        self._pending_scores: list[Scored] = []
        self._free_places = 0  # of pruned candidates, for new ones
        self._allocated = 0
        self._owed: int | None = None  # candidates to start on `resume`; None while the group is not paused
        self._last_error: Exception | None = None
        self._needs_decision = True  # an event came that may change what is certain

    @property
    def check_at(self) -> dict[int, int]:
        """Running candidate -> token count at which its progress must be reported. Before that it changes nothing."""
        if self.outcome is not None:
            return {}
        if self.standings.checks is None:
            self.standings.checks = self.standings.check_at()
        return self.standings.checks

    def add_candidate(self) -> list[Decision]:
        """Start one candidate before the group is open. Nothing is decided about it until then."""
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self._owed is not None:
            self._owed += 1
            return []
        return [self._start(1)] if self.outcome is None else []

    def open(self, rule: SelectionRule, candidates: int, max_candidates: int = 0) -> list[Decision]:
        """Start the missing ones of ``candidates``, at least ``rule.size``, and begin to decide.

        ``max_candidates``: each pruned candidate is replaced by a new one until this many were started in all.
        """
        if candidates < rule.size:
            raise ValueError(f"candidates must be at least the group size {rule.size}, got {candidates}")
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self.outcome is not None:
            return []
        self.rule, self.is_open = rule, True
        self._max_candidates = max_candidates
        self._allocated = candidates
        self._replacements_left = rule.size if self._max_replacements is None else self._max_replacements
        self._losses_left = (MAX_LOSSES - 1) * rule.size if self._max_replacements is None else 0
        self._begin()  # by the rule, which no candidate was followed by so far
        if self._owed is not None:
            self._owed = max(self._owed, candidates)
            return []
        missing = candidates - len(self.standings.candidates)
        return [*([self._start(missing)] if missing > 0 else []), *self.handle()]

    def handle(self, *events: Event) -> list[Decision]:
        """Apply events in their order, and return what to do now.

        Raises:
            IllegalMove: an event that cannot happen; nothing is decided.
        """
        for event in events:
            may_decide = not isinstance(event, Started | Scored)  # these two cannot change what is certain
            self._needs_decision |= may_decide
            if isinstance(event, DeadlineSet):
                # Candidates may have been stopped or cut by the first deadline, so another one comes too late.
                if self.deadline is None:
                    self.deadline, self.bound = event.tokens, event.bound
                    self.standings.deadline, self.standings.bound = event.tokens, event.bound
                    self.standings.checks = None
                continue
            if not 0 <= event.index < len(self.candidates):
                raise IllegalMove(f"no candidate {event.index} was started: {event}")
            candidate = self.candidates[event.index]
            was_running = candidate.running  # otherwise the group has stopped it, and the event came too late
            candidate.apply(event)
            match event:
                case Scored() if was_running:
                    self._pending_scores.append(event)
                case Finished() if was_running and self.standings.has_deadline:
                    # One that finished beyond the bound is cut: it does not matter how often progress is reported.
                    if self.bound is not None and candidate.tokens > self.bound:
                        candidate.cut_at(self.bound)
                        self._finished_late.append(candidate.index)
                case Failed(error=error, retryable=retryable):
                    self._last_error = error
                    if not retryable:
                        self._failed_for_good = True
                        self._replacements_left = 0
                case Lost(index=index, by_caller=by_caller) if was_running:
                    if self._losses_left and not by_caller:
                        self._losses_left -= 1
                        self._replacements_left += 1
                    who = "caller" if by_caller else "engine"
                    self._last_error = GroupAborted(f"the {who} aborted candidate {index}, and too few others are left")
            if was_running and may_decide:
                self.standings.update(candidate)

        if self.outcome is not None or not self.candidates or self._owed is not None:
            return []
        if not self.is_open:
            return list(self._give_up()) if self._failed_for_good else []
        decisions = list(self._prune()) if self._pending_scores else []
        return [*decisions, *self._decide()] if self._needs_decision else decisions

    def cancel(self, reason: DiscardReason = DiscardReason.CANCELLED) -> list[Decision]:
        """Stop everything, as the caller has disconnected, or for another ``reason``."""
        return list(self._close(Outcome.CANCELLED, reason)) if self.outcome is None else []

    def carry(self) -> list[Decision]:
        """Stop everything: another group goes on with what the candidates have generated."""
        if self.outcome is not None:
            return []
        decisions = list(self._close(Outcome.CANCELLED, DiscardReason.CARRIED))
        for candidate in self.candidates[self.restarted_from :]:
            if candidate.reason is not None and candidate.reason not in GONE:
                candidate.reason = DiscardReason.CARRIED
        return decisions

    def end_decided(self) -> list[Decision]:
        """Stop the rest: the caller's vote is decided by what was delivered."""
        return list(self._close(Outcome.DECIDED, DiscardReason.DECIDED)) if self.outcome is None else []

    @property
    def is_paused(self) -> bool:
        """Whether it waits for `resume` after a `restart`."""
        return self._owed is not None

    @property
    def can_restart(self) -> bool:
        """Whether it may be restarted: it is not finished, and nothing was delivered."""
        return self.outcome is None and not self.delivered and not self.is_paused

    def restart(self) -> list[Decision]:
        """Stop all candidates and pause, until `resume` starts as many new ones.

        Raises:
            IllegalMove: the group cannot be restarted.
        """
        if not self.can_restart:
            raise IllegalMove("the group cannot be restarted")
        alive = [c for c in self.candidates if c.alive]
        stops: list[Decision] = [Stop(c.index, DiscardReason.RESTARTED) for c in alive if c.running]
        for candidate in alive:
            candidate.discard(DiscardReason.RESTARTED)
        self._owed = self._allocated if self.is_open else len(alive)
        self._max_candidates += len(self.candidates) - self.restarted_from
        self.restarted_from = len(self.candidates)
        self._begin()
        self._free_places = 0
        self._pending_scores, self._finished_late = [], []
        return stops

    def resume(self) -> list[Decision]:
        """Start the candidates that are owed since `restart`, and decide again."""
        owed, self._owed = self._owed, None
        if self.outcome is not None or not owed:
            return []
        self._needs_decision = True
        return [self._start(owed), *self.handle()]

    def _begin(self) -> None:
        """Follow the candidates that are alive, under the rule if there is one."""
        self.standings = self.rule.selector_type(self.rule, self._deliver_early)
        self.standings.delivered = self.delivered
        self.standings.deadline, self.standings.bound = self.deadline, self.bound
        for candidate in self.candidates[self.restarted_from :]:
            self.standings.update(candidate)

    # --- decisions ----------------------------------------------------------

    def _prune(self) -> Iterator[Decision]:
        """Keep or prune each scored candidate, in the order of the scores.

        A candidate that the group needs is kept with probability 1, and this is the probability that is recorded: given
        all earlier decisions it is the true one, so inverse propensity weights stay unbiased.
        """
        scores, self._pending_scores = self._pending_scores, []
        for score in scores:
            candidate, standings = self.candidates[score.index], self.standings
            if not candidate.running:
                continue
            # Truncated ones do not count as left: a valid one is worth more than any of them.
            left = len(standings.running) + len(standings.valid)
            can_prune = self._survival_rng is not None and left > self.rule.fewest
            survival = score.survival if can_prune else 1.0
            # One random number serves all scores of a candidate: given that it is below the product so far, it is
            # uniform below that, so it falls below the product with this survival with exactly this probability.
            candidate.survival *= survival
            if candidate.survival_draw < candidate.survival:
                yield Keep(score.index, survival)
            else:
                self._free_places += 1
                self._needs_decision = True
                yield self._stop(score.index, DiscardReason.PRUNED)

    def _decide(self) -> Iterator[Decision]:
        self._needs_decision = False
        selector = self.standings
        missing = self.rule.fewest - len(selector.candidates)
        if missing > self._replacements_left:
            yield from self._give_up()
            return
        if missing > 0:  # all remaining candidates are in the group now, so delivered and cut ones stay in it
            yield self._start(missing)
            self._replacements_left -= missing

        # One that is cut at the bound counts as truncated from then on, and may turn out not to be selected. This may
        # decide the group: so it comes before what is stopped.
        if self.bound is not None and selector.has_deadline:
            # Keys of running ones are one token more than each has.
            reached = selector.running[bisect_left(selector.running, (self.bound + 1, -1)) :]
            late, self._finished_late = self._finished_late, []
            for index in sorted([*late, *(index for _, index in reached)]):
                yield self._cut(index, self.bound)

        # Pruned candidates are replaced while new ones cannot contradict an earlier decision.
        stops = selector.stops()
        refill, self._free_places = min(self._free_places, self._max_candidates - len(self.candidates)), 0
        is_bound = self.delivered or self._has_cuts or len(stops) == len(selector.running)
        if refill > 0 and not is_bound:
            yield self._start(refill)
            stops = selector.stops()
        for index in sorted(stops):
            yield self._stop(index, stops[index])

        # At the group's deadline those are cut too that finished beyond it before it was known.
        for index, tokens in sorted(selector.cuts().items()):
            if index not in self.delivered:
                yield self._cut(index, tokens)

        if not selector.running:
            selection = selector.select()
            for candidate in self.candidates:
                if candidate.index in selection:
                    candidate.select(selection[candidate.index])
                elif candidate.alive:
                    candidate.discard(self.rule.discard_reason(candidate))
            self.outcome = Outcome.COMPLETED
            yield Complete(dict(sorted(selection.items())))
        elif self._deliver_early:
            for index in sorted(selector.deliveries()):
                if index not in self.delivered:
                    self.delivered.add(index)
                    yield Deliver(index)

    def _start(self, count: int) -> Start:
        # All random numbers of a candidate are drawn before it runs: results then depend on seeds and lengths alone,
        # not on timing.
        indices = range(len(self.candidates), len(self.candidates) + count)
        for index in indices:
            survival_draw = 0.0 if self._survival_rng is None else float(self._survival_rng.random())
            self.candidates.append(Candidate(index, tail_draw=float(self._rng.random()), survival_draw=survival_draw))
            self.standings.update(self.candidates[index])
        return Start(tuple(indices))

    def _stop(self, index: int, reason: DiscardReason) -> Stop:
        self.candidates[index].discard(reason)
        self.standings.update(self.candidates[index])
        return Stop(index, reason)

    def _cut(self, index: int, tokens: int) -> Cut:
        self.candidates[index].cut_at(tokens)
        self.standings.update(self.candidates[index])
        self._has_cuts = True
        return Cut(index, tokens)

    # --- outcomes -----------------------------------------------------------

    def _give_up(self) -> Iterator[Decision]:
        yield from self._close(Outcome.FAILED)
        yield GiveUp(self._last_error or GroupFailed("too few candidates could finish"))

    def _close(self, outcome: Outcome, reason: DiscardReason = DiscardReason.CANCELLED) -> Iterator[Decision]:
        """End without a complete group. Trajectories that were delivered stay selected: the caller has them."""
        selection = self.standings.select() if self.delivered else {}
        for candidate in self.candidates:
            if candidate.running:
                yield Stop(candidate.index, reason)
            if candidate.index in self.delivered:
                candidate.select(selection.get(candidate.index, SelectedAs.SHORT))
            elif candidate.alive:
                candidate.discard(reason)
        self.outcome = outcome


# --- what the selected candidates stand for: inverse propensity weights -------


def selection_weights(group: Group) -> dict[int, float]:
    """Return each selected candidate's weight, 1 / (its probability to be selected), by index.

    `GONE` candidates and those before a restart do not count; failures after a score are corrected for.
    Empty if the group is not complete, if its rule never selects some candidates, or if so many failed after
    scores that they exceed the range of floats.
    """
    if group.outcome is not Outcome.COMPLETED:
        return {}
    counted, failed = [], []
    for c in group.candidates[group.restarted_from :]:
        if c.reason in GONE:
            failed.append(c.survival)
        else:
            counted.append(c)
    weights = group.rule.weights(counted) or {}
    if min(failed, default=1.0) == 1:
        return weights
    factor = weight_factor(failed, len(counted) + len(failed))
    weights = {index: weight * factor for index, weight in weights.items()}
    return weights if all(map(isfinite, weights.values())) else {}


def sampled_from(group: Group) -> int | None:
    """Return of how many candidates the complete group is a plain sample; ``None`` if it is selected otherwise."""
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_survivors:
        return None
    return sum(c.reason not in (*GONE, DiscardReason.PRUNED) for c in group.candidates[group.restarted_from :])


def tail_share(group: Group) -> float:
    """Return which share of those that were not pruned, and are not among the shortest, a complete group has sampled.

    1 if its rule samples none. It is only nearly the probability to be selected, as who can be pruned depends on who
    was stopped, and so on the sample: good enough for labels, not for `selection_weights`.
    """
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_rest:
        return 1.0
    left = sampled = 0
    for c in group.candidates[group.restarted_from :]:
        if c.reason not in (*GONE, DiscardReason.PRUNED) and c.selected_as is not SelectedAs.SHORT:
            left += 1
            sampled += c.selected_as is not None
    return sampled / left if sampled else 1.0
