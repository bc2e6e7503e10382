"""The question that `benchmarks.rl` is for, as a table.

Which policy is at least as right as `off` at equal steps, and ahead of the best fixed cap in hindsight at equal cost,
from every start? Cost is time, or decode steps of the engine, which do not depend on other load on the machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from benchmarks.rl_methods import BASE
from benchmarks.rl_table import ERRORS, Difference, Runs, final_rights, markdown, rights_at_equal

COSTS = {"seconds": "time", "decode_steps": "decode steps"}
"""Names of costs, by their axis."""


class Verdict(StrEnum):
    """``YES``: not certainly less right than `off`, certainly ahead of the cap. ``OPEN``: ahead, within the errors."""

    YES = "yes"
    OPEN = "open"
    NO = "no"


@dataclass(frozen=True)
class Comparison:
    """A policy from one start, with `off` at equal steps, and with the best cap at equal cost."""

    with_off: Difference
    with_cap: Difference

    @property
    def verdict(self) -> Verdict:
        if self.with_cap.mean <= 0 or (self.with_off.mean < 0 and self.with_off.is_certain):
            return Verdict.NO
        return Verdict.YES if self.with_cap.is_certain else Verdict.OPEN

    def __str__(self) -> str:
        return f"{self.with_off}; {self.with_cap}; {self.verdict}"


def best_cap(runs: Runs, caps: Sequence[str], axis: str) -> str | None:
    """Return the cap that was most often right at equal cost; ``None`` if none was run.

    It is chosen by the same evaluations that it is compared by, which is to its advantage.
    """
    found = [cap for cap in caps if cap in runs]
    return max(found, key=lambda cap: float(np.mean(rights_at_equal(runs, cap, axis))), default=None)


def compare(runs: Runs, policy: str, cap: str, axis: str) -> Comparison:
    return Comparison(
        Difference.of(final_rights(runs, policy), final_rights(runs, BASE)),
        Difference.of(rights_at_equal(runs, policy, axis), rights_at_equal(runs, cap, axis)),
    )


def question(starts: Mapping[str, Runs], caps: Mapping[str, Sequence[str]], axis: str) -> str:
    """Format the table, with a row for each policy that was run from all starts; and the answer."""
    best = {start: cap for start, runs in starts.items() if (cap := best_cap(runs, caps[start], axis)) is not None}
    if not best:
        return "No fixed cap was run, so none can be compared with."
    every_cap = {cap for names in caps.values() for cap in names}
    policies = [p for p in next(iter(starts.values())) if p not in every_cap and all(p in starts[s] for s in best)]
    compared = {p: {start: compare(starts[start], p, cap, axis) for start, cap in best.items()} for p in policies}
    cost = COSTS[axis]
    head = ["policy", *(f"{start}: with off at equal steps; with {cap} at equal {cost}" for start, cap in best.items())]
    rows = [[policy, *(str(each) for each in of_start.values())] for policy, of_start in compared.items()]
    return "\n\n".join(
        [
            f"Which policy is at least as right as off at equal steps, and ahead of the best cap at equal {cost}?",
            markdown(head, rows),
            f"From every start ({', '.join(best)}), beyond {ERRORS} standard errors: {answer(compared, Verdict.YES)}. "
            f"Ahead everywhere, within them: {answer(compared, Verdict.YES, Verdict.OPEN)}.",
        ]
    )


def answer(compared: Mapping[str, Mapping[str, Comparison]], *accepted: Verdict) -> str:
    found = [policy for policy, of_start in compared.items() if all(c.verdict in accepted for c in of_start.values())]
    return ", ".join(found) or "none"
