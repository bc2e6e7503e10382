"""Choose how many prompts of a batch run at once under policy `auto`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from darts_server.policy.auto import AheadChoice, AheadOutcome, AheadState, AutoLimits, choose_ahead, learn_ahead
from darts_server.records import CohortRecord
from darts_server.rollout.learned.documents import StoredValues, json_kind
from darts_server.rollout.learned.statistics import Statistics

STATE = json_kind("ahead", AheadState)


class Auto:
    """Choose for batches that resume prompts, and learn by group size. ``opening``: see `Gate.opening`."""

    def __init__(self, statistics: Statistics, opening: Callable[[], int | None]) -> None:
        self.statistics = statistics
        self.opening = opening
        self.states = StoredValues(statistics.documents, STATE)

    def load_state(self, size: int) -> AheadState:
        return self.states.load(str(size)) or AheadState()

    def choose(
        self,
        limits: AutoLimits,
        size: int,
        needed: int,
        offered: int,
        lost: int,
    ) -> "AutoBatch":
        """Choose how many of the ``offered`` prompts run in a batch that ends with ``needed`` complete groups.

        ``lost``: number of tokens of earlier batches for these prompts that cannot be used.
        """
        choice = choose_ahead(limits, self.load_state(size), needed, offered)
        return AutoBatch(self, limits, size, choice, lost)


@dataclass(slots=True)
class AutoBatch:
    """A batch whose number of prompts `auto` has chosen.

    ``opening``: the gate's opening when the batch started, or None if the gate was closed.
    ``generation``: the documents' generation when the batch started, or None before.
    """

    auto: Auto
    limits: AutoLimits
    size: int
    choice: AheadChoice
    lost: int
    opening: int | None = None
    generation: int | None = None

    def start(self) -> None:
        """Called when the first group starts."""
        self.opening = self.auto.opening()
        self.generation = self.auto.statistics.documents.generation

    def end(self, record: CohortRecord) -> None:
        """Learn from the batch after its last group has ended."""
        statistics = self.auto.statistics
        # No group has started, or the learned state was restored meanwhile.
        if self.generation != statistics.documents.generation:
            return
        groups = sorted(record.returned_lengths, key=sum, reverse=True)
        seconds = None
        alone: Sequence[float] = ()
        if record.completed >= self.choice.needed:
            # While the gate is closed, engines are paused or run empty, so the time says nothing.
            if self.opening is not None and self.auto.opening() == self.opening:
                seconds = record.measured_seconds
            # The longest groups start first.
            alone = statistics.latency.completion_seconds(groups)
        outcome = AheadOutcome(
            returned=sum(map(sum, groups)),
            stale=record.stale_tokens,
            generated=record.new_tokens - self.lost,
            seconds=seconds,
            alone=alone,
        )
        state = learn_ahead(self.limits, self.auto.load_state(self.size), self.choice, outcome)
        self.auto.states.save(str(self.size), asdict(state))
