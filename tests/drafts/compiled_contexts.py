"""Counts of continuations against a plain count of all texts."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.random import default_rng

from darts_server.drafts.acceptance import CELLS, RUNGS, Acceptance, cell_of
from darts_server.drafts.contexts import append_counted, draft, new_counts, new_hashes


def continuation(texts: Sequence[Sequence[int]], context: Sequence[int]) -> Counter[int]:
    """Count what follows a context in all texts."""
    found = Counter[int]()
    size = len(context)
    for text in texts:
        for begin in range(len(text) - size):
            if list(text[begin : begin + size]) == list(context):
                found[text[begin + size]] += 1
    return found


def likely_draft(texts: Sequence[Sequence[int]], text: Sequence[int], rates: np.ndarray, most: int) -> list[float]:
    """Return the chances of a draft by the plain counts of one root. Ties of tokens may be broken either way."""
    chances = []
    chance = 1.0
    text = list(text)
    for _ in range(most):
        rated = []
        for rung in range(RUNGS):
            size = 1 << rung
            if size > len(text):
                break
            if found := continuation(texts, text[-size:]):
                _, count = found.most_common(1)[0]
                rated.append(rates[cell_of.py_func(0, rung, count, sum(found.values()), 1.0)])
        if not rated:
            break
        chance *= max(rated)
        chances.append(chance)
        break
    return chances


@pytest.mark.parametrize("seed", range(20))
def test_the_first_token_of_a_draft_follows_the_counts_of_all_texts_of_its_prompt(seed: int) -> None:
    rng = default_rng(seed)
    letters = int(rng.integers(2, 4))
    texts = [rng.integers(0, letters, int(rng.integers(20, 60))).tolist() for _ in range(4)]
    counts = new_counts(16)
    rows = new_hashes(5)
    lengths = np.zeros(5, np.int64)

    # The texts grow by turns, as samples of a prompt do.
    ends = [0] * 4
    while any(end < len(text) for end, text in zip(ends, texts, strict=True)):
        row = int(rng.integers(4))
        new = texts[row][ends[row] : ends[row] + int(rng.integers(1, 4))]
        lengths[row] = append_counted(counts, rows[row], lengths[row], 3, np.array(new, np.int64), 1.0)
        ends[row] += len(new)

    acceptance = Acceptance()
    # Counts over all prompts are never best here.
    acceptance.rates[CELLS // 2 :] = 0
    tokens = np.zeros(8, np.int64)
    chances = np.zeros(8)
    cells = np.zeros(8, np.int64)
    for row, text in enumerate(texts):
        made = draft(counts, rows[row], lengths[row], 3, 1.0, acceptance.rates, 8, 0.0, tokens, chances, cells)
        expected = likely_draft(texts, text, acceptance.rates, 8)
        assert (made > 0) == bool(expected)
        if made:
            assert chances[0] == pytest.approx(expected[0])


def test_another_prompt_with_the_same_text_has_no_draft_below_eight_tokens() -> None:
    counts = new_counts(12)
    rows = new_hashes(2)
    text = np.arange(1, 8, dtype=np.int64)
    append_counted(counts, rows[0], 0, 1, text, 1.0)
    length = append_counted(counts, rows[1], 0, 2, text[:3], 1.0)
    rates = Acceptance().rates
    made = draft(
        counts, rows[1], length, 2, 1.0, rates, 4, 0.0, np.zeros(4, np.int64), np.zeros(4), np.zeros(4, np.int64)
    )
    assert made == 0


def test_an_old_answer_of_the_prompt_is_drafted_to_its_end() -> None:
    counts = new_counts(12)
    rows = new_hashes(2)
    answer = np.arange(10, 40, dtype=np.int64)
    for _ in range(3):
        rows[0] = 0
        append_counted(counts, rows[0], 0, 1, answer, 1.0)
    length = append_counted(counts, rows[1], 0, 1, answer[:5], 1.0)
    tokens = np.zeros(16, np.int64)
    made = draft(counts, rows[1], length, 1, 1.0, np.ones(CELLS), 16, 0.5, tokens, np.zeros(16), np.zeros(16, np.int64))
    assert made == 16
    assert tokens.tolist() == answer[5:21].tolist()


def test_the_longest_text_is_right_after_many_tokens() -> None:
    """Hashes of a text are kept in a ring, which is overwritten."""
    counts = new_counts(16)
    rows = new_hashes(2)
    period = np.array([5, 6, 7, 8, 9, 1, 2, 3], np.int64)
    length = append_counted(counts, rows[0], 0, 1, np.tile(period, 200), 1.0)
    tokens = np.zeros(16, np.int64)
    made = draft(counts, rows[0], length, 1, 1.0, np.ones(CELLS), 16, 0.5, tokens, np.zeros(16), np.zeros(16, np.int64))
    assert made == 16
    assert tokens.tolist() == np.tile(period, 2).tolist()
