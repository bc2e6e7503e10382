"""How many tokens trajectories are expected to have, learned from answers."""

import re
from collections import OrderedDict
from collections.abc import Hashable

KEPT = 65_536
FIRST_EXPECTED = 512.0
"""Tokens of a trajectory before any answer was seen. Only how requests compare with each other matters."""
WEIGHT = 0.3
"""Of the latest answer to a prompt, against all earlier ones."""
OVERALL_WEIGHT = 0.02
"""Of the latest answer to any prompt."""

_USAGE = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})')
_TOKEN_IDS = re.compile(rb'"token_ids"\s*:\s*\[([^\]"]*)\]')


class ExpectedLengths:
    """Moving means of the lengths of trajectories: of each prompt, and of all."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._overall: float | None = None
        self._means: OrderedDict[Hashable, float] = OrderedDict()

    def of(self, prompt: Hashable, max_tokens: int | None = None) -> float:
        """Return the expected length of a trajectory of a prompt."""
        usual = FIRST_EXPECTED if self._overall is None else self._overall
        expected = self._means.get(prompt, usual)
        return expected if max_tokens is None else min(expected, max_tokens)

    def learn(self, prompt: Hashable, tokens: float) -> None:
        """Learn from trajectories of a prompt. ``tokens``: their mean length."""
        self._means[prompt] = _moved(self._means.get(prompt), tokens, WEIGHT)
        self._means.move_to_end(prompt)
        if len(self._means) > self._kept:
            self._means.popitem(last=False)
        self._overall = _moved(self._overall, tokens, OVERALL_WEIGHT)


def generated_tokens(body: bytes) -> int | None:
    """Return how many tokens an answer, or its end, says were generated; ``None`` if it does not say.

    Quotation marks in generated text are escaped, so text is not mistaken for a field.
    """
    if found := _USAGE.findall(body):
        return int(found[-1])
    lists = _TOKEN_IDS.findall(body)  # the token route has no usage
    return sum(each.count(b",") + bool(each.strip()) for each in lists) if lists else None


def _moved(mean: float | None, value: float, weight: float) -> float:
    return value if mean is None else mean + weight * (value - mean)
