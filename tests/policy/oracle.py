"""What the selection rules mean, by counting over known fates; slow, and shares no code with the rules.

The rule objects serve as data only: which rule, and how many seats.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from darts_server.policy.selection import InOrder, LongestTail, SampledTail, Shortest
from darts_server.types import End


@dataclass(frozen=True, slots=True)
class Fate:
    """How a candidate truly ends. ``valid``: by itself, not at the length limit."""

    length: int
    valid: bool
    draw: float


Fates = Mapping[int, Fate]
Rule = InOrder | Shortest | LongestTail | SampledTail


def chosen(rule: Rule, fates: Fates) -> dict[int, End]:
    """The group that ``rule`` makes of candidates that all ended."""
    match rule:
        case InOrder(size):
            return {
                i: End.SHORT if fate.valid else End.FILL
                for i, fate in fates.items()
                if sum(other < i for other in fates) < size
            }
        case Shortest(size):
            return _valid_first(fates, short=size, size=size)
        case LongestTail(short, longest):
            if _valid(fates) < short + longest:
                return _valid_first(fates, short=short, size=short + longest)
            before = {i: _valid_before(i, fates) for i, fate in fates.items() if fate.valid}
            first = {i: End.SHORT for i, count in before.items() if count < short}
            last = {i: End.LONG for i, count in before.items() if len(before) - count <= longest}
            return first | last
        case SampledTail(short, longest):
            if _valid(fates) < short:
                return _valid_first(fates, short=short, size=short + longest)
            first = {i: End.SHORT for i, fate in fates.items() if fate.valid and _valid_before(i, fates) < short}
            rest = {i: fate for i, fate in fates.items() if i not in first}
            drawn = {
                i: End.LONG if fate.valid else End.FILL
                for i, fate in rest.items()
                if sum(other.draw < fate.draw for other in rest.values()) < longest
            }
            return first | drawn


def _valid_first(fates: Fates, *, short: int, size: int) -> dict[int, End]:
    """The first ``size`` valid ones, those after the first ``short`` of them as long; then invalid ones as fill."""
    left = size - _valid(fates)
    ends = {}
    for i, fate in fates.items():
        if fate.valid and _valid_before(i, fates) < size:
            ends[i] = End.SHORT if _valid_before(i, fates) < short else End.LONG
        if not fate.valid and sum(_precedes(j, i, fates) for j in fates if not fates[j].valid) < left:
            ends[i] = End.FILL
    return ends


def _valid(fates: Fates) -> int:
    return sum(fate.valid for fate in fates.values())


def _valid_before(i: int, fates: Fates) -> int:
    return sum(_precedes(j, i, fates) for j in fates if fates[j].valid)


def _precedes(j: int, i: int, fates: Fates) -> bool:
    return fates[j].length < fates[i].length or (fates[j].length == fates[i].length and j < i)


# --- futures ----------------------------------------------------------------

Known = tuple[tuple[int, Fate], ...]
"""Fates of those that ended."""
Open = tuple[tuple[int, int, float], ...]
"""Index, number of tokens generated for sure, and draw of those that did not."""


@cache
def possible(rule: Rule, known: Known, open_ones: Open) -> tuple[frozenset[int], frozenset[int]]:
    """Who is in the group in some future, and who in all of them.

    In a future each open candidate ends by itself with at least one more token than it has. With ``InOrder`` it may
    drop out instead: lengths do not matter to that rule, so its surplus candidates only run as cover for the others.
    """
    some: set[int] = set()
    everyone = frozenset(i for i, _ in known) | {i for i, _, _ in open_ones}
    every = everyone
    for fates in _futures(rule, known, open_ones):
        group = chosen(rule, fates).keys()
        some |= group
        every &= group
        if len(some) == len(everyone) and not every:
            break
    return frozenset(some), every


def _futures(rule: Rule, known: Known, open_ones: Open) -> Iterator[Fates]:
    beyond = max([fate.length for _, fate in known] + [tokens + 1 for _, tokens, _ in open_ones], default=0) + 2
    ways: list[list[int | None]] = [
        [None, tokens + 1] if isinstance(rule, InOrder) else list(range(tokens + 1, beyond + 1))
        for _, tokens, _ in open_ones
    ]
    for lengths in product(*ways):
        ended = {
            i: Fate(length, valid=True, draw=draw)
            for (i, _, draw), length in zip(open_ones, lengths, strict=True)
            if length is not None
        }
        yield dict(known) | ended
