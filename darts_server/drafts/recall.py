"""Answers that others have generated, counted a little in each step."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.drafts.contexts import Counts, learn
from darts_server.drafts.history import Answers

STEP_TOKENS = 2000
"""Maximum tokens that are counted in a step, in two to four milliseconds."""
GROWTH = 1.5
"""How much more a token counts after each update of the weights: older samples predict worse."""
LEAST_SHARE = 0.01
"""Least weight of an old answer, relative to a new one: more than the weight of prompts."""


@dataclass(slots=True)
class _Prompt:
    """A prompt's text at its end, and its answers that are not counted yet.

    ``grown``, ``length``, ``rest``: the text with a part of the first answer, and the rest of this answer.
    """

    root: int
    text: NDArray[np.uint64]
    prompt_tokens: int
    answers: deque[tuple[int, bytes]]
    grown: NDArray[np.uint64]
    length: int
    share: float
    rest: NDArray[np.int32]


class Recall:
    """Prompts with answers that are not counted yet. They take turns, so that each prompt soon has counted answers."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()

    def add(self, root: int, text: NDArray[np.uint64], prompt_tokens: int, answers: Answers) -> None:
        """Add answers of a prompt to count later. ``text``: hashes of the prompt."""
        empty = np.zeros(0, np.int32)
        prompt = _Prompt(root, text.copy(), prompt_tokens, deque(answers), text, 0, 0.0, empty)
        self._continue(prompt)

    def count(self, counts: Counts, weight: float) -> None:
        """Count at most `STEP_TOKENS` tokens. ``weight``: weight of a new token."""
        left = STEP_TOKENS
        while left > 0 and self._prompts:
            prompt = self._prompts[0]
            tokens = prompt.rest[:left]
            prompt.length = learn(counts, prompt.grown, prompt.length, prompt.root, tokens, weight * prompt.share)
            prompt.rest = prompt.rest[len(tokens) :]
            left -= len(tokens)
            if not len(prompt.rest):
                self._continue(self._prompts.popleft())

    def _continue(self, prompt: _Prompt) -> None:
        """Let a prompt wait for its next answer to be counted, if it has one."""
        if not prompt.answers:
            return
        age, tokens = prompt.answers.popleft()
        prompt.grown = prompt.text.copy()
        prompt.length = prompt.prompt_tokens
        prompt.share = max(GROWTH**-age, LEAST_SHARE)
        # The copy can be written: for other arrays, functions would be compiled again.
        prompt.rest = np.frombuffer(tokens, np.int32).copy()
        self._prompts.append(prompt)
