"""Tables of figures in Markdown."""

import statistics
from collections.abc import Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def quartiles(values: list[float], digits: int) -> str:
    """Format the median, with the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
