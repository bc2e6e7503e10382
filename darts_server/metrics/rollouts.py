"""Prometheus collectors of groups: candidates, tokens, lengths, deadlines, budgets, rewards and votes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from prometheus_client import REGISTRY, CollectorRegistry

from darts_server.metrics.collectors import Collectors, Values, or_nan
from darts_server.observers import VoteObserver
from darts_server.records import CohortRecord, GroupRecord
from darts_server.types import DiscardReason, MaxLost, Outcome, SelectedAs, TurnKind, VoteOutcome

LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CANDIDATE_BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
STEP_SIZES = (1, 4, 16, 64, 256, 1024)
"""Numbers of sequences at which the latency curve is exported."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
KINDS = ("generated", "returned")
ANSWERS = ("right", "wrong")
BOOLEANS = ("true", "false")
RULES = ("off", "uniform", "darts", "cut", "cap", "limit")
"""What `auto` chooses from."""
END_REASONS = ("selected", *DiscardReason)


@dataclass(frozen=True, slots=True)
class RolloutSources:
    """Functions that are called at each scrape; they return ``None`` while a value is unknown.

    ``tracked``: number of prompts with statistics. ``fault``: whether learned state cannot be written.
    ``step_seconds``: duration of a decode step with this many sequences. ``start_seconds``: what a candidate costs when
    it starts, besides its decode steps. ``mean_length``, ``length_quantile``: in tokens, for one of `KINDS`.
    ``lost_share``: share of correct answers that a policy's deadlines discard, of which they may discard so many.
    ``lost_group_share``: share of the groups that lose all of theirs. ``deadline_stretch``: factor that moves them
    later.
    ``pass_rate``: share of correct trajectories among rewarded ones. ``answer_length``: mean tokens, for one of
    `ANSWERS`. ``pattern_difference``, ``pattern_error``: mean length of correct minus incorrect ones, and its
    standard error. ``redundancy_scale``: share of the configured redundancy that is in force.
    ``observer_failures``: calls of observers that failed.
    """

    tracked: Callable[[], float]
    fault: Callable[[], bool]
    step_seconds: Callable[[int], float | None]
    start_seconds: Callable[[], float | None]
    mean_length: Callable[[str], float | None]
    length_quantile: Callable[[str, float], float | None]
    lost_share: Callable[[str, MaxLost], float | None]
    lost_group_share: Callable[[str, MaxLost], float | None]
    deadline_stretch: Callable[[str, MaxLost], float]
    pass_rate: Callable[[], float | None]
    answer_length: Callable[[str], float | None]
    pattern_difference: Callable[[], float | None]
    pattern_error: Callable[[], float | None]
    redundancy_scale: Callable[[], float] = lambda: 1.0
    observer_failures: Callable[[], float] = lambda: 0.0


