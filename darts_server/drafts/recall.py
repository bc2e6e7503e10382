"""Answers that others have generated, counted a little in each step."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from darts_server.drafts.contexts import Counts, append_counted
from darts_server.drafts.history import Answers

STEP_TOKENS = 2000
"""Maximum tokens that are counted in a step, in two to four milliseconds."""
GROWTH = 1.5
"""How much more a token counts after each update of the weights: older samples predict worse."""
LEAST_SHARE = 0.01
"""Least weight of an old answer, relative to a new one: more than the weight of prompts."""


@dataclass(slots=True)
class _PendingPrompt:
    """A prompt with answers that are not counted yet.

    ``hashes``, ``length``: the prompt's text with the counted part of the answer that is counted now.
    """

    root: int
    prompt_hashes: NDArray[np.uint64]
    prompt_tokens: int
    uncounted_answers: deque[tuple[int, bytes]]
    hashes: NDArray[np.uint64]
    length: int
    answer_weight: float
    uncounted_tokens: NDArray[np.int32]


class Recall:
    def __init__(self) -> None:
        self._prompts: deque[_PendingPrompt] = deque()

    def add_answers(
        self,
        root: int,
        prompt_hashes: NDArray[np.uint64],
        prompt_tokens: int,
        answers: Answers,
    ) -> None:
        prompt = _PendingPrompt(
            root,
            prompt_hashes.copy(),
            prompt_tokens,
            uncounted_answers=deque(answers),
            # Placeholders until `_queue_next_answer`.
            hashes=prompt_hashes,
            length=0,
            answer_weight=0.0,
            uncounted_tokens=np.zeros(0, np.int32),
        )
        self._queue_next_answer(prompt)

    def count_some(self, counts: Counts, token_weight: float) -> None:
        """Count at most `STEP_TOKENS` tokens. ``token_weight``: weight of a new token."""
        remaining = STEP_TOKENS
        while remaining > 0 and self._prompts:
            prompt = self._prompts[0]
            tokens = prompt.uncounted_tokens[:remaining]
            prompt.length = append_counted(
                counts,
                prompt.hashes,
                prompt.length,
                prompt.root,
                tokens,
                token_weight * prompt.answer_weight,
            )
            prompt.uncounted_tokens = prompt.uncounted_tokens[len(tokens) :]
            remaining -= len(tokens)
            # After an answer comes another prompt's turn, so that each prompt soon has counted answers.
            if not len(prompt.uncounted_tokens):
                self._queue_next_answer(self._prompts.popleft())

    def _queue_next_answer(self, prompt: _PendingPrompt) -> None:
        if not prompt.uncounted_answers:
            return
        age, tokens = prompt.uncounted_answers.popleft()
        prompt.hashes = prompt.prompt_hashes.copy()
        prompt.length = prompt.prompt_tokens
        prompt.answer_weight = max(GROWTH**-age, LEAST_SHARE)
        # The copy can be written: for other arrays, functions would be compiled again.
        prompt.uncounted_tokens = np.frombuffer(tokens, np.int32).copy()
        self._prompts.append(prompt)
