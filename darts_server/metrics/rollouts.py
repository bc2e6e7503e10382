"""Prometheus collectors of groups: candidates, tokens, lengths, deadlines, budgets, rewards and votes."""

from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from darts_server.metrics.collectors import BOOLEANS, Collectors, Gauges, ReadMetric, Reads
from darts_server.records import CohortRecord, GroupRecord
from darts_server.types import DiscardReason, Outcome, SelectedAs, TurnKind, VoteOutcome

LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CANDIDATE_BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
STEP_SIZES = (1, 4, 16, 64, 256, 1024)
"""Numbers of sequences at which the latency curve is exported."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
KINDS = ("generated", "returned")
ANSWERS = ("right", "wrong")

GAUGES: Gauges = {
    "darts_prompts_tracked": ("Prompts with statistics.", {}),
    "darts_store_fault": ("1 while learned state cannot be written, else 0.", {}),
    "darts_redundancy_scale": (
        "Share of the configured redundancy in force: 1, or less while too many candidates wait.",
        {},
    ),
    "darts_carried_prompts": ("Prompts that are kept for a later batch, because enough others were complete.", {}),
    "darts_carried_tokens": ("Tokens that were generated for these prompts, and are kept with them.", {}),
    "darts_step_seconds": (
        "Measured duration of a decode step by the number of running sequences.",
        {"sequences": STEP_SIZES},
    ),
    "darts_start_seconds": (
        "Measured seconds by which a candidate that starts lengthens the engine's step, besides its decoding.",
        {},
    ),
    "darts_length_tokens": (
        "Lengths in the last groups: of all candidates (estimated for stopped ones) and of returned ones.",
        {"kind": KINDS, "statistic": ("mean", *QUANTILES)},
    ),
    "darts_pass_rate": ("Share of correct trajectories among rewarded ones.", {}),
    "darts_answer_length_tokens": (
        "Mean length of rewarded trajectories, correct (right) and incorrect (wrong) ones. If correct ones are longer, "
        "long answers are worth their tokens.",
        {"answer": ANSWERS},
    ),
}
TOTALS = {
    "darts_observer_failures_total": (
        "Failed calls of what is notified of groups (statistics, metrics, monitor); the log has the first of each."
    ),
}
"""Counters that read their values at each scrape."""
DEADLINE_GAUGES = {
    "darts_deadline_lost_share": (
        "Share of correct answers that the policy's deadlines discard, where rewards were reported."
    ),
    "darts_deadline_lost_groups": (
        "Share of the groups with correct answers that lose all of them to the policy's deadlines."
    ),
    "darts_deadline_stretch": "Factor by which the policy's deadlines are moved later.",
}
"""Once a policy has a deadline. What is read gets the policy, and what its deadlines may discard."""


class RolloutMetrics(Collectors):
    """Count groups, cohorts, rewards and votes."""

    def __init__(self, model_name: str, reads: Reads | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        what = "Groups of single requests, by whether they had all their requests when they were sealed."
        self._sealed = self._counter("darts_joined_groups", what, "full", BOOLEANS)
        what = "Requests for one trajectory that may be joined to a group: 'opening' ones, and why others run alone."
        self._single = self._counter("darts_single_requests", what, "turn", TurnKind)
        self._groups = self._counter("darts_groups", "Ended groups by outcome.", "outcome", Outcome)
        self._started = self._counter("darts_candidates_started", "Started candidates.")
        what = "Ended candidates by reason: 'selected', or why they were discarded."
        self._ended = self._counter("darts_candidates_ended", what, "reason", ("selected", *DiscardReason))
        self._cut = self._counter("darts_candidates_cut", "Returned candidates that were cut at the deadline.")
        what = "Tokens of all candidates (generated), of returned ones, of these by older weights (stale), and others "
        self._tokens = self._counter("darts_tokens", what + "(wasted).", "kind", (*KINDS, "stale", "wasted"))
        what = "Groups that went on from what an earlier batch had generated, instead of starting again."
        self._resumed_groups = self._counter("darts_resumed_groups", what)
        what = "Tokens that these groups went on from, and that were not generated again."
        self._resumed_tokens = self._counter("darts_resumed_tokens", what)
        what = "Candidates started per group."
        self._candidates = self._histogram("darts_candidates_per_group", what, CANDIDATE_BUCKETS)
        what = "Time from a group's first candidate to its end."
        self._duration = self._histogram("darts_group_duration_seconds", what, SECONDS_BUCKETS)
        what = "Time from the finish of the K-th trajectory to the completed group."
        self._tail_wait = self._histogram("darts_tail_wait_seconds", what, SECONDS_BUCKETS)
        what = "Generated tokens per candidate (stopped ones: until they were stopped), and per returned trajectory."
        self._length = self._histogram("darts_trajectory_length_tokens", what, LENGTH_BUCKETS, "kind")
        what = "Ended cohorts, by whether they ran past the deadline to explore it."
        self._cohorts = self._counter("darts_cohorts", what, "explored", BOOLEANS)
        self._mean_candidates = self._gauge("darts_budget_mean_candidates", "Candidates per group of the last cohort.")
        self._deadline = self._gauge("darts_deadline_tokens", "Deadline of the last cohort that had one.")
        what = "Time from the start of a cohort's first group to the end of its last."
        self._rollout = self._histogram("darts_rollout_seconds", what, SECONDS_BUCKETS)
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
        self._deadline_gauges = {
            name: ReadMetric(GaugeMetricFamily(name, text, labels=("model_name", "policy")), registry)
            for name, text in DEADLINE_GAUGES.items()
        }
        self._reads = reads
        if reads is not None:
            self._read_gauges(GAUGES, reads)
            self._read_totals(TOTALS, reads)

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
        resumed = sum(candidate.resumed for candidate in record.candidates)
        if resumed:
            self._resumed_groups.labels(self._model).inc()
            self._resumed_tokens.labels(self._model).inc(resumed)
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
        if record.max_lost is not None and self._reads is not None:  # its policy's deadlines are read from now on
            for name, gauge in self._deadline_gauges.items():
                value = partial(self._reads[name], record.policy, record.max_lost)
                gauge.reads[self._model, record.policy] = value

    def cohort_ended(self, record: CohortRecord) -> None:
        self._cohorts.labels(self._model, str(record.explored).lower()).inc()
        self._tokens.labels(self._model, "stale").inc(record.stale_tokens)
        self._mean_candidates.labels(self._model).set(record.mean_candidates)
        if record.deadline is not None:
            self._deadline.labels(self._model).set(record.deadline)
        self._rollout.labels(self._model).observe(record.measured_seconds)

    def rewards_reported(self, matched: int, unknown: int) -> None:
        self._rewards.labels(self._model, "true").inc(matched)
        self._rewards.labels(self._model, "false").inc(unknown)

    def group_rewarded(self, zero_variance: bool) -> None:
        self._rewarded_groups.labels(self._model, str(zero_variance).lower()).inc()

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        self._votes.labels(self._model, outcome).inc()
        self._vote_stopped.labels(self._model).inc(stopped)
