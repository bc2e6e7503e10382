"""Which M of the finished trajectories are nearest to a wanted share of correct ones.

Of the calibrated chances q, M are chosen so that |sum q - rho M| is least: their expected share of correct ones is
nearest rho, where the group's reward variance is largest for rho = 1/2. This is a subset-sum problem. It is solved by
dynamic programming over sums of q rounded to multiples of 1/R, for each number of trajectories, with sets of sums as
the bits of integers.

What is exact: for q that are multiples of 1/R the choice is the best of all subsets. Rounding moves any subset's sum by
at most M/(2R), so for any other q the chosen share is off the best by at most 1/R. R is as fine as `TABLE_BITS` allow:
2^14 for 8 of 16, 2^13 for 16 of 64 and 2^9 for 64 of 128; the noise of q itself is far above that.
"""

from collections.abc import Sequence
from fractions import Fraction

TABLE_BITS = 2**26
"""8 MiB, and some ten milliseconds, where it takes most."""
FINEST = 2**14


def select_nearest_mean(qualities: Sequence[float], size: int, target: float) -> tuple[int, ...]:
    """Indices, ascending, of the ``size`` whose mean q is nearest ``target``; of all if there are no more.

    Of equally near choices it is the one with the earliest indices: the first in lexicographic order.

    Raises:
        ValueError: ``size`` is below 1, or a q or the target is outside [0, 1].
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not all(0 <= x <= 1 for x in (*qualities, target)):
        raise ValueError("qualities and target must be in [0, 1]")
    if len(qualities) <= size:
        return tuple(range(len(qualities)))
    grid = grid_resolution(size, len(qualities))
    units = [round(q * grid) for q in qualities]
    sums = _reachable(units, size)
    return _earliest(units, size, sums, _nearest(sums[0][size], Fraction(target) * size * grid))


def grid_resolution(size: int, candidates: int) -> int:
    """R for ``size`` of so many ``candidates``, a power of two."""
    fits = 2 * TABLE_BITS // (size * size * max(candidates - size, 1))
    return max(1, min(FINEST, 1 << max(fits.bit_length() - 1, 0)))


def _reachable(units: Sequence[int], size: int) -> list[dict[int, int]]:
    """For each i and k, the sums of k of ``units[i:]`` as set bits, where ``size`` in all can come of it."""
    tables: list[dict[int, int]] = [{0: 1}]
    for left, unit in enumerate(reversed(units), start=1):
        before = tables[-1]
        fewest = max(0, size - (len(units) - left))
        tables.append({k: before.get(k, 0) | before.get(k - 1, 0) << unit for k in range(fewest, min(size, left) + 1)})
    return tables[::-1]


def _nearest(sums: int, wanted: Fraction) -> list[int]:
    """The one or two sums nearest to what is wanted."""
    whole = int(wanted)
    below = (sums & ((2 << whole) - 1)).bit_length() - 1
    higher = sums >> (whole + 1)
    above = whole + (higher & -higher).bit_length() if higher else -1
    found = [s for s in (below, above) if s >= 0]
    least = min(abs(s - wanted) for s in found)
    return [s for s in found if abs(s - wanted) == least]


def _earliest(units: Sequence[int], size: int, sums: list[dict[int, int]], wanted: list[int]) -> tuple[int, ...]:
    chosen: list[int] = []
    for i, unit in enumerate(units):
        rest = sums[i + 1].get(size - len(chosen) - 1, 0)
        able = [s - unit for s in wanted if s >= unit and rest >> (s - unit) & 1]
        if able:
            chosen.append(i)
            wanted = able
    return tuple(chosen)
