from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from darts_server.policy.auto import AheadChoice, AheadOutcome, AheadState, AutoLimits, choose_ahead, learn_ahead
from darts_server.records import CohortRecord
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import Statistics

STATE = json_kind("ahead", AheadState)


class Auto:
    """Chooses how many prompts run at once under policy `auto`, and learns by group size."""

    def __init__(self, statistics: Statistics, gate_opening_number: Callable[[], int | None]) -> None:
        self.statistics = statistics
        self.gate_opening_number = gate_opening_number
        self.states = StoredValues(statistics.documents, STATE)

    def load_state(self, size: int) -> AheadState:
        return self.states.load(str(size)) or AheadState()

    def choose(
        self,
        limits: AutoLimits,
        size: int,
        num_needed: int,
        num_prompts: int,
        lost_tokens: int,
    ) -> "AutoBatch":
        """Choose for a batch that ends with ``num_needed`` complete groups.

        ``lost_tokens``: tokens of earlier batches for these prompts that cannot be used.
        """
        # Prompts beyond the needed number run ahead: a later batch resumes them.
        choice = choose_ahead(limits, self.load_state(size), num_needed, num_prompts)
        return AutoBatch(self, limits, size, choice, lost_tokens)


@dataclass(slots=True)
class AutoBatch:
    """``opening_at_start``: number of the gate's opening when the first group started, or None if the gate was closed.
    ``generation_at_start``: the documents' generation then, or None before.
    """

    auto: Auto
    limits: AutoLimits
    size: int
    choice: AheadChoice
    lost_tokens: int
    opening_at_start: int | None = None
    generation_at_start: int | None = None

    def mark_started(self) -> None:
        self.opening_at_start = self.auto.gate_opening_number()
        self.generation_at_start = self.auto.statistics.documents.generation

    def learn(self, record: CohortRecord) -> None:
        statistics = self.auto.statistics
        # No group has started, or a restore has changed the generation.
        if self.generation_at_start != statistics.documents.generation:
            return
        # A batch starts its longest groups first.
        lengths_by_group = sorted(record.returned_lengths, key=sum, reverse=True)
        measured_seconds = None
        # Time of each group if only the returned trajectories ran, all from the start.
        completion_seconds_alone: Sequence[float] = ()
        if record.completed >= self.choice.needed:
            # While the gate is closed, engines are paused or run empty.
            if self.opening_at_start is not None and self.auto.gate_opening_number() == self.opening_at_start:
                measured_seconds = record.measured_seconds
            completion_seconds_alone = statistics.latency.completion_seconds(lengths_by_group)
        outcome = AheadOutcome(
            returned=sum(map(sum, lengths_by_group)),
            stale=record.stale_tokens,
            # Tokens that replace lost tokens are no progress.
            generated=record.new_tokens - self.lost_tokens,
            seconds=measured_seconds,
            alone=completion_seconds_alone,
        )
        state = learn_ahead(self.limits, self.auto.load_state(self.size), self.choice, outcome)
        self.auto.states.save(str(self.size), asdict(state))
