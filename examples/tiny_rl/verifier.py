"""The tiny task's verifier, with the signature of veRL's reward functions.

    darts-server serve MODEL --verifier examples/tiny_rl/verifier.py:compute_score

It imports nothing of this repository, so that it also is an example of a file that a server loads.
"""

from collections.abc import Mapping

ANSWER = "#"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, object] | None = None
) -> float:
    """Return 1.0 if exactly the right digit follows the last ``#`` of an answer, else 0.0."""
    _, found, end = solution_str.rpartition(ANSWER)
    return float(bool(found) and end == ground_truth)
