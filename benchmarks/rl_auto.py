"""Whether `auto` is as fast as it must be, as the last table of `benchmarks.rl`.

From every start its steps may take 1.02 times as long as those of `off`, and 1.08 times as long as those of the best
fixed policy, which is found afterwards among those that are as right as `off`. Time is compared, and decode steps of
the engine, which other load on the machine does not change.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.rl_methods import AUTOS, BASE, choices, fixed
from benchmarks.rl_table import Difference, Runs, final_rights, markdown, step_seconds, trainings
from examples.tiny_rl.train_log import Entry

MOST_OF_OFF, MOST_OF_BEST = 1.02, 1.08


def run_seconds(entries: Sequence[Entry]) -> float:
    return sum(training.seconds.total for training in trainings(entries))


def decode_steps(entries: Sequence[Entry]) -> float:
    return fmean(training.decode_steps for training in trainings(entries))


COSTS: Mapping[str, Callable[[Sequence[Entry]], float]] = {
    "median step": step_seconds,
    "all steps": run_seconds,
    "decode steps": decode_steps,
}
"""What a run costs, by the name in the table. The median leaves out what `auto` spends to learn; the others do not."""


@dataclass(frozen=True)
class Ratio:
    """A policy's cost over that of ``other``, for each seed."""

    other: str
    each: Sequence[float]

    @property
    def median(self) -> float:
        return median(self.each)

    def __str__(self) -> str:
        spread = f" [{min(self.each):.2f}, {max(self.each):.2f}]" if len(self.each) > 1 else ""
        return f"{self.median:.2f}{spread}"


@dataclass(frozen=True)
class Comparison:
    """`auto` from one start by one cost: with `off`, with the best policy of its rules, and with the best of all."""

    with_off: Ratio
    with_own: Ratio
    with_any: Ratio

    def __str__(self) -> str:
        best = (f"{ratio} of {ratio.other}" for ratio in (self.with_own, self.with_any))
        return f"{self.with_off}; {'; '.join(best)}"


def ratio(runs: Runs, policy: str, other: str, cost: str) -> Ratio:
    of = COSTS[cost]
    return Ratio(other, [of(entries) / of(runs[other][seed]) for seed, entries in runs[policy].items()])


def best(runs: Runs, names: Iterable[str], cost: str) -> str:
    """Return the cheapest policy of those that are not certainly less right than `off`, which is one of them."""
    as_right = [name for name in names if name in runs and not is_less_right(runs, name)]
    return min([BASE, *as_right], key=lambda name: ratio(runs, name, BASE, cost).median)


def is_less_right(runs: Runs, policy: str) -> bool:
    """Whether a policy is certainly less right than `off` after as many steps."""
    difference = against_off(runs, policy)
    return difference.mean < 0 and difference.is_certain


def against_off(runs: Runs, policy: str) -> Difference:
    return Difference.of(final_rights(runs, policy), final_rights(runs, BASE))


def compare(start: str, runs: Runs, policy: str, cost: str) -> Comparison:
    own, every = best(runs, choices(policy, start), cost), best(runs, fixed(start), cost)
    return Comparison(*(ratio(runs, policy, other, cost) for other in (BASE, own, every)))


def auto_table(starts: Mapping[str, Runs]) -> str | None:
    """Format the table with its answers; ``None`` if `auto` was not run."""
    policies = [policy for policy in AUTOS if starts and all(policy in runs for runs in starts.values())]
    if not policies:
        return None
    head = ["start", "policy", "right, minus off", *COSTS]
    rows, answers = [], []
    for policy in policies:
        compared = {
            cost: {start: compare(start, runs, policy, cost) for start, runs in starts.items()} for cost in COSTS
        }
        for start, runs in starts.items():
            cells = [str(of_start[start]) for of_start in compared.values()]
            rows.append([start, policy, str(against_off(runs, policy)), *cells])
        less_right = [start for start, runs in starts.items() if is_less_right(runs, policy)]
        answers += [f"{policy}, {cost}: {answer(of_start)}." for cost, of_start in compared.items()]
        answers.append(f"{policy}, certainly less right than {BASE}: {', '.join(less_right) or 'from no start'}.")
    return "\n\n".join(
        [
            f"Do auto's steps cost at most {MOST_OF_OFF} times those of off, and {MOST_OF_BEST} times those of the "
            "best fixed policy?\nEach cell: over off; over the best policy of its rules; over the best of all policies "
            "and fixed caps. Medians over seeds, with the smallest and largest.",
            markdown(head, rows),
            "\n".join(answers),
        ]
    )


def answer(compared: Mapping[str, Comparison]) -> str:
    """Say for each bound whether it holds from every start, and with the worst ratio."""
    bounds: Sequence[tuple[str, float, Callable[[Comparison], Ratio]]] = (
        (f"{MOST_OF_OFF} of {BASE}", MOST_OF_OFF, lambda one: one.with_off),
        (f"{MOST_OF_BEST} of the best of its rules", MOST_OF_BEST, lambda one: one.with_own),
        (f"{MOST_OF_BEST} of the best of all", MOST_OF_BEST, lambda one: one.with_any),
    )
    parts = []
    for name, most, of in bounds:
        medians = {start: of(one).median for start, one in compared.items()}
        start = max(medians, key=medians.__getitem__)
        holds = "yes" if medians[start] <= most else "no"
        parts.append(f"at most {name}: {holds} ({medians[start]:.3f} from {start})")
    return "; ".join(parts)
