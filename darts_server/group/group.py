"""A group as a state machine: events in, decisions out, no I/O.

Usage::

    group = Group(rng=rng)
    act_on(group.open(DualEnd(8), candidates=12))
    act_on(group.handle(Finished(3, tokens=17, reason=FinishReason.STOP)))

An event costs O(log n), or O(n) if it may decide a sampled tail: usually some microseconds.

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
from darts_server.group.failure_weights import failure_weight_factor
from darts_server.group.informative import have_equal_rewards
from darts_server.group.selection import AllSurvivors, SelectionRule, Selector
from darts_server.types import GONE, DiscardReason, Outcome, SelectedAs


class UniformGenerator(Protocol):
    """A numpy ``Generator``, or its replacement in tests."""

    def random(self) -> float: ...


UNOPENED = AllSurvivors(0)

MAX_LOSSES = 3
"""Number of times that a group may lose as many candidates as it returns when engines die."""


class Group:
    """One prompt's group.

    Args:
        rng: generator of tail draws.
        max_replacements: maximum number of candidates that replace failed candidates. None means the group size,
            because an engine that fails more often is not worth waiting for, and `MAX_LOSSES` times the group size for
            candidates that were lost with their engine.
        deliver_early: whether to deliver each trajectory as soon as it is certain to be in the group.
        survival_rng: generator for pruning, or None to prune nothing. It is separate, so that pruning does not change
            tail draws.
        waits_for_rewards: whether to wait for the verdicts of all finished candidates. Rules that need rewards always
            wait.
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
        # Both are from `DeadlineSet`.
        self.deadline: int | None = None
        self.cut_length: int | None = None
        self.restarted_from = 0
        """Index of the first candidate that was started after the latest restart."""
        self.delivered: set[int] = set()
        """Indices of candidates that the caller got before the group was complete."""
        self.is_open = False
        self.decided_early = False
        """Whether `stops_when_decided` ended the group."""
        self.rule: SelectionRule = UNOPENED
        self.selector: Selector = UNOPENED.selector_type(UNOPENED, deliver_early)

        self._rng = rng
        self._survival_rng = survival_rng
        self._deliver_early = deliver_early
        self._waits_for_rewards = waits_for_rewards
        self._stops_when_decided = stops_when_decided
        self._sampling_start = 0.0
        self._max_replacements = max_replacements
        self._replacements_left = 0
        # Number of candidates that may still be lost with an engine without using up a replacement.
        self._engine_losses_left = 0
        # Number of these losses since the latest decision.
        self._num_lost = 0
        self._failed_for_good = False
        self._last_error: Exception | None = None
        self._num_allocated = 0
        # Number of candidates that `resume` starts, or None while the group is not paused.
        self._num_to_resume: int | None = None

        # Candidates that were cut when they finished, and whose `Cut` was not returned yet.
        self._unreported_cuts: list[int] = []
        self._pending_scores: list[Scored] = []
        self._needs_decision = True

    @property
    def current_candidates(self) -> list[Candidate]:
        return self.candidates[self.restarted_from :]

    @property
    def check_at(self) -> dict[int, int]:
        """Token count of each running candidate below which its progress changes nothing, and need not be reported."""
        if self.outcome is not None:
            return {}
        if self.selector.cached_checks is None:
            self.selector.cached_checks = self.selector.compute_checks()
        return self.selector.cached_checks

    def add_candidate(self) -> list[Decision]:
        """Start a candidate before the group is open, or when a paused group resumes."""
        if self.is_open:
            raise IllegalMove("the group is open already")
        if self._num_to_resume is not None:
            self._num_to_resume += 1
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
            # Drawn before any reward is known.
            self._sampling_start = float(self._rng.random())
        self._num_allocated = candidates
        if self._max_replacements is None:
            self._replacements_left = rule.size
            # The replacements cover another `rule.size` losses.
            self._engine_losses_left = (MAX_LOSSES - 1) * rule.size
        else:
            self._replacements_left = self._max_replacements
        self._rebuild_selector()

        if self._num_to_resume is not None:
            self._num_to_resume = max(self._num_to_resume, candidates)
            return []
        missing = candidates - len(self.selector.candidates)
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
            may_decide = not isinstance(event, Started | Scored)
            self._needs_decision |= may_decide
            if isinstance(event, DeadlineSet):
                self._set_deadline(event)
                continue

            if not 0 <= event.index < len(self.candidates):
                raise IllegalMove(f"no candidate {event.index} was started: {event}")
            candidate = self.candidates[event.index]
            # A stopped candidate still sends events until the engine has stopped it.
            was_running = candidate.is_running
            candidate.apply(event)
            match event:
                case Scored() if was_running:
                    self._pending_scores.append(event)
                case Finished() if was_running and self.selector.has_deadline:
                    # The candidate may have passed the cut length since its latest progress was reported.
                    if self.cut_length is not None and candidate.tokens > self.cut_length:
                        candidate.cut_at(self.cut_length)
                        self._unreported_cuts.append(candidate.index)
                case Failed(error=error, retryable=retryable):
                    self._last_error = error
                    if not retryable:
                        self._failed_for_good = True
                        self._replacements_left = 0
                case Lost(index=index, by_caller=by_caller) if was_running:
                    if self._engine_losses_left and not by_caller:
                        self._engine_losses_left -= 1
                        self._replacements_left += 1
                        self._num_lost += 1
                    who = "caller" if by_caller else "engine"
                    self._last_error = GroupAborted(f"the {who} aborted candidate {index}, and too few others are left")
            if was_running and may_decide:
                self.selector.update(candidate)

        if self.outcome is not None or self.is_paused or not self.candidates:
            return []
        decisions: list[Decision] = []
        if not self.is_open:
            if self._failed_for_good:
                decisions.extend(self._give_up())
            return decisions
        if self._pending_scores:
            decisions.extend(self._prune())
        if self._needs_decision:
            decisions.extend(self._decide())
        return decisions

    def cancel(self, reason: DiscardReason = DiscardReason.CANCELLED) -> list[Decision]:
        return list(self._close(Outcome.CANCELLED, reason))

    def end_as_carried(self) -> list[Decision]:
        """Stop all candidates, so that another group can resume them."""
        if self.outcome is not None:
            return []
        decisions = list(self._close(Outcome.CANCELLED, DiscardReason.CARRIED))
        # Candidates that the group has stopped are resumed too.
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
        return self._num_to_resume is not None

    @property
    def needs_engine(self) -> bool:
        # Otherwise it has ended, or waits for verdicts alone.
        return not self.is_open or self.is_paused or bool(self.selector.running_by_length)

    @property
    def can_restart(self) -> bool:
        return self.outcome is None and not self.delivered and not self.is_paused and self.needs_engine

    def restart(self) -> list[Decision]:
        """Stop all candidates and pause until `resume`. Raises `IllegalMove` unless `can_restart`."""
        if not self.can_restart:
            raise IllegalMove(
                "the group cannot be restarted: it has ended, is paused, has delivered a trajectory, or waits for "
                "verdicts alone"
            )
        alive = [c for c in self.candidates if c.is_alive]
        stops: list[Decision] = [Stop(c.index, DiscardReason.RESTARTED) for c in alive if c.is_running]
        for candidate in alive:
            candidate.discard(DiscardReason.RESTARTED)
            candidate.forget_verdict()
        # Once the number of candidates is known, pruned and failed candidates start again too.
        self._num_to_resume = self._num_allocated if self.is_open else len(alive)
        self.restarted_from = len(self.candidates)
        self._rebuild_selector()
        self._pending_scores = []
        self._unreported_cuts = []
        self._num_lost = 0
        return stops

    def resume(self) -> list[Decision]:
        count = self._num_to_resume
        self._num_to_resume = None
        if self.outcome is not None or not count:
            return []
        self._needs_decision = True
        return [self._start(count), *self.handle()]

    def _set_deadline(self, event: DeadlineSet) -> None:
        # The first deadline may have stopped or cut candidates already.
        if self.deadline is not None:
            return
        self.deadline = event.tokens
        self.cut_length = event.cut_length
        self.selector.deadline = event.tokens
        self.selector.cut_length = event.cut_length
        self.selector.cached_checks = None

    def _rebuild_selector(self) -> None:
        self.selector = self.rule.selector_type(self.rule, self._deliver_early)
        self.selector.delivered = self.delivered
        self.selector.deadline = self.deadline
        self.selector.cut_length = self.cut_length
        self.selector.sampling_start = self._sampling_start
        for candidate in self.current_candidates:
            self.selector.update(candidate)

    # --- decisions ----------------------------------------------------------

    def _prune(self) -> Iterator[Decision]:
        scores = self._pending_scores
        self._pending_scores = []
        for score in scores:
            candidate = self.candidates[score.index]
            if not candidate.is_running:
                continue
            # A candidate that the group needs is kept with probability 1. This is its true probability given all
            # earlier decisions, so inverse propensity weights stay unbiased. Truncated candidates do not count as
            # remaining, because a valid candidate is worth more.
            num_remaining = len(self.selector.running_by_length) + len(self.selector.valid_by_length)
            survival = 1.0
            if self._survival_rng is not None and num_remaining > self.rule.min_remaining:
                survival = score.survival
            # One random number serves all scores of a candidate: given that it is below the product so far, it is
            # uniform there, and so below the next product with exactly this survival probability.
            candidate.survival *= survival
            if candidate.survival_draw < candidate.survival:
                yield Keep(score.index, survival)
            else:
                self._needs_decision = True
                yield self._stop(score.index, DiscardReason.PRUNED)

    def _decide(self) -> Iterator[Decision]:
        self._needs_decision = False
        selector = self.selector

        # Replace failed candidates, or give up. If any are missing, all remaining candidates are in the group, so
        # delivered and cut candidates stay in it.
        missing = self.rule.min_remaining - len(selector.candidates)
        if missing > self._replacements_left:
            yield from self._give_up()
            return
        # An engine loses the longer candidates, which still run. Without replacements the group would be selected
        # mostly among early finishers. After a delivery, a replacement could not take the place of a trajectory that
        # the caller has.
        if not self.delivered:
            missing = max(missing, min(self._num_lost, self._replacements_left))
        self._num_lost = 0
        if missing > 0:
            yield self._start(missing)
            self._replacements_left -= missing

        # Cut before `stops`, because cut candidates count as truncated, which may stop others.
        if self.cut_length is not None and selector.has_deadline:
            # The key of a running candidate has one token more than the candidate.
            first_to_cut = bisect_left(selector.running_by_length, (self.cut_length + 1, -1))
            reached = [index for _, index in selector.running_by_length[first_to_cut:]]
            to_cut = sorted(self._unreported_cuts + reached)
            self._unreported_cuts = []
            for index in to_cut:
                yield self._cut(index, self.cut_length)

        stops = selector.stops()
        for index in sorted(stops):
            yield self._stop(index, stops[index])

        # Candidates that finished beyond the deadline before it was known are cut too.
        for index, tokens in sorted(selector.cuts().items()):
            if index not in self.delivered:
                yield self._cut(index, tokens)

        if self._stops_when_decided and selector.running_by_length and self._is_decided():
            self.decided_early = True
            for index in sorted(index for _, index in selector.running_by_length):
                yield self._stop(index, DiscardReason.DECIDED)

        if not selector.running_by_length:
            if self.decided_early or not self._lacks_verdicts():
                yield self._complete()
        elif self._deliver_early:
            for index in sorted(selector.take_deliveries()):
                if index not in self.delivered:
                    self.delivered.add(index)
                    yield Deliver(index)

    def _is_decided(self) -> bool:
        rewards = [c.reward for c in self.selector.candidates.values() if c.reward is not None]
        return len(rewards) >= self.rule.size and have_equal_rewards(rewards) is False

    def _lacks_verdicts(self) -> bool:
        if not (self._waits_for_rewards or self.rule.needs_rewards):
            return False
        return any(not candidate.has_verdict for candidate in self.selector.candidates.values())

    def _start(self, count: int) -> Start:
        # All random numbers are drawn before a candidate runs, so that results do not depend on timing.
        indices = range(len(self.candidates), len(self.candidates) + count)
        for index in indices:
            survival_draw = 0.0
            if self._survival_rng is not None:
                survival_draw = float(self._survival_rng.random())
            candidate = Candidate(index, tail_draw=float(self._rng.random()), survival_draw=survival_draw)
            self.candidates.append(candidate)
            self.selector.update(candidate)
        return Start(tuple(indices))

    def _stop(self, index: int, reason: DiscardReason) -> Stop:
        candidate = self.candidates[index]
        candidate.discard(reason)
        self.selector.update(candidate)
        return Stop(index, reason)

    def _cut(self, index: int, tokens: int) -> Cut:
        candidate = self.candidates[index]
        candidate.cut_at(tokens)
        self.selector.update(candidate)
        return Cut(index, tokens)

    # --- outcomes -----------------------------------------------------------

    def _complete(self) -> Complete:
        selection = self.selector.select()
        for candidate in self.candidates:
            if candidate.index in selection:
                candidate.select(selection[candidate.index])
            elif candidate.is_alive and self.decided_early and not candidate.has_verdict:
                candidate.discard(DiscardReason.DECIDED)
            elif candidate.is_alive:
                candidate.discard(self.rule.discard_reason(candidate))
        self.outcome = Outcome.COMPLETED
        return Complete(dict(sorted(selection.items())))

    def _give_up(self) -> Iterator[Decision]:
        yield from self._close(Outcome.FAILED)
        yield GiveUp(self._last_error or GroupFailed("too few candidates could finish"))

    def _close(self, outcome: Outcome, reason: DiscardReason = DiscardReason.CANCELLED) -> Iterator[Decision]:
        if self.outcome is not None:
            return
        selection: Mapping[int, SelectedAs] = {}
        if self.delivered:
            selection = self.selector.select()
        for candidate in self.candidates:
            if candidate.is_running:
                yield Stop(candidate.index, reason)
            if candidate.index in self.delivered:
                # The caller has the trajectory, so it stays selected even if `select` leaves it out.
                candidate.select(selection.get(candidate.index, SelectedAs.SHORT))
            elif candidate.is_alive:
                candidate.discard(reason)
        self.outcome = outcome


