"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rng=rng)
    act_on(group.open(DualEnd(8), candidates=12))
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

An event costs O(log n), or O(n) if it may decide a sampled tail: some microseconds for a group of usual size.

Two invariants hold under every rule. Every started candidate ends exactly once: selected, or discarded with one reason.
Decisions are final, so a rule decides only what no future event can change.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
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
from darts_server.group.informative import have_equal_rewards
from darts_server.group.selection import AllSurvivors, SelectionRule, Selector
from darts_server.types import GONE, DiscardReason, Outcome, SelectedAs


class UniformGenerator(Protocol):
    """A numpy ``Generator``, or its replacement in tests."""

    def random(self) -> float: ...


UNOPENED = AllSurvivors(0)
"""Rule of a group that is not open yet."""

MAX_LOSSES = 3
"""Number of times that a group may lose as many candidates as it returns when engines die."""


class Group:
    """One prompt's group.

    Args:
        rng: generator of tail draws. Each group has its own.
        max_replacements: maximum number of candidates that replace failed candidates. None means the group size,
            because an engine that fails more often is not worth waiting for, and `MAX_LOSSES` times the group size for
            candidates that were lost with their engine.
        deliver_early: whether to deliver each trajectory as soon as it is certain to be in the group.
        survival_rng: generator for pruning, or None to prune nothing. It is separate from ``rng``, so that pruning does
            not change tail draws.
        waits_for_rewards: whether a complete group needs the verdicts of all finished candidates, under any rule. Rules
            that need rewards always wait.
        stops_when_decided: whether the group ends as soon as it can return candidates with unequal rewards.
    """

    def __init__(
        self,
        *,
        rng: UniformGenerator,
        max_replacements: int | None = None,
        deliver_early: bool = False,
        survival_rng: UniformGenerator | None = None,
        waits_for_rewards: bool = False,
        stops_when_decided: bool = False,
    ) -> None:
        self.candidates: list[Candidate] = []
        self.outcome: Outcome | None = None
        self.deadline: int | None = None
        """The cohort's deadline in tokens, or None before it is set."""
        self.cut_length: int | None = None
        """Length in tokens at which every candidate is cut, or None. It is set with the deadline."""
        self.restarted_from = 0
        """Index of the first candidate that was started after the latest restart."""
        self.delivered: set[int] = set()
        """Indices of candidates that the caller got before the group was complete."""
        self.is_open = False
        self.decided_early = False
        """Whether candidates were stopped because enough others had unequal rewards."""
        self.rule: SelectionRule = UNOPENED
        self.standings: Selector = UNOPENED.selector_type(UNOPENED, deliver_early)
        """The candidates that are not discarded, in the order of their lengths."""

        self._rng = rng
        self._survival_rng = survival_rng
        self._deliver_early = deliver_early
        self._waits_for_rewards = waits_for_rewards
        self._stops_when_decided = stops_when_decided
        # Random number of rules that need rewards.
        self._start_draw = 0.0
        self._max_replacements = max_replacements
        self._replacements_left = 0
        # Losses with an engine that use up no replacements.
        self._losses_left = 0
        # Candidates that were lost with an engine, and are not replaced yet.
        self._lost = 0
        self._failed_for_good = False
        self._last_error: Exception | None = None
        self._allocated = 0
        # Number of candidates that `resume` starts, or None while the group is not paused.
        self._num_paused: int | None = None

        # Candidates that were cut at the cut length, and whose `Cut` was not returned yet.
        self._finished_late: list[int] = []
        self._pending_scores: list[Scored] = []
        # Whether an event arrived that may change what is certain.
        self._needs_decision = True

    @property
    def current_candidates(self) -> list[Candidate]:
        """Candidates that were started after the latest restart."""
        return self.candidates[self.restarted_from :]

    @property
    def check_at(self) -> dict[int, int]:
        """Token count of each running candidate at which its progress must be reported.

        Progress below this count changes nothing.
        """
        if self.outcome is not None:
            return {}
        if self.standings.checks is None:
            self.standings.checks = self.standings.check_at()
        return self.standings.checks

    def add_candidate(self) -> list[Decision]:
        """Start a candidate before the group is open, or when a paused group resumes."""
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self._num_paused is not None:
            self._num_paused += 1
            return []
        if self.outcome is not None:
            return []
        return [self._start(count=1)]

    def open(self, rule: SelectionRule, candidates: int) -> list[Decision]:
        """Start the missing candidates, and begin to decide.

        ``candidates``: number of candidates in all, at least ``rule.size``.
        """
        if candidates < rule.size:
            raise ValueError(f"candidates must be at least the group size {rule.size}, got {candidates}")
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self.outcome is not None:
            return []

        self.is_open = True
        self.rule = rule
        if rule.needs_rewards:
            # The number is drawn before the candidates of the rule are started, and so before any reward is known.
            self._start_draw = float(self._rng.random())
        self._allocated = candidates
        if self._max_replacements is None:
            self._replacements_left = rule.size
            # Replacements cover the remaining `rule.size` losses.
            self._losses_left = (MAX_LOSSES - 1) * rule.size
        else:
            self._replacements_left = self._max_replacements
        self._rebuild_standings()

        if self._num_paused is not None:
            # `resume` starts all candidates.
            self._num_paused = max(self._num_paused, candidates)
            return []
        missing = candidates - len(self.standings.candidates)
        decisions: list[Decision] = []
        if missing > 0:
            decisions.append(self._start(missing))
        return decisions + self.handle()

    def handle(self, *events: Event) -> list[Decision]:
        """Apply events in order.

        Raises:
            IllegalMove: an event cannot happen. Nothing is decided.
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
            # If the group has stopped the candidate, the event is too late to change anything.
            was_running = candidate.running
            candidate.apply(event)
            match event:
                case Scored() if was_running:
                    self._pending_scores.append(event)
                case Finished() if was_running and self.standings.has_deadline:
                    # Cut beyond the cut length, so that the result does not depend on how often progress is reported.
                    if self.cut_length is not None and candidate.tokens > self.cut_length:
                        candidate.cut_at(self.cut_length)
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
                        self._lost += 1
                    who = "caller" if by_caller else "engine"
                    self._last_error = GroupAborted(f"the {who} aborted candidate {index}, and too few others are left")
            if was_running and may_decide:
                self.standings.update(candidate)

        if self.outcome is not None or self.is_paused or not self.candidates:
            return []
        decisions: list[Decision] = []
        if not self.is_open:
            # Nothing else is decided before the rule is known.
            if self._failed_for_good:
                decisions.extend(self._give_up())
            return decisions
        if self._pending_scores:
            decisions.extend(self._prune())
        if self._needs_decision:
            decisions.extend(self._decide())
        return decisions

    def cancel(self, reason: DiscardReason = DiscardReason.CANCELLED) -> list[Decision]:
        """Stop all candidates."""
        return list(self._close(Outcome.CANCELLED, reason))

    def carry(self) -> list[Decision]:
        """Stop all candidates, so that another group can resume them."""
        if self.outcome is not None:
            return []
        decisions = list(self._close(Outcome.CANCELLED, DiscardReason.CARRIED))
        # Candidates that the group stopped earlier are resumed too.
        for candidate in self.current_candidates:
            if candidate.reason is not None and candidate.reason not in GONE:
                candidate.reason = DiscardReason.CARRIED
        return decisions

    def end_as_decided(self) -> list[Decision]:
        """Stop the other candidates, because the delivered candidates have decided the caller's vote."""
        return list(self._close(Outcome.DECIDED, DiscardReason.DECIDED))

    @property
    def is_paused(self) -> bool:
        """Whether the group waits for `resume` after a `restart`."""
        return self._num_paused is not None

    @property
    def needs_engine(self) -> bool:
        """Whether candidates run or will start. Otherwise the group has ended, or waits for verdicts alone."""
        return not self.is_open or self.is_paused or bool(self.standings.running)

    @property
    def can_restart(self) -> bool:
        return self.outcome is None and not self.delivered and not self.is_paused and self.needs_engine

    def restart(self) -> list[Decision]:
        """Stop all candidates and pause, until `resume` starts the same number of new candidates.

        Raises:
            IllegalMove: the group has ended, is paused, has delivered a trajectory, or waits for verdicts alone.
        """
        if not self.can_restart:
            raise IllegalMove(
                "the group cannot be restarted: it has ended, is paused, has delivered a trajectory, or waits for "
                "verdicts alone"
            )
        alive = [c for c in self.candidates if c.alive]
        stops: list[Decision] = [Stop(c.index, DiscardReason.RESTARTED) for c in alive if c.running]
        for candidate in alive:
            candidate.discard(DiscardReason.RESTARTED)
            candidate.forget_verdict()
        self._num_paused = self._allocated if self.is_open else len(alive)
        self.restarted_from = len(self.candidates)
        self._rebuild_standings()
        self._pending_scores = []
        self._finished_late = []
        self._lost = 0
        return stops

    def resume(self) -> list[Decision]:
        """Start new candidates after a `restart`, and decide again."""
        count = self._num_paused
        self._num_paused = None
        if self.outcome is not None or not count:
            return []
        self._needs_decision = True
        return [self._start(count), *self.handle()]

    def _set_deadline(self, event: DeadlineSet) -> None:
        # The first deadline may have stopped or cut candidates already, so a second deadline is too late.
        if self.deadline is not None:
            return
        self.deadline = event.tokens
        self.cut_length = event.cut_length
        self.standings.deadline = event.tokens
        self.standings.cut_length = event.cut_length
        self.standings.checks = None

    def _rebuild_standings(self) -> None:
        """Create the rule's selector, and give it the candidates since the latest restart."""
        self.standings = self.rule.selector_type(self.rule, self._deliver_early)
        self.standings.delivered = self.delivered
        self.standings.deadline = self.deadline
        self.standings.cut_length = self.cut_length
        self.standings.start = self._start_draw
        for candidate in self.current_candidates:
            self.standings.update(candidate)

    # --- decisions ----------------------------------------------------------

    def _prune(self) -> Iterator[Decision]:
        """Keep or prune each scored candidate, in the order of the scores.

        A candidate that the group needs is kept with probability 1. This is its true probability given all earlier
        decisions, so inverse propensity weights stay unbiased.
        """
        scores = self._pending_scores
        self._pending_scores = []
        for score in scores:
            candidate = self.candidates[score.index]
            if not candidate.running:
                continue
            # Truncated candidates do not count, because a valid candidate is worth more.
            left = len(self.standings.running) + len(self.standings.valid)
            survival = 1.0
            if self._survival_rng is not None and left > self.rule.fewest:
                survival = score.survival
            # One random number serves all scores of a candidate. Given that it is below the product so far, it is
            # uniform below that product. So it is below the next product with exactly this survival probability.
            candidate.survival *= survival
            if candidate.survival_draw < candidate.survival:
                yield Keep(score.index, survival)
            else:
                self._needs_decision = True
                yield self._stop(score.index, DiscardReason.PRUNED)

    def _decide(self) -> Iterator[Decision]:
        """Replace, cut, stop and deliver candidates, and complete the group when no candidate runs."""
        self._needs_decision = False
        selector = self.standings

        # Replace failed candidates, or give up. All remaining candidates are in the group then, so delivered and cut
        # candidates stay in it.
        missing = self.rule.fewest - len(selector.candidates)
        if missing > self._replacements_left:
            yield from self._give_up()
            return
        # An engine loses the candidates that still run, which are the longer ones. Without others in their place, the
        # group would be selected among too few candidates, most of which finished early. Others cannot take the places
        # of trajectories that the caller has.
        if not self.delivered:
            missing = max(missing, min(self._lost, self._replacements_left))
        self._lost = 0
        if missing > 0:
            yield self._start(missing)
            self._replacements_left -= missing

        # Cut the candidates that have reached the cut length. Cut candidates count as truncated, which may stop others.
        if self.cut_length is not None and selector.has_deadline:
            # The key of a running candidate is one token more than it has.
            reached = selector.running[bisect_left(selector.running, (self.cut_length + 1, -1)) :]
            late = self._finished_late
            self._finished_late = []
            for index in sorted([*late, *(index for _, index in reached)]):
                yield self._cut(index, self.cut_length)

        stops = selector.stops()
        for index in sorted(stops):
            yield self._stop(index, stops[index])

        # Candidates that finished beyond the deadline before it was known are cut too.
        for index, tokens in sorted(selector.cuts().items()):
            if index not in self.delivered:
                yield self._cut(index, tokens)

        if self._stops_when_decided and selector.running and self._is_decided():
            self.decided_early = True
            for _, index in sorted(selector.running, key=lambda key: key[1]):
                yield self._stop(index, DiscardReason.DECIDED)

        if not selector.running:
            if self.decided_early or not self._lacks_verdicts():
                yield self._complete()
        elif self._deliver_early:
            for index in sorted(selector.take_deliveries()):
                if index not in self.delivered:
                    self.delivered.add(index)
                    yield Deliver(index)

    def _is_decided(self) -> bool:
        """Whether enough candidates have rewards, and not all are equal."""
        rewards = [c.reward for c in self.standings.candidates.values() if c.reward is not None]
        return len(rewards) >= self.rule.size and have_equal_rewards(rewards) is False

    def _lacks_verdicts(self) -> bool:
        """Whether the group has to wait for verdicts of finished candidates."""
        if not (self._waits_for_rewards or self.rule.needs_rewards):
            return False
        return any(not candidate.has_verdict for candidate in self.standings.candidates.values())

    def _start(self, count: int) -> Start:
        """Create ``count`` candidates, and return the decision to start them."""
        # All random numbers are drawn before a candidate runs, so that results do not depend on timing.
        indices = range(len(self.candidates), len(self.candidates) + count)
        for index in indices:
            survival_draw = 0.0
            if self._survival_rng is not None:
                survival_draw = float(self._survival_rng.random())
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
        """Select among the finished candidates, and discard the others."""
        selection = self.standings.select()
        for candidate in self.candidates:
            if candidate.index in selection:
                candidate.select(selection[candidate.index])
            elif candidate.alive and self.decided_early and not candidate.has_verdict:
                candidate.discard(DiscardReason.DECIDED)
            elif candidate.alive:
                candidate.discard(self.rule.discard_reason(candidate))
        self.outcome = Outcome.COMPLETED
        return Complete(dict(sorted(selection.items())))

    def _give_up(self) -> Iterator[Decision]:
        """End the group as failed, because too few candidates are left."""
        yield from self._close(Outcome.FAILED)
        yield GiveUp(self._last_error or GroupFailed("too few candidates could finish"))

    def _close(self, outcome: Outcome, reason: DiscardReason = DiscardReason.CANCELLED) -> Iterator[Decision]:
        """End a group, unless it has ended. Delivered trajectories stay selected, because the caller has them."""
        if self.outcome is not None:
            return
        selection: Mapping[int, SelectedAs] = {}
        if self.delivered:
            selection = self.standings.select()
        for candidate in self.candidates:
            if candidate.running:
                yield Stop(candidate.index, reason)
            if candidate.index in self.delivered:
                # A delivered candidate stays, even if `select` leaves it out.
                candidate.select(selection.get(candidate.index, SelectedAs.SHORT))
            elif candidate.alive:
                candidate.discard(reason)
        self.outcome = outcome


