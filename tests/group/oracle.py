"""The definition of the selection rules, by counting over known fates. It is slow, and shares no code with the rules.

Rule objects serve as data only: which rule, and how many places.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from darts_server.group.sampled_tail import CutTail, SampledTail
from darts_server.group.selection import AllSurvivors, DualEnd, InOrder, SampledSurvivors
from darts_server.types import SelectedAs


@dataclass(frozen=True, slots=True)
class Fate:
    """The true end of a candidate. ``valid``: at a stop token, and not at the length limit."""

    length: int
    valid: bool
    tail_draw: float


Fates = Mapping[int, Fate]
Rule = InOrder | DualEnd | SampledTail | CutTail | AllSurvivors | SampledSurvivors


def chosen(rule: Rule, fates: Fates, limit: int | None = None) -> dict[int, SelectedAs]:
    """Return the selection by ``rule`` if all candidates ended and none was cut."""
    match rule:
        case InOrder(size):
            return _first_by_index(fates, size)
        case AllSurvivors():
            return dict.fromkeys(fates, SelectedAs.SURVIVOR)
        case SampledSurvivors(size):
            lowest = [i for i, f in fates.items() if sum(o.tail_draw < f.tail_draw for o in fates.values()) < size]
            return dict.fromkeys(lowest, SelectedAs.SURVIVOR)
        case DualEnd(short, longest):
            return _both_ends(fates, short, longest)
        case SampledTail(short, longest):
            truncated = SelectedAs.FILL if _valid(fates) < short else SelectedAs.LONG_TRUNCATED
            first = {i: SelectedAs.SHORT for i, fate in fates.items() if fate.valid and _valid_before(i, fates) < short}
            rest = {i: fate for i, fate in fates.items() if i not in first}
            drawn = {
                i: SelectedAs.LONG if fate.valid else truncated
                for i, fate in rest.items()
                if sum(other.tail_draw < fate.tail_draw for other in rest.values()) < rule.size - len(first)
            }
            return first | drawn


def has_cut_length(rule: Rule) -> bool:
    return isinstance(rule, CutTail)


def truncated(rule: Rule, fates: Fates, cut_length: int | None, kept: Collection[int] = ()) -> Fates:
    """Return the fates if ``cut_length`` had been the length limit of all candidates that are not ``kept``."""
    if cut_length is None or not has_cut_length(rule):
        return fates
    return {
        i: replace(fate, length=cut_length, valid=False) if fate.length > cut_length and i not in kept else fate
        for i, fate in fates.items()
    }


def cut_lengths(rule: Rule, fates: Fates, limit: int | None, cut_length: int | None = None) -> dict[int, int]:
    """Return the cut candidates with their lengths, if ``limit`` and ``cut_length`` were set from the beginning."""
    if not isinstance(rule, CutTail) or limit is None:
        return {}
    ends = (end for end in (deadline(fates, rule.completion_place, limit), cut_length) if end is not None)
    end = min(ends, default=None)
    if end is None:
        return {}
    drawn = [i for i, end in chosen(rule, fates).items() if end is not SelectedAs.SHORT]
    return {i: end for i in drawn if fates[i].length > end}


def deadline(fates: Fates, size: int, limit: int | None) -> int | None:
    """Return the limit or the length of the M-th shortest valid candidate, whichever is more."""
    if limit is None:
        return None
    lasts = [fate.length for i, fate in fates.items() if fate.valid and _valid_before(i, fates) == size - 1]
    return max(limit, lasts[0]) if lasts else None


def _first_by_index(fates: Fates, size: int) -> dict[int, SelectedAs]:
    return {i: SelectedAs.SHORT for i in fates if sum(other < i for other in fates) < size}


def _both_ends(fates: Fates, short: int, longest: int) -> dict[int, SelectedAs]:
    if _valid(fates) < short + longest:
        return _valid_first(fates, short=short, size=short + longest)
    before = {i: _valid_before(i, fates) for i, fate in fates.items() if fate.valid}
    first = {i: SelectedAs.SHORT for i, count in before.items() if count < short}
    last = {i: SelectedAs.LONG for i, count in before.items() if len(before) - count <= longest}
    return first | last


def _valid_first(fates: Fates, *, short: int, size: int) -> dict[int, SelectedAs]:
    """Return the first ``size`` valid candidates, the first ``short`` of them as short, then invalid ones as fill."""
    left = size - _valid(fates)
    ends = {}
    for i, fate in fates.items():
        if fate.valid and _valid_before(i, fates) < size:
            ends[i] = SelectedAs.SHORT if _valid_before(i, fates) < short else SelectedAs.LONG
        if not fate.valid and sum(_precedes(j, i, fates) for j in fates if not fates[j].valid) < left:
            ends[i] = SelectedAs.FILL
    return ends


def _valid(fates: Fates) -> int:
    return sum(fate.valid for fate in fates.values())


def _valid_before(i: int, fates: Fates) -> int:
    return sum(_precedes(j, i, fates) for j in fates if fates[j].valid)


def _precedes(j: int, i: int, fates: Fates) -> bool:
    return fates[j].length < fates[i].length or (fates[j].length == fates[i].length and j < i)


# --- futures ----------------------------------------------------------------

Known = tuple[tuple[int, Fate], ...]
"""Fates of the candidates that ended."""
Open = tuple[tuple[int, int, float], ...]
"""Index, smallest number of tokens, and draw of each running candidate."""


@cache
def possible(
    rule: Rule, known: Known, running: Open, limit: int | None = None, cut_length: int | None = None
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the candidates that are in the group in some future, and the candidates that are in it in all futures.

    In a future each running candidate finishes with at least one more token. With ``InOrder`` it may fail instead,
    because its surplus candidates run only to replace failed candidates.
    """
    some: set[int] = set()
    everyone = frozenset(i for i, _ in known) | {i for i, _, _ in running}
    every = everyone
    kept = {i for i, _ in known}
    for fates in (truncated(rule, fates, cut_length, kept) for fates in futures(rule, known, running, limit)):
        group = chosen(rule, fates, limit).keys()
        some |= group
        every &= group
        if len(some) == len(everyone) and not every:
            break
    return frozenset(some), every


def futures(rule: Rule, known: Known, running: Open, limit: int | None = None) -> Iterator[Fates]:
    lengths = [fate.length for _, fate in known] + [tokens + 1 for _, tokens, _ in running]
    beyond = max([*lengths, limit or 0]) + 2
    ways: list[list[int | None]] = [
        [None, tokens + 1] if isinstance(rule, InOrder) else list(range(tokens + 1, beyond + 1))
        for _, tokens, _ in running
    ]
    for ends in product(*ways):
        ended = {
            i: Fate(length, valid=True, tail_draw=draw)
            for (i, _, draw), length in zip(running, ends, strict=True)
            if length is not None
        }
        yield dict(known) | ended
