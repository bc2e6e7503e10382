from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from darts_server.metrics.collectors import BOOLEANS, Collectors, Described, ReadMetric, Reads
from darts_server.records import CohortRecord, GroupRecord
from darts_server.types import DiscardReason, Outcome, SelectedAs, TurnKind, VoteOutcome

LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CANDIDATE_BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
STEP_SIZES = (1, 4, 16, 64, 256, 1024)
"""Numbers of running sequences for the latency curve."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
KINDS = ("generated", "returned")
ANSWERS = ("right", "wrong")

GAUGES: Described = {
    "darts_prompts_tracked": ("Prompts with statistics.", {}),
    "darts_store_fault": ("1 while learned state cannot be written, else 0.", {}),
    "darts_redundancy_scale": (
        "Share of the configured redundancy in force: 1, or less while too many candidates wait.",
        {},
    ),
    "darts_carried_prompts": ("Prompts that are kept for a later batch.", {}),
    "darts_carried_tokens": ("Tokens that are kept with the prompts for a later batch.", {}),
    "darts_step_seconds": (
        "Measured duration of a decode step by the number of running sequences.",
        {"sequences": STEP_SIZES},
    ),
    "darts_start_seconds": (
        "Measured seconds by which the start of a candidate lengthens the engine's step, besides decoding.",
        {},
    ),
    "darts_length_tokens": (
        "Lengths in the last groups: of all candidates (estimated for stopped candidates), and of returned candidates.",
        {"kind": KINDS, "statistic": ("mean", *QUANTILES)},
    ),
    "darts_pass_rate": ("Share of correct trajectories among rewarded trajectories.", {}),
    "darts_answer_length_tokens": (
        "Mean length of correct (right) and incorrect (wrong) rewarded trajectories. If correct answers are longer, "
        "long answers are worth their tokens.",
        {"answer": ANSWERS},
    ),
}
TOTALS: Described = {
    "darts_observer_failures_total": (
        "Failed calls of a group's observers (statistics, metrics, monitor). The log has the first failure of each.",
        {},
    ),
}
DEADLINE_GAUGES = {
    "darts_deadline_lost_share": (
        "Share of correct answers that the policy's deadlines discard, where rewards were reported."
    ),
    "darts_deadline_lost_groups": (
        "Share of the groups with correct answers that lose all of them to the policy's deadlines."
    ),
    "darts_deadline_factor": "Factor by which the policy's deadlines are moved later.",
}
"""Gauges of each policy with a deadline. Their functions get the policy, and the share that it may discard."""


class RolloutMetrics(Collectors):
    def __init__(self, model_name: str, reads: Reads, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._joined_groups = self._counters(
            "darts_joined_groups",
            "Groups of single requests, by whether they had all their requests when they were closed.",
            "full",
            BOOLEANS,
        )
        self._single_requests = self._counters(
            "darts_single_requests",
            "Requests for one trajectory: 'opening' requests may join a group, others run alone for this reason.",
            "turn",
            TurnKind,
        )
        self._ended_groups = self._counters("darts_groups", "Ended groups by outcome.", "outcome", Outcome)
        self._skipped_prompts = self._counter(
            "darts_prompts_skipped",
            "Prompts that batches did not run, because their rewards were almost surely equal (--skip-floor).",
        )
        self._started_candidates = self._counter("darts_candidates_started", "Started candidates.")
        self._ended_candidates = self._counters(
            "darts_candidates_ended",
            "Ended candidates by reason: 'selected', or why they were discarded.",
            "reason",
            ("selected", *DiscardReason),
        )
        self._cut_candidates = self._counter(
            "darts_candidates_cut", "Returned candidates that were cut at the deadline."
        )
        self._tokens = self._counters(
            "darts_tokens",
            "Tokens of all candidates (generated), of returned candidates (returned), of returned candidates by older "
            "weights (stale), and of other candidates (wasted).",
            "kind",
            (*KINDS, "stale", "wasted"),
        )
        self._resumed_groups = self._counter(
            "darts_resumed_groups",
            "Groups that continued the tokens of an earlier batch.",
        )
        self._resumed_tokens = self._counter(
            "darts_resumed_tokens",
            "Tokens of earlier batches that were continued and not generated again.",
        )
        self._candidates_per_group = self._histogram(
            "darts_candidates_per_group",
            "Candidates started per group.",
            CANDIDATE_BUCKETS,
        )
        self._group_seconds = self._histogram(
            "darts_group_duration_seconds",
            "Time from a group's first candidate to its end.",
            SECONDS_BUCKETS,
        )
        self._tail_wait = self._histogram(
            "darts_tail_wait_seconds",
            "Time from the finish of the K-th trajectory to the completed group.",
            SECONDS_BUCKETS,
        )
        self._trajectory_length = self._histogram(
            "darts_trajectory_length_tokens",
            "Generated tokens per candidate (until it ended or was stopped), and per returned trajectory.",
            LENGTH_BUCKETS,
            "kind",
        )
        self._cohorts = self._counters(
            "darts_cohorts",
            "Ended cohorts, by whether they ran past the deadline to explore it.",
            "explored",
            BOOLEANS,
        )
        self._mean_candidates = self._gauge("darts_budget_mean_candidates", "Candidates per group of the last cohort.")
        self._deadline = self._gauge("darts_deadline_tokens", "Deadline of the last cohort that had one.")
        self._cohort_seconds = self._histogram(
            "darts_rollout_seconds",
            "Time from the start of a cohort's first group to the end of its last.",
            SECONDS_BUCKETS,
        )
        self._explored_candidates = self._counters(
            "darts_explored_candidates",
            "Tail candidates of explored cohorts, by whether they finished within the deadline or beyond it.",
            "deadline",
            ("beyond", "within"),
        )
        self._explored_beyond_tokens = self._counter(
            "darts_explored_beyond_tokens",
            "Tokens of explored tail candidates beyond the deadline.",
        )
        self._rewards = self._counters(
            "darts_rewards",
            "Reported rewards without repeated ones, by whether their trajectory was found.",
            "matched",
            BOOLEANS,
        )
        self._rewarded_groups = self._counters(
            "darts_rewarded_groups",
            "Groups whose returned trajectories all have rewards, by whether all rewards are equal.",
            "zero_variance",
            BOOLEANS,
        )
        self._votes = self._counters("darts_votes", "Ended votes by outcome.", "outcome", VoteOutcome)
        self._vote_stopped_candidates = self._counter(
            "darts_vote_candidates_stopped",
            "Candidates stopped because they could not change the result of a vote.",
        )
        self._deadline_gauges = {
            name: ReadMetric(GaugeMetricFamily(name, text, labels=("model_name", "policy")), registry)
            for name, text in DEADLINE_GAUGES.items()
        }
        self._reads = reads
        self._create_read_metrics(GAUGES, reads)
        self._create_read_metrics(TOTALS, reads, CounterMetricFamily)

    def single_request_classified(self, kind: TurnKind) -> None:
        self._single_requests[kind].inc()

    def group_closed(self, full: bool) -> None:
        self._joined_groups[full].inc()

    def prompts_skipped(self, count: int) -> None:
        self._skipped_prompts.inc(count)

    def candidates_started(self, count: int) -> None:
        self._started_candidates.inc(count)

    def group_ended(self, record: GroupRecord) -> None:
        self._ended_groups[record.outcome].inc()
        self._candidates_per_group.labels(self._model).observe(len(record.candidates))
        self._group_seconds.labels(self._model).observe(record.ended_at - record.started_at)
        if record.tail_wait is not None:
            self._tail_wait.labels(self._model).observe(record.tail_wait)

        self._tokens["generated"].inc(record.generated_tokens)
        self._tokens["returned"].inc(record.returned_tokens)
        self._tokens["wasted"].inc(record.generated_tokens - record.returned_tokens)
        resumed_tokens = sum(candidate.resumed for candidate in record.candidates)
        if resumed_tokens:
            self._resumed_groups.inc()
            self._resumed_tokens.inc(resumed_tokens)

        for candidate in record.candidates:
            self._ended_candidates[candidate.reason or "selected"].inc()
            # A carried candidate counts at its end, in a later group.
            if candidate.reason is not DiscardReason.CARRIED:
                self._trajectory_length.labels(self._model, "generated").observe(candidate.tokens)
            if candidate.selected_as is not None:
                self._trajectory_length.labels(self._model, "returned").observe(candidate.tokens)
                if candidate.cut:
                    self._cut_candidates.inc()
            is_tail = candidate.selected_as in (SelectedAs.LONG, SelectedAs.LONG_TRUNCATED, SelectedAs.FILL)
            if record.explored and record.deadline is not None and is_tail:
                tokens_beyond = max(0, candidate.tokens - record.deadline)
                self._explored_candidates["beyond" if tokens_beyond else "within"].inc()
                self._explored_beyond_tokens.inc(tokens_beyond)

        # Only a policy with a deadline has `max_lost`. Its first group adds its series, and later groups may change it.
        if record.max_lost is not None:
            for name, gauge in self._deadline_gauges.items():
                read = partial(self._reads[name], record.policy, record.max_lost)
                gauge.reads[self._model, record.policy] = read

    def cohort_ended(self, record: CohortRecord) -> None:
        self._cohorts[record.explored].inc()
        self._tokens["stale"].inc(record.stale_tokens)
        self._mean_candidates.labels(self._model).set(record.mean_candidates)
        if record.deadline is not None:
            self._deadline.labels(self._model).set(record.deadline)
        self._cohort_seconds.labels(self._model).observe(record.measured_seconds)

    def rewards_reported(self, matched: int, unknown: int) -> None:
        self._rewards[True].inc(matched)
        self._rewards[False].inc(unknown)

    def group_rewarded(self, zero_variance: bool) -> None:
        self._rewarded_groups[zero_variance].inc()

    def vote_ended(self, outcome: VoteOutcome, stopped: int) -> None:
        self._votes[outcome].inc()
        self._vote_stopped_candidates.inc(stopped)
