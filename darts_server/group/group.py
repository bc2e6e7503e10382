"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rng=rng)
    act_on(group.open(DualEnd(8), candidates=12))
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

The rule's `Selector` keeps the candidates in the order of their lengths. An event costs O(log n), or O(n) where it may
decide a sampled tail: some microseconds for a group of usual size.

A group that is assembled from single requests starts with `Group.add_candidate`, before its size is known.

Two invariants hold under every rule. First, every started candidate ends exactly once: selected, or discarded with one
reason. Second, decisions are final: a stopped candidate never returns, and a delivered candidate stays in the group. So
a rule may only decide what no future event can change.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import isfinite
from typing import Protocol

from darts_server.exceptions import GroupAborted, GroupFailed, IllegalMove
from darts_server.group.candidate import Candidate
from darts_server.group.events import (
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
from darts_server.group.failure_weights import weight_factor
from darts_server.group.selection import AllSurvivors, SelectionRule, Selector
from darts_server.types import GONE, DiscardReason, Outcome, SelectedAs


class UniformGenerator(Protocol):
    """A numpy ``Generator``, or a stand-in for one."""

    def random(self) -> float: ...


UNOPENED = AllSurvivors(0)
"""Rule of a group that is not open yet. It stops no candidate."""

MAX_LOSSES = 3
"""Number of times that a group may lose as many candidates as it returns, because their engine died."""


class Group:
    """One prompt's group.

    Args:
        rng: generator of the random numbers that decide which candidates win the places of a sampled tail. Each group
            has its own.
        max_replacements: number of candidates that may be started to replace failed candidates. None means the group
            size, because an engine that fails more often is not worth waiting for, and `MAX_LOSSES` times the group
            size for candidates that were lost with their engine.
        deliver_early: whether to deliver each trajectory as soon as it is certain to be in the group, for callers that
            stream.
        survival_rng: generator of the random numbers for pruning, or None to prune nothing. It is separate from
            ``rng``, so that pruning does not change which candidates win the tail.
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
        """The cohort's deadline in tokens, or None before it is set."""
        self.bound: int | None = None
        """Length in tokens at which every candidate is cut. It is set with the deadline."""
        self.restarted_from = 0
        """Index of the first candidate that was started after the latest restart."""
        self.delivered: set[int] = set()
        """Indices of candidates that were delivered before the group was complete."""
        self.is_open = False
        self.rule: SelectionRule = UNOPENED
        """The rule that selects the group, once the group is open."""
        self.standings: Selector = UNOPENED.selector_type(UNOPENED, deliver_early)
        """The candidates of ``rule`` in the order of their lengths, without discarded candidates."""

        self._rng = rng
        self._survival_rng = survival_rng
        self._deliver_early = deliver_early
        self._max_replacements = max_replacements
        self._replacements_left = 0
        # Losses with an engine that do not use up replacements.
        self._losses_left = 0
        self._failed_for_good = False
        self._last_error: Exception | None = None
        self._allocated = 0
        # Number of candidates that `resume` starts; None while the group is not paused.
        self._owed: int | None = None

        # Candidates that were cut at the bound, for which no `Cut` was returned yet.
        self._finished_late: list[int] = []
        self._pending_scores: list[Scored] = []
        # Whether an event arrived that may change what is certain.
        self._needs_decision = True

    @property
    def check_at(self) -> dict[int, int]:
        """Token count of each running candidate at which its progress must be reported.

        Progress below that count changes nothing.
        """
        if self.outcome is not None:
            return {}
        if self.standings.checks is None:
            self.standings.checks = self.standings.check_at()
        return self.standings.checks

    def add_candidate(self) -> list[Decision]:
        """Start one candidate before the group is open. Nothing is decided about it until the group opens."""
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self._owed is not None:
            self._owed += 1
            return []
        if self.outcome is not None:
            return []
        return [self._start(1)]

    def open(self, rule: SelectionRule, candidates: int) -> list[Decision]:
        """Start the missing candidates, so that there are ``candidates`` in all, and begin to decide.

        ``candidates``: at least ``rule.size``.
        """
        if candidates < rule.size:
            raise ValueError(f"candidates must be at least the group size {rule.size}, got {candidates}")
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self.outcome is not None:
            return []

        self.is_open = True
        self.rule = rule
        self._allocated = candidates
        if self._max_replacements is None:
            self._replacements_left = rule.size
            self._losses_left = (MAX_LOSSES - 1) * rule.size
        else:
            self._replacements_left = self._max_replacements
        self._follow_candidates()

        if self._owed is not None:
            self._owed = max(self._owed, candidates)
            return []
        missing = candidates - len(self.standings.candidates)
        decisions: list[Decision] = []
        if missing > 0:
            decisions.append(self._start(missing))
        return decisions + self.handle()

    def handle(self, *events: Event) -> list[Decision]:
        """Apply events in their order, and return what to do now.

        Raises:
            IllegalMove: an event that cannot happen; nothing is decided.
        """
        for event in events:
            # `Started` and `Scored` cannot change what is certain.
            may_decide = not isinstance(event, Started | Scored)
            self._needs_decision |= may_decide
            if isinstance(event, DeadlineSet):
                self._set_deadline(event)
                continue

            if not 0 <= event.index < len(self.candidates):
                raise IllegalMove(f"no candidate {event.index} was started: {event}")
            candidate = self.candidates[event.index]
            # If the group has stopped the candidate, the event came too late to change anything.
            was_running = candidate.running
            candidate.apply(event)
            match event:
                case Scored() if was_running:
                    self._pending_scores.append(event)
                case Finished() if was_running and self.standings.has_deadline:
                    # A candidate that finished beyond the bound is cut, so that the result does not depend on how often
                    # progress is reported.
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

        if self.outcome is not None or self.is_paused or not self.candidates:
            return []
        if not self.is_open:
            return list(self._give_up()) if self._failed_for_good else []
        decisions: list[Decision] = []
        if self._pending_scores:
            decisions.extend(self._prune())
        if self._needs_decision:
            decisions.extend(self._decide())
        return decisions

    def cancel(self, reason: DiscardReason = DiscardReason.CANCELLED) -> list[Decision]:
        """Stop all candidates, because the caller has disconnected or for another ``reason``."""
        if self.outcome is not None:
            return []
        return list(self._close(Outcome.CANCELLED, reason))

    def carry(self) -> list[Decision]:
        """Stop all candidates: another group continues from what they have generated."""
        if self.outcome is not None:
            return []
        decisions = list(self._close(Outcome.CANCELLED, DiscardReason.CARRIED))
        for candidate in self.candidates[self.restarted_from :]:
            if candidate.reason is not None and candidate.reason not in GONE:
                candidate.reason = DiscardReason.CARRIED
        return decisions

    def end_decided(self) -> list[Decision]:
        """Stop the candidates that are left: the delivered candidates have decided the caller's vote."""
        if self.outcome is not None:
            return []
        return list(self._close(Outcome.DECIDED, DiscardReason.DECIDED))

    @property
    def is_paused(self) -> bool:
        """Whether the group waits for `resume` after a `restart`."""
        return self._owed is not None

    @property
    def can_restart(self) -> bool:
        """Whether the group may be restarted: it is not finished, and no trajectory was delivered."""
        return self.outcome is None and not self.delivered and not self.is_paused

    def restart(self) -> list[Decision]:
        """Stop all candidates and pause, until `resume` starts the same number of new candidates.

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
        self.restarted_from = len(self.candidates)
        self._follow_candidates()
        self._pending_scores = []
        self._finished_late = []
        return stops

    def resume(self) -> list[Decision]:
        """Start as many candidates as `restart` has stopped, and decide again."""
        owed = self._owed
        self._owed = None
        if self.outcome is not None or not owed:
            return []
        self._needs_decision = True
        return [self._start(owed), *self.handle()]

    def _set_deadline(self, event: DeadlineSet) -> None:
        # The first deadline may have stopped or cut candidates already, so a second one would come too late.
        if self.deadline is not None:
            return
        self.deadline = event.tokens
        self.bound = event.bound
        self.standings.deadline = event.tokens
        self.standings.bound = event.bound
        self.standings.checks = None

    def _follow_candidates(self) -> None:
        """Create the rule's selector, and give it the candidates since the latest restart."""
        self.standings = self.rule.selector_type(self.rule, self._deliver_early)
        self.standings.delivered = self.delivered
        self.standings.deadline = self.deadline
        self.standings.bound = self.bound
        for candidate in self.candidates[self.restarted_from :]:
            self.standings.update(candidate)

    # --- decisions ----------------------------------------------------------

    def _prune(self) -> Iterator[Decision]:
        """Keep or prune each scored candidate, in the order of the scores.

        A candidate that the group needs is kept with probability 1, and this probability is recorded. It is the true
        probability given all earlier decisions, so inverse propensity weights stay unbiased.
        """
        scores = self._pending_scores
        self._pending_scores = []
        for score in scores:
            candidate = self.candidates[score.index]
            if not candidate.running:
                continue
            # Truncated candidates do not count: a valid candidate is worth more than any of them.
            left = len(self.standings.running) + len(self.standings.valid)
            survival = 1.0
            if self._survival_rng is not None and left > self.rule.fewest:
                survival = score.survival
            # One random number serves all scores of a candidate. Given that the number is below the product so far, it
            # is uniform below that product. So it falls below the next product with exactly this survival probability.
            candidate.survival *= survival
            if candidate.survival_draw < candidate.survival:
                yield Keep(score.index, survival)
            else:
                self._needs_decision = True
                yield self._stop(score.index, DiscardReason.PRUNED)

    def _decide(self) -> Iterator[Decision]:
        self._needs_decision = False
        selector = self.standings

        # Replace failed candidates, or give up. All remaining candidates are in the group then, so delivered and cut
        # candidates stay in it.
        missing = self.rule.fewest - len(selector.candidates)
        if missing > self._replacements_left:
            yield from self._give_up()
            return
        if missing > 0:
            yield self._start(missing)
            self._replacements_left -= missing

        # Cut the candidates that have reached the bound. From then on they count as truncated, which may decide the
        # group, and they may turn out not to be selected. So they are cut before any candidate is stopped.
        if self.bound is not None and selector.has_deadline:
            # The key of a running candidate is one token more than it has.
            reached = selector.running[bisect_left(selector.running, (self.bound + 1, -1)) :]
            late = self._finished_late
            self._finished_late = []
            for index in sorted([*late, *(index for _, index in reached)]):
                yield self._cut(index, self.bound)

        stops = selector.stops()
        for index in sorted(stops):
            yield self._stop(index, stops[index])

        # At the group's deadline, candidates are also cut that had finished beyond it before the deadline was known.
        for index, tokens in sorted(selector.cuts().items()):
            if index not in self.delivered:
                yield self._cut(index, tokens)

        if not selector.running:
            yield self._complete()
        elif self._deliver_early:
            for index in sorted(selector.deliveries()):
                if index not in self.delivered:
                    self.delivered.add(index)
                    yield Deliver(index)

    def _start(self, count: int) -> Start:
        # All random numbers of a candidate are drawn before it runs, so that results depend on seeds and lengths alone,
        # and not on timing.
        indices = range(len(self.candidates), len(self.candidates) + count)
        for index in indices:
            survival_draw = 0.0 if self._survival_rng is None else float(self._survival_rng.random())
            candidate = Candidate(index, tail_draw=float(self._rng.random()), survival_draw=survival_draw)
            self.candidates.append(candidate)
            self.standings.update(candidate)
        return Start(tuple(indices))

    def _stop(self, index: int, reason: DiscardReason) -> Stop:
        candidate = self.candidates[index]
        candidate.discard(reason)
        self.standings.update(candidate)
        return Stop(index, reason)

    def _cut(self, index: int, tokens: int) -> Cut:
        candidate = self.candidates[index]
        candidate.cut_at(tokens)
        self.standings.update(candidate)
        return Cut(index, tokens)

    # --- outcomes -----------------------------------------------------------

    def _complete(self) -> Complete:
        selection = self.standings.select()
        for candidate in self.candidates:
            if candidate.index in selection:
                candidate.select(selection[candidate.index])
            elif candidate.alive:
                candidate.discard(self.rule.discard_reason(candidate))
        self.outcome = Outcome.COMPLETED
        return Complete(dict(sorted(selection.items())))

    def _give_up(self) -> Iterator[Decision]:
        yield from self._close(Outcome.FAILED)
        yield GiveUp(self._last_error or GroupFailed("too few candidates could finish"))

    def _close(self, outcome: Outcome, reason: DiscardReason = DiscardReason.CANCELLED) -> Iterator[Decision]:
        """End without a complete group. Delivered trajectories stay selected, because the caller has them."""
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

    Candidates that are `GONE` and candidates before a restart do not count. Failures after a score are corrected for.
    The result is empty if the group is not complete, if its rule can never select some candidates, or if so many
    candidates failed after a score that the weights exceed the range of floats.
    """
    if group.outcome is not Outcome.COMPLETED:
        return {}
    counted = []
    failed = []
    for candidate in group.candidates[group.restarted_from :]:
        if candidate.reason in GONE:
            failed.append(candidate.survival)
        else:
            counted.append(candidate)
    weights = group.rule.weights(counted) or {}
    if min(failed, default=1.0) == 1:
        return weights
    factor = weight_factor(failed, len(counted) + len(failed))
    weights = {index: weight * factor for index, weight in weights.items()}
    return weights if all(map(isfinite, weights.values())) else {}


def sampled_from(group: Group) -> int | None:
    """Return the number of candidates of which a complete group is a plain sample; None under other rules."""
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_survivors:
        return None
    return sum(c.reason not in (*GONE, DiscardReason.PRUNED) for c in group.candidates[group.restarted_from :])


def tail_share(group: Group) -> float:
    """Return the share that a complete group has sampled of its candidates that are neither pruned nor short.

    The share is 1 if the rule samples none. It is only nearly the probability to be selected: which candidates can be
    pruned depends on which were stopped, and so on the sample. It suffices for labels, but not for `selection_weights`.
    """
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_rest:
        return 1.0
    left = 0
    sampled = 0
    for candidate in group.candidates[group.restarted_from :]:
        if candidate.reason not in (*GONE, DiscardReason.PRUNED) and candidate.selected_as is not SelectedAs.SHORT:
            left += 1
            sampled += candidate.selected_as is not None
    return sampled / left if sampled else 1.0
