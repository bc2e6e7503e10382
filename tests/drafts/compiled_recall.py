"""Answers that others have generated count as if they had been generated here."""

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from darts_server.drafts.contexts import append_counted, new_counts, new_hashes
from darts_server.drafts.recall import GROWTH, LEAST_SHARE, STEP_TOKENS, Recall


def begin_text(prompt: NDArray[np.int32]) -> NDArray[np.uint64]:
    text: NDArray[np.uint64] = new_hashes(1)[0]
    append_counted(new_counts(12), text, 0, 1, prompt, 1.0)
    return text


def test_recalled_answers_count_like_generated_ones_but_less_the_older_they_are() -> None:
    rng = default_rng(0)
    prompt = rng.integers(0, 5, 30).astype(np.int32)
    ages = [0, 3, 40]
    answers = [rng.integers(0, 5, 50).astype(np.int32) for _ in ages]
    text = begin_text(prompt)
    expected = new_counts(14)
    for age, answer in zip(ages, answers, strict=True):
        append_counted(expected, text.copy(), len(prompt), 7, answer, 8.0 * max(GROWTH**-age, LEAST_SHARE))

    counts = new_counts(14)
    recall = Recall()
    recall.add_answers(
        7, text, len(prompt), [(age, answer.tobytes()) for age, answer in zip(ages, answers, strict=True)]
    )
    recall.count_some(counts, 8.0)
    for name in ("keys", "totals", "tokens", "counts", "pair_keys", "pair_counts"):
        assert np.array_equal(getattr(counts, name), getattr(expected, name)), name
    assert np.array_equal(text, begin_text(prompt))


def test_a_step_counts_a_limited_number_of_tokens_and_prompts_take_turns() -> None:
    text = begin_text(np.arange(30, dtype=np.int32))
    counts = new_counts(18)
    recall = Recall()
    long = np.arange(STEP_TOKENS + 500, dtype=np.int32)
    for root in (1, 2):
        recall.add_answers(root, text, 30, [(0, long.tobytes()), (0, long.tobytes())])
    steps = 0
    order = []
    while recall._prompts:
        order.append(recall._prompts[0].root)
        before = float(counts.totals.sum())
        recall.count_some(counts, 1.0)
        # Five contexts for the prompt, and two for all prompts.
        assert counts.totals.sum() - before <= 7 * STEP_TOKENS
        steps += 1
    assert steps == -(-4 * len(long) // STEP_TOKENS)
    assert order == [1, 1, 2, 1, 2]
    assert counts.totals.sum() == 7 * 4 * len(long)


def test_nothing_waits_without_answers() -> None:
    recall = Recall()
    recall.add_answers(1, begin_text(np.arange(30, dtype=np.int32)), 30, [])
    assert not recall._prompts
