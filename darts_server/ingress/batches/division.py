"""Divide the prompts of a batch among replicas."""

from collections.abc import Mapping, Sequence

SLACK = 0.05
"""By how much of an even share a replica may be loaded more, so that prompts stay where their statistics are. A small
part, as a step ends with its slowest replica."""


def divide(
    works: Sequence[float], fixed: Mapping[int, str], homes: Mapping[int, str], loads: Mapping[str, float]
) -> dict[str, list[int]]:
    """Give each prompt to a replica, the longest first: to the one where it was before, or else to the least loaded.

    Args:
        works: expected tokens of each prompt's group.
        fixed: prompts that have to go to a certain replica, by their numbers.
        homes: prompts that another replica gets only if this one has an even share without them.
        loads: expected tokens that run on each replica already, by its name.

    Returns:
        Numbers of prompts, in their order, of each replica that gets any.
    """
    loads = dict(loads)
    share = (sum(works) + sum(loads.values())) / len(loads) * (1 + SLACK)
    parts: dict[str, list[int]] = {name: [] for name in loads}
    for number, name in fixed.items():
        parts[name].append(number)
        loads[name] += works[number]
    for number in sorted((n for n in range(len(works)) if n not in fixed), key=lambda n: -works[n]):
        name = min(loads, key=lambda each: (loads[each], len(parts[each])))
        if number in homes and loads[homes[number]] + works[number] <= share:
            name = homes[number]
        parts[name].append(number)
        loads[name] += works[number]
    return {name: sorted(numbers) for name, numbers in parts.items() if numbers}


def share_budget(budget: int, sizes: Sequence[int]) -> list[int]:
    """Divide a budget of candidates in proportion to the numbers of prompts; each share is rounded up or down.

    What each prompt must and may have on average holds for every part, then, if it holds for the batch.
    """
    total, shares, given, seen = sum(sizes), [], 0, 0
    for size in sizes:
        seen += size
        shares.append(budget * seen // total - given)
        given += shares[-1]
    return shares
