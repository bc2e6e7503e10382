"""What is said of and by a head, wherever it is trained. Nothing here imports torch."""

import math
from dataclasses import dataclass
from enum import StrEnum

from darts_server.policy.pruning.calibration import MAX_WEIGHT
from darts_server.quality.evaluation import WINDOW


class HeadStatus(StrEnum):
    """Whether a score is the head's, and where not, why: then it is the prior."""

    READY = "ready"
    NO_LABELS = "no_labels"
    """No reward was ever reported."""
    FEW_LABELS = "few_labels"
    ONE_CLASS = "one_class"
    """All labels that are remembered are alike."""
    UNTRAINED = "untrained"
    """There are labels enough, and nobody has trained it yet."""
    DIVERGED = "diverged"
    """The last training went wrong and was undone."""
    BAD_FEATURE = "bad_feature"
    """This hidden state has values that are not finite."""
    TRAINER_LOST = "trainer_lost"
    """The process that trains it died too often."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """``hidden``: units of the hidden layer. ``batch``: examples a step. ``capacity``: examples remembered.
    ``half_life``: examples after which one is drawn half as often. ``fewest``: examples before it is trained.
    ``corrected``: inverse propensity weights of at most ``most_weight``; the paper's form is without.
    ``window``: labels that its figures are taken over.
    """

    hidden: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    batch: int = 64
    capacity: int = 4096
    half_life: float = 2048.0
    fewest: int = 64
    corrected: bool = True
    most_weight: float = MAX_WEIGHT
    window: int = WINDOW
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.hidden, self.batch) < 1:
            raise ValueError(f"hidden and batch must be at least 1, got {self.hidden} and {self.batch}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if not 1 <= self.fewest <= self.capacity:
            raise ValueError(f"fewest must be in [1, capacity = {self.capacity}], got {self.fewest}")
        if not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life must be finite and above 0, got {self.half_life}")


@dataclass(frozen=True, slots=True)
class Score:
    """``value``: s' in [0, 1]. ``status``: whether it is the head's."""

    value: float
    status: HeadStatus


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """``steps`` that were made and kept, and their mean ``loss`` in nats; ``None`` without any."""

    steps: int
    loss: float | None