# --- inverse propensity weights -----------------------------------------------


def selection_weights(group: Group) -> dict[int, float]:
    """Return each selected candidate's weight, 1 / (its probability to be selected), by index.

    Empty if the group is not complete, if its rule can never select some candidates, or if it was decided early.
    """
    if group.outcome is not Outcome.COMPLETED or group.decided_early:
        return {}
    counted = [c for c in group.current_candidates if c.reason not in GONE]
    failed_survivals = [c.survival for c in group.current_candidates if c.reason in GONE]
    weights = group.rule.weights(counted)
    # If no failed candidate could have been pruned, the factor is 1.
    if min(failed_survivals, default=1.0) == 1:
        return weights
    factor = failure_weight_factor(failed_survivals, len(group.current_candidates))
    weights = {index: weight * factor for index, weight in weights.items()}
    # If many candidates failed after a score, weights may exceed the range of floats.
    if not all(map(isfinite, weights.values())):
        return {}
    return weights


def advantages(group: Group) -> dict[int, float]:
    """Return the advantages of a complete group's selected candidates by index, if the rule computes any."""
    if group.outcome is not Outcome.COMPLETED:
        return {}
    return group.rule.advantages(group.current_candidates)


def count_sampling_pool(group: Group) -> int | None:
    """Return from how many candidates a complete group was sampled uniformly, or None under other rules."""
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_survivors:
        return None
    return sum(c.reason not in (*GONE, DiscardReason.PRUNED) for c in group.current_candidates)


def sampled_tail_share(group: Group) -> float:
    """Return the sampled share of a complete group's tail, which is all but the short, pruned and failed candidates.

    Because pruning depends on the sample, this is only nearly the probability to be selected: enough for labels, but
    not for `selection_weights`.
    """
    if group.outcome is not Outcome.COMPLETED or not group.rule.samples_rest:
        return 1.0
    num_tail = 0
    num_sampled = 0
    for candidate in group.current_candidates:
        if candidate.reason not in (*GONE, DiscardReason.PRUNED) and candidate.selected_as is not SelectedAs.SHORT:
            num_tail += 1
            num_sampled += candidate.selected_as is not None
    return num_sampled / num_tail if num_sampled else 1.0