class RolloutMetrics(Collectors, VoteObserver):
    """Count groups, cohorts, rewards and votes."""

    def __init__(
        self, model_name: str, sources: RolloutSources | None = None, registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(model_name, registry)
        self._make_group_metrics()
        self._make_other_metrics()
        self._sources = sources
        if sources is not None:
            self._make_gauges(sources)

    def single_request_classified(self, kind: TurnKind) -> None:
        self._single.labels(self._model, kind).inc()

    def group_sealed(self, full: bool) -> None:
        self._sealed.labels(self._model, str(full).lower()).inc()

    def candidates_started(self, count: int) -> None:
        self._started.labels(self._model).inc(count)

    def group_ended(self, record: GroupRecord) -> None:
        self._groups.labels(self._model, record.outcome).inc()
        self._candidates.labels(self._model).observe(len(record.candidates))
        self._duration.labels(self._model).observe(record.ended_at - record.started_at)
        if record.tail_wait is not None:
            self._tail_wait.labels(self._model).observe(record.tail_wait)
        generated, returned = record.generated_tokens, record.returned_tokens
        for kind, count in {"generated": generated, "returned": returned, "wasted": generated - returned}.items():
            self._tokens.labels(self._model, kind).inc(count)
        for candidate in record.candidates:
            self._ended.labels(self._model, candidate.reason or "selected").inc()
            if candidate.reason is not DiscardReason.CARRIED:
                self._length.labels(self._model, "generated").observe(candidate.tokens)
            if candidate.selected_as is not None:
                self._length.labels(self._model, "returned").observe(candidate.tokens)
            if candidate.cut and candidate.selected_as is not None:
                self._cut.labels(self._model).inc()
            is_tail = candidate.selected_as in (SelectedAs.LONG, SelectedAs.FILL)
            if record.explored and record.deadline is not None and is_tail:
                beyond = max(0, candidate.tokens - record.deadline)
                self._explored.labels(self._model, "beyond" if beyond else "within").inc()
                self._explored_tokens.labels(self._model).inc(beyond)
        sources, max_lost = self._sources, record.max_lost
        if max_lost is not None and sources is not None:  # its policy's deadlines are read from now on
            for gauge, read in (
                (self._lost_share, sources.lost_share),
                (self._lost_groups, sources.lost_group_share),
                (self._stretch, sources.deadline_stretch),
            ):
                value = partial(read, record.applied_policy, max_lost)
                gauge.labels(self._model, record.applied_policy).set_function(or_nan(value))

    def cohort_ended(self, record: CohortRecord) -> None:
        self._cohorts.labels(self._model, str(record.explored).lower()).inc()
        if record.chosen is not None:
            self._auto.labels(self._model, record.chosen.rule).inc()
        self._mean_candidates.labels(self._model).set(record.mean_candidates)
        if record.deadline is not None:
            self._deadline.labels(self._model).set(record.deadline)
        if record.predicted_seconds is not None:
            self._rollout.labels(self._model, "predicted").observe(record.predicted_seconds)
            self._rollout.labels(self._model, "measured").observe(record.measured_seconds)

    def rewards_reported(self, matched: int, unknown: int) -> None:
        self._rewards.labels(self._model, "true").inc(matched)
        self._rewards.labels(self._model, "false").inc(unknown)

    def group_rewarded(self, zero_variance: bool) -> None:
        self._rewarded_groups.labels(self._model, str(zero_variance).lower()).inc()

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        self._votes.labels(self._model, outcome).inc()
        self._vote_stopped.labels(self._model).inc(stopped)

    # --- collectors --------------------------------------------------------

    def _make_group_metrics(self) -> None:
        what = "Groups of single requests, by whether they had all their requests when they were sealed."
        self._sealed = self._counter("darts_joined_groups", what, "full", BOOLEANS)
        what = "Requests for one trajectory that may be joined to a group: 'opening' ones, and why others run alone."
        self._single = self._counter("darts_single_requests", what, "turn", TurnKind)
        self._groups = self._counter("darts_groups", "Ended groups by outcome.", "outcome", Outcome)
        self._started = self._counter("darts_candidates_started", "Started candidates.")
        what = "Ended candidates by reason: 'selected', or why they were discarded."
        self._ended = self._counter("darts_candidates_ended", what, "reason", END_REASONS)
        self._cut = self._counter("darts_candidates_cut", "Returned candidates that were cut at the deadline.")
        what = "Tokens of all candidates (generated), of returned ones and of the others (wasted)."
        self._tokens = self._counter("darts_tokens", what, "kind", (*KINDS, "wasted"))
        what = "Candidates started per group."
        self._candidates = self._histogram("darts_candidates_per_group", what, CANDIDATE_BUCKETS)
        what = "Time from a group's first candidate to its end."
        self._duration = self._histogram("darts_group_duration_seconds", what, SECONDS_BUCKETS)
        what = "Time from the finish of the K-th trajectory to the completed group."
        self._tail_wait = self._histogram("darts_tail_wait_seconds", what, SECONDS_BUCKETS)
        what = "Generated tokens per candidate (stopped ones: until they were stopped), and per returned trajectory."
        self._length = self._histogram("darts_trajectory_length_tokens", what, LENGTH_BUCKETS, "kind")

    def _make_other_metrics(self) -> None:
        what = "Ended cohorts, by whether they ran past the deadline to explore it."
        self._cohorts = self._counter("darts_cohorts", what, "explored", BOOLEANS)
        what = "Ended cohorts under the policy auto, by what it did with them."
        self._auto = self._counter("darts_auto_cohorts", what, "rule", RULES)
        self._mean_candidates = self._gauge("darts_budget_mean_candidates", "Candidates per group of the last cohort.")
        self._deadline = self._gauge("darts_deadline_tokens", "Deadline of the last cohort that had one.")
        what = "Time from the start of a cohort's first group to the end of its last, predicted and measured."
        self._rollout = self._histogram("darts_rollout_seconds", what, SECONDS_BUCKETS, "kind")
        what = "Tail candidates of explored cohorts, by whether they finished within the deadline or beyond it."
        self._explored = self._counter("darts_explored_candidates", what, "deadline", ("beyond", "within"))
        what = "Tokens of explored tail candidates beyond the deadline."
        self._explored_tokens = self._counter("darts_explored_beyond_tokens", what)
        what = "Reported rewards without repeated ones, by whether their trajectory was found."
        self._rewards = self._counter("darts_rewards", what, "matched", BOOLEANS)
        what = "Groups whose returned trajectories all have rewards, by whether these are all equal."
        self._rewarded_groups = self._counter("darts_rewarded_groups", what, "zero_variance", BOOLEANS)
        self._votes = self._counter("darts_votes", "Ended votes by outcome.", "outcome", VoteOutcome)
        what = "Candidates stopped because they could not change the result of a vote."
        self._vote_stopped = self._counter("darts_vote_candidates_stopped", what)

        # Set by `group_ended`, once a policy has a deadline.
        what = "Share of correct answers that the policy's deadlines discard, where rewards were reported."
        self._lost_share = self._gauge("darts_deadline_lost_share", what, "policy")
        what = "Share of the groups with correct answers that lose all of them to the policy's deadlines."
        self._lost_groups = self._gauge("darts_deadline_lost_groups", what, "policy")
        what = "Factor by which the policy's deadlines are moved later."
        self._stretch = self._gauge("darts_deadline_stretch", what, "policy")

    def _make_gauges(self, sources: RolloutSources) -> None:
        self._read_gauge("darts_prompts_tracked", "Prompts with statistics.", {(): sources.tracked})
        what = "1 while learned state cannot be written, else 0."
        self._read_gauge("darts_store_fault", what, {(): lambda: float(sources.fault())})
        what = "Share of the configured redundancy in force: 1, or less while too many candidates wait."
        self._read_gauge("darts_redundancy_scale", what, {(): sources.redundancy_scale})
        what = (
            "Failed calls of what is notified of groups (statistics, metrics, monitor); the log has the first of each."
        )
        self._read_gauge("darts_observer_failures", what, {(): sources.observer_failures})
        what = "Measured duration of a decode step by the number of running sequences."
        steps: Values = {(str(size),): partial(sources.step_seconds, size) for size in STEP_SIZES}
        self._read_gauge("darts_step_seconds", what, steps, "sequences")
        what = "Measured seconds by which a candidate that starts lengthens the engine's step, besides its decoding."
        self._read_gauge("darts_start_seconds", what, {(): sources.start_seconds})
        what = "Lengths in the last groups: of all candidates (estimated for stopped ones) and of returned ones."
        lengths: Values = {(kind, "mean"): partial(sources.mean_length, kind) for kind in KINDS}
        for kind, (name, share) in product(KINDS, QUANTILES.items()):
            lengths[kind, name] = partial(sources.length_quantile, kind, share)
        self._read_gauge("darts_length_tokens", what, lengths, "kind", "statistic")
        what = "Share of correct trajectories among rewarded ones."
        self._read_gauge("darts_pass_rate", what, {(): sources.pass_rate})
        what = "Mean length of rewarded trajectories, correct (right) and incorrect (wrong) ones."
        answers: Values = {(answer,): partial(sources.answer_length, answer) for answer in ANSWERS}
        self._read_gauge("darts_answer_length_tokens", what, answers, "answer")
        what = "Mean length of correct minus incorrect trajectories: above 0, correct answers need more tokens."
        self._read_gauge("darts_pattern_difference_tokens", what, {(): sources.pattern_difference})
        what = "Standard error of darts_pattern_difference_tokens."
        self._read_gauge("darts_pattern_error_tokens", what, {(): sources.pattern_error})
