"""Choose how many prompts of a batch run at once under policy `auto`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from darts_server.policy.auto import AheadChoice, AheadOutcome, AheadState, AutoLimits, choose_ahead, learn_ahead
from darts_server.records import CohortRecord
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import Statistics

STATE = json_kind("ahead", AheadState)


class Auto:
    """Choose for batches that resume prompts, and learn by group size. `gate_opening` returns `Gate.opening_number`."""

    def __init__(self, statistics: Statistics, gate_opening: Callable[[], int | None]) -> None:
        self.statistics = statistics
        self.gate_opening = gate_opening
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
        """Choose how many of the prompts run in a batch that ends with ``num_needed`` complete groups.

        ``lost_tokens``: tokens of earlier batches for these prompts that cannot be used.
        """
        choice = choose_ahead(limits, self.load_state(size), num_needed, num_prompts)
        return AutoBatch(self, limits, size, choice, lost_tokens)


@dataclass(slots=True)
class AutoBatch:
    """A batch whose number of prompts `auto` has chosen.

    ``opening_at_start``: the gate's opening when the first group started, or None if the gate was closed.
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
        self.opening_at_start = self.auto.gate_opening()
        self.generation_at_start = self.auto.statistics.documents.generation

    def learn(self, record: CohortRecord) -> None:
        statistics = self.auto.statistics
        # No group has started, or the learned state was restored meanwhile.
        if self.generation_at_start != statistics.documents.generation:
            return
        # The longest groups start first.
        lengths_by_group = sorted(record.returned_lengths, key=sum, reverse=True)
        measured_seconds = None
        expected_seconds_alone: Sequence[float] = ()
        if record.completed >= self.choice.needed:
            # While the gate is closed, engines are paused or run empty, so the time says nothing.
            if self.opening_at_start is not None and self.auto.gate_opening() == self.opening_at_start:
                measured_seconds = record.measured_seconds
            expected_seconds_alone = statistics.latency.completion_seconds(lengths_by_group)
        outcome = AheadOutcome(
            returned=sum(map(sum, lengths_by_group)),
            stale=record.stale_tokens,
            generated=record.new_tokens - self.lost_tokens,
            seconds=measured_seconds,
            alone=expected_seconds_alone,
        )
        state = learn_ahead(self.limits, self.auto.load_state(self.size), self.choice, outcome)
        self.auto.states.save(str(self.size), asdict(state))
