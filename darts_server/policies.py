"""The policies by name: the one table of what there is, and of what each is composed of."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class Candidates(Enum):
    """How many candidates a prompt gets."""

    SIZE = auto()
    """As many as are returned."""
    BUDGET = auto()
    """The same number for every prompt, by the budget."""
    SPREAD = auto()
    """More for prompts whose lengths vary more, with the budget as the mean."""
    KEEP_RATIO = auto()
    """So many that as many as are returned are left after pruning, on average."""


class Returned(Enum):
    """Which candidates are returned."""

    ALL = auto()
    TAIL = auto()
    """The shortest, and some from the tail: sampled, the longest, or none."""
    CUT_TAIL = auto()
    """The shortest, and a sampled tail that is cut at the deadline."""
    ALL_CUT = auto()
    """All of them, cut at the deadline."""
    SURVIVORS = auto()
    """Those that are not pruned, all or a sample of them."""
    CHOSEN = auto()
    """As another policy does it, chosen for each cohort."""


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """What a name stands for.

    ``candidates``: ``None`` where nothing is shaped under that name. ``prunes``: candidates are scored while they run,
    and some are stopped by their score.
    """

    candidates: Candidates | None
    returned: Returned
    about: str
    prunes: bool = False

    @property
    def is_shaping(self) -> bool:
        """Whether it has a shaping of its own."""
        return self.returned not in (Returned.ALL, Returned.CHOSEN)


OFF = "off"
AUTO = "auto"
POLICIES: Mapping[str, NamedPolicy] = {
    OFF: NamedPolicy(None, Returned.ALL, "unshaped"),
    "uniform": NamedPolicy(Candidates.BUDGET, Returned.TAIL, "the same number of candidates for every prompt"),
    "darts": NamedPolicy(Candidates.SPREAD, Returned.TAIL, "more candidates for prompts whose lengths vary more"),
    "darts_cut": NamedPolicy(
        Candidates.SPREAD, Returned.CUT_TAIL, "as darts, with a sampled tail that is cut at a deadline"
    ),
    "cap": NamedPolicy(
        Candidates.SIZE, Returned.ALL_CUT, "no more candidates than are returned, all of them cut at the deadline"
    ),
    "arrol": NamedPolicy(
        Candidates.KEEP_RATIO,
        Returned.SURVIVORS,
        "candidates are scored while they run, and some are pruned at random by their probability of being correct",
        prunes=True,
    ),
    "darts+arrol": NamedPolicy(Candidates.SPREAD, Returned.TAIL, "darts and arrol together", prunes=True),
    AUTO: NamedPolicy(
        None,
        Returned.CHOSEN,
        "whichever of --auto-allow is expected to make a step the fastest, off at first",
    ),
}


def describe_policies() -> str:
    """Return a sentence for each policy."""
    return " ".join(f"{name}: {policy.about}." for name, policy in POLICIES.items())
