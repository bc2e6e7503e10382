"""Prometheus collectors of groups: candidates, tokens, lengths, deadlines, budgets, rewards and votes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from darts_server.metrics.collectors import Collectors, or_nan
from darts_server.types import (
    CohortRecord,
    DiscardReason,
    GroupRecord,
    Outcome,
    SelectedAs,
    VoteOutcome,
)

LENGTH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CANDIDATE_BUCKETS = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128, 256)
SECONDS_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
BATCH_SIZES = (1, 4, 16, 64, 256, 1024)
"""Where the latency curve is shown."""
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
KINDS = ("generated", "returned")
ANSWERS = ("right", "wrong")
BOOLEANS = ("true", "false")
ENDS = ("selected", *DiscardReason)

Values = dict[tuple[str, ...], Callable[[], float | None]]
"""By labels, how to ask for a value."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked for its present value whenever metrics are scraped; ``None`` from one means not known yet.

    ``tracked``: prompts with statistics. ``fault``: whether what is learned cannot be written. ``step_seconds``: of a
    decode step with so many sequences. ``mean_length``, ``length_quantile``: in tokens, of `KINDS`.
    ``budget_aversion``: lambda. ``lost_share``: of right answers, by the deadline. ``deadline_stretch``: the factor by
    which it is held back. ``pass_rate``: share of right ones among rewarded trajectories. ``answer_length``: mean in
    tokens, of `ANSWERS`. ``pattern_difference``, ``pattern_error``: right minus wrong, and its standard error.
    ``redundancy_scale``: how much of it there is room for.
    """

    tracked: Callable[[], float]
    fault: Callable[[], bool]
    step_seconds: Callable[[int], float | None]
    mean_length: Callable[[str], float | None]
    length_quantile: Callable[[str, float], float | None]
    budget_aversion: Callable[[], float]
    lost_share: Callable[[], float | None]
    deadline_stretch: Callable[[], float]
    pass_rate: Callable[[], float | None]
    answer_length: Callable[[str], float | None]
    pattern_difference: Callable[[], float | None]
    pattern_error: Callable[[], float | None]
    redundancy_scale: Callable[[], float] = lambda: 1.0


class Metrics(Collectors):
    """Implements the observer protocols of the rollout room."""

    def __init__(self, model_name: str, sources: Sources | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(model_name, registry)
        self._make_group_metrics()
        self._make_batch_metrics()
        self._make_reward_metrics()
        self._make_vote_metrics()
        if sources is not None:
            self._show(sources)

    def candidates_started(self, count: int) -> None:
        self._started.labels(self._model).inc(count)

    def group_ended(self, record: GroupRecord) -> None:
        self._groups.labels(self._model, record.outcome).inc()
        self._candidates.labels(self._model).observe(len(record.candidates))
        self._duration.labels(self._model).observe(record.ended_at - record.started_at)
        if record.tail_wait is not None:
            self._tail_wait.labels(self._model).observe(record.tail_wait)
        generated, returned = record.generated_tokens, record.returned_tokens
        self._count(self._tokens, {"generated": generated, "returned": returned, "wasted": generated - returned})
        if record.shadow is not None:
            shadow = record.shadow
            self._count(self._shadow, {"generated": shadow.generated, "returned": shadow.returned})
        self._look_at_candidates(record)

    def cohort_ended(self, record: CohortRecord) -> None:
        self._batches.labels(self._model, str(record.explored).lower()).inc()
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

    def _look_at_candidates(self, record: GroupRecord) -> None:
        for candidate in record.candidates:
            self._ended.labels(self._model, candidate.reason or "selected").inc()
            self._length.labels(self._model, "generated").observe(candidate.tokens)
            if candidate.selected_as is not None:
                self._length.labels(self._model, "returned").observe(candidate.tokens)
            if candidate.cut:
                self._cut.labels(self._model).inc()
            if (
                record.explored
                and record.deadline is not None
                and candidate.selected_as in (SelectedAs.LONG, SelectedAs.FILL)
            ):
                beyond = max(0, candidate.tokens - record.deadline)
                self._explored.labels(self._model, "beyond" if beyond else "within").inc()
                self._explored_tokens.labels(self._model).inc(beyond)

    def _count(self, counter: Counter, tokens: dict[str, int]) -> None:
        for kind, count in tokens.items():
            counter.labels(self._model, kind).inc(count)

    # --- making them --------------------------------------------------------

    def _make_group_metrics(self) -> None:
        self._groups = self._counter("darts_groups", "Groups that ended, by outcome.", "outcome", Outcome)
        self._started = self._counter("darts_candidates_started", "Candidates started.")
        self._ended = self._counter(
            "darts_candidates_ended", "Candidates that ended: 'selected', or why they were discarded.", "reason", ENDS
        )
        self._cut = self._counter("darts_candidates_cut", "Candidates that were returned cut at the deadline.")
        self._tokens = self._counter(
            "darts_tokens",
            "Tokens of all candidates (generated), of returned ones, of the others (wasted).",
            "kind",
            (*KINDS, "wasted"),
        )
        self._shadow = self._counter(
            "darts_shadow_tokens", "What the shadowed policy would have generated and returned.", "kind", KINDS
        )
        self._candidates = self._histogram(
            "darts_candidates_per_group", "Candidates started for a group.", CANDIDATE_BUCKETS
        )
        self._duration = self._histogram(
            "darts_group_duration_seconds", "From a group's first candidate to its end.", SECONDS_BUCKETS
        )
        self._tail_wait = self._histogram(
            "darts_tail_wait_seconds", "From the finish of the K-th trajectory to the completed group.", SECONDS_BUCKETS
        )
        self._length = self._histogram(
            "darts_trajectory_length_tokens",
            "Generated tokens of every candidate (stopped ones as far as they came) and of the returned ones.",
            LENGTH_BUCKETS,
            "kind",
        )

    def _make_batch_metrics(self) -> None:
        self._batches = self._counter(
            "darts_batches",
            "Batches of groups that ended, by whether they were let run past the deadline.",
            "explored",
            BOOLEANS,
        )
        self._mean_candidates = self._gauge("darts_budget_mean_candidates", "Candidates per group of the last batch.")
        self._deadline = self._gauge("darts_deadline_tokens", "Deadline of the last batch that had one.")
        self._rollout = self._histogram(
            "darts_rollout_seconds",
            "From a batch's allocation to the end of its last group, as predicted and as measured.",
            SECONDS_BUCKETS,
            "kind",
        )
        self._explored = self._counter(
            "darts_explored_candidates",
            "Candidates of the tail that were let run past the deadline, by where they ended.",
            "end",
            ("beyond", "within"),
        )
        self._explored_tokens = self._counter(
            "darts_explored_beyond_tokens", "Tokens of these that the deadline would have taken away."
        )

    def _make_reward_metrics(self) -> None:
        self._rewards = self._counter(
            "darts_rewards",
            "Rewards reported, repeated ones aside, by whether their trajectory is known.",
            "matched",
            BOOLEANS,
        )
        self._rewarded_groups = self._counter(
            "darts_rewarded_groups",
            "Groups of which all returned trajectories have rewards, by whether these are all equal.",
            "zero_variance",
            BOOLEANS,
        )

    def _make_vote_metrics(self) -> None:
        self._votes = self._counter("darts_votes", "Votes that came to an end, by outcome.", "outcome", VoteOutcome)
        self._vote_stopped = self._counter(
            "darts_vote_candidates_stopped", "Candidates that were stopped because they could not change a vote."
        )

    def _show(self, sources: Sources) -> None:
        self._set("darts_prompts_tracked", "Prompts with statistics.", {(): sources.tracked})
        self._set(
            "darts_store_fault",
            "1 while what is learned cannot be written, else 0.",
            {(): lambda: float(sources.fault())},
        )
        self._set("darts_budget_aversion", "Lambda of the utility budget.", {(): sources.budget_aversion})
        self._set(
            "darts_redundancy_scale",
            "Share of the redundancy that groups get now: 1, and less while too many candidates wait.",
            {(): sources.redundancy_scale},
        )
        self._set(
            "darts_deadline_lost_share",
            "Share of right answers that the deadline takes away, where rewards were reported.",
            {(): sources.lost_share},
        )
        self._set(
            "darts_deadline_stretch", "Factor by which the deadline is held back.", {(): sources.deadline_stretch}
        )
        self._set(
            "darts_step_seconds",
            "Seconds of a decode step by the number of sequences that run, as learned.",
            {(str(size),): partial(sources.step_seconds, size) for size in BATCH_SIZES},
            "sequences",
        )
        lengths: Values = {(kind, "mean"): partial(sources.mean_length, kind) for kind in KINDS}
        for kind, (name, share) in product(KINDS, QUANTILES.items()):
            lengths[kind, name] = partial(sources.length_quantile, kind, share)
        self._set(
            "darts_length_tokens",
            "Lengths of the last groups: generated (of stopped candidates estimated) and returned ones.",
            lengths,
            "kind",
            "statistic",
        )
        self._show_rewards(sources)

    def _show_rewards(self, sources: Sources) -> None:
        self._set("darts_pass_rate", "Share of right trajectories among rewarded ones.", {(): sources.pass_rate})
        self._set(
            "darts_answer_length_tokens",
            "Mean length of rewarded trajectories, right and wrong ones.",
            {(answer,): partial(sources.answer_length, answer) for answer in ANSWERS},
            "answer",
        )
        self._set(
            "darts_pattern_difference_tokens",
            "Mean length of right trajectories minus that of wrong ones: above 0 depth is needed, below it is not.",
            {(): sources.pattern_difference},
        )
        self._set(
            "darts_pattern_error_tokens",
            "Standard error of darts_pattern_difference_tokens.",
            {(): sources.pattern_error},
        )

    def _set(self, name: str, text: str, values: Values, *labels: str) -> None:
        """A gauge that asks for its values when it is scraped."""
        gauge = self._gauge(name, text, *labels)
        for labelled, value in values.items():
            gauge.labels(self._model, *labelled).set_function(or_nan(value))