# --- inverse propensity weights -----------------------------------------------


def selection_weights(group: Group) -> dict[int, float]:
    """Return each selected candidate's weight, 1 / (its probability to be selected), by index.

    `GONE` candidates and candidates before a restart do not count. The result is empty if the group is not complete, if
    its rule can never select some candidates, if it was decided early, or if weights exceed the range of floats because
    many candidates failed after a score.
    """
    if group.outcome is not Outcome.COMPLETED or group.decided_early:
        return {}
    counted = []
    failed = []
    for candidate in group.current_candidates:
        if candidate.reason in GONE:
            failed.append(candidate.survival)
        else:
            counted.append(candidate)
    weights = group.rule.weights(counted)
    # If no failed candidate could have been pruned, the factor is 1.
    if min(failed, default=1.0) == 1:
        return weights
    factor = weight_factor(failed, len(counted) + len(failed))
    weights = {index: weight * factor for index, weight in weights.items()}
    if not all(map(isfinite, weights.values())):
        return {}
    return weights


def advantages(group: Group) -> dict[int, float]:
    """Return the advantages of a complete group's selected candidates by index, if its rule computes any."""
    if group.outcome is not Outcome.COMPLETED:
        return {}
    return group.rule.advantages(group.current_candidates)


def sampled_from(group: Group) -> int | None:
    """Return from how many candidates a complete group was sampled uniformly, or None under other rules."""
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_survivors:
        return None
    return sum(c.reason not in (*GONE, DiscardReason.PRUNED) for c in group.current_candidates)


def tail_share(group: Group) -> float:
    """Return the sampled share of a complete group's tail, which is all but the short, pruned and failed candidates.

    It is 1 if no candidate is sampled. It is only nearly the probability to be selected, because pruning depends on the
    sample. It suffices for labels, but not for `selection_weights`.
    """
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_rest:
        return 1.0
    left = 0
    sampled = 0
    for candidate in group.current_candidates:
        if candidate.reason not in (*GONE, DiscardReason.PRUNED) and candidate.selected_as is not SelectedAs.SHORT:
            left += 1
            sampled += candidate.selected_as is not None
    return sampled / left if sampled else 1.0
