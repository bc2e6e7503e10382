"""Choose M of N trajectories whose mean quality is nearest a target share of correct ones.

From calibrated probabilities q to end correct, choose M so that |sum q - rho M| is least: their expected share of
correct ones is then nearest rho. For rho = 1/2 that is where the variance of a group's rewards is largest (ARRoL).

This is a subset-sum problem, solved by dynamic programming over sums of q rounded to multiples of 1/R, one set of
reachable sums for each number of trajectories. A set is one big integer whose bit s is set if the sum s can be reached,
so that adding a trajectory to all subsets is a shift and an "or".

For q that are multiples of 1/R the choice is the best of all subsets. Rounding moves a subset's sum by at most M/(2R),
so for any other q the mean of the choice is off the best by at most 1/R. R is as fine as `TABLE_BITS` allow: 2^14 for 8
of 16, 2^13 for 16 of 64 and 2^9 for 64 of 128; the noise of q itself is far above that. For 512 of 1024 R is 1: each q
counts as 0 or 1, and all sums between the least and the largest can be reached, which needs no tables.
"""

from collections.abc import Sequence
from fractions import Fraction

TABLE_BITS = 2**26
"""8 MiB, and some ten milliseconds in the worst case."""
FINEST = 2**14


def select_nearest_mean(qualities: Sequence[float], size: int, target: float) -> tuple[int, ...]:
    """Return the indices, ascending, of the ``size`` qualities whose mean is nearest ``target``.

    If there are no more than ``size``, all are returned. Of equally near choices the first in lexicographic order.

    Raises:
        ValueError: ``size`` is below 1, or a quality or the target is outside [0, 1].
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not all(0 <= x <= 1 for x in (*qualities, target)):
        raise ValueError("qualities and target must be in [0, 1]")
    if len(qualities) <= size:
        return tuple(range(len(qualities)))
    grid = grid_resolution(size, len(qualities))
    units = [round(q * grid) for q in qualities]
    wanted = Fraction(target) * size * grid
    if grid == 1:
        return choose_of_two_values(units, size, wanted)
    sums = _reachable_sums(units, size)
    return _first_choice(units, size, sums, _nearest_sums(sums[0][size], wanted))


def grid_resolution(size: int, candidates: int) -> int:
    """Return R for ``size`` of so many ``candidates``: a power of two, as large as the tables' memory allows."""
    fits = 2 * TABLE_BITS // (size * size * max(candidates - size, 1))
    return max(1, min(FINEST, 1 << max(fits.bit_length() - 1, 0)))


def choose_of_two_values(units: Sequence[int], size: int, wanted: Fraction) -> tuple[int, ...]:
    """Return the first choice in lexicographic order with the sum nearest ``wanted``, of ``units`` that are 0 or 1."""
    ones = [i for i, unit in enumerate(units) if unit]
    zeros = [i for i, unit in enumerate(units) if not unit]
    least, most = max(0, size - len(zeros)), min(size, len(ones))
    sums = {min(max(whole, least), most) for whole in (int(wanted), int(wanted) + 1)}
    nearest = min(abs(s - wanted) for s in sums)
    return min(tuple(sorted(ones[:s] + zeros[: size - s])) for s in sums if abs(s - wanted) == nearest)


def _reachable_sums(units: Sequence[int], size: int) -> list[dict[int, int]]:
    """Return for each i and k the sums of k of ``units[i:]`` as set bits.

    Only for k from which ``size`` in all can still be reached.
    """
    tables: list[dict[int, int]] = [{0: 1}]
    for left, unit in enumerate(reversed(units), start=1):
        before = tables[-1]
        fewest = max(0, size - (len(units) - left))
        tables.append({k: before.get(k, 0) | before.get(k - 1, 0) << unit for k in range(fewest, min(size, left) + 1)})
    return tables[::-1]


def _nearest_sums(sums: int, wanted: Fraction) -> list[int]:
    """Return the one or two reachable sums nearest ``wanted``."""
    whole = int(wanted)
    below = (sums & ((2 << whole) - 1)).bit_length() - 1
    higher = sums >> (whole + 1)
    above = whole + (higher & -higher).bit_length() if higher else -1
    found = [s for s in (below, above) if s >= 0]
    least = min(abs(s - wanted) for s in found)
    return [s for s in found if abs(s - wanted) == least]


def _first_choice(units: Sequence[int], size: int, sums: list[dict[int, int]], wanted: list[int]) -> tuple[int, ...]:
    """Return the lexicographically first choice with one of the ``wanted`` sums.

    Each index in turn is taken if the rest of a wanted sum can be reached with later ones.
    """
    chosen: list[int] = []
    for i, unit in enumerate(units):
        rest = sums[i + 1].get(size - len(chosen) - 1, 0)
        reachable = [s - unit for s in wanted if s >= unit and rest >> (s - unit) & 1]
        if reachable:
            chosen.append(i)
            wanted = reachable
    return tuple(chosen)
