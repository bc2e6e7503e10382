"""Which drafts are made for a batch, and what is learned from it."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.random import default_rng

from darts_server.drafts.acceptance import PRIOR_TRIES, Acceptance, score
from darts_server.drafts.history import Answers
from darts_server.drafts.lengths import StepTimes, choose
from darts_server.drafts.proposer import Drafts


def test_acceptance_learns_up_to_the_first_wrong_token() -> None:
    acceptance = Acceptance()
    tokens = np.array([4, 5, 6], np.int64)
    cells = np.array([0, 1, 2], np.int64)
    right = score(acceptance.hits, acceptance.tries, tokens, cells, 3, np.array([4, 9, 6], np.int64))
    assert right == 1
    assert (acceptance.tries[:3] - PRIOR_TRIES).tolist() == [1, 1, 0]


@pytest.mark.parametrize("seed", range(10))
def test_draft_lengths_give_the_most_tokens_per_second(seed: int) -> None:
    rng = default_rng(seed)
    rows, most = 3, 3
    chances = np.sort(rng.random((rows, most)), axis=1)[:, ::-1].copy()
    drafted = rng.integers(0, most + 1, rows)
    sizes = np.array([0.0, 4.0, 16.0])
    seconds = np.array([1.0, 1.2, 1.2 + 3 * rng.random()])
    chosen = np.zeros(rows, np.int64)
    choose(rows, chances, drafted, sizes, seconds, chosen)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = rows + sum(chances[row, :length].sum() for row, length in enumerate(lengths))
        return float(tokens / np.interp(rows + sum(lengths), sizes, seconds))

    best = max(map(rate, itertools.product(*(range(length + 1) for length in drafted))))
    assert rate(tuple(chosen)) == pytest.approx(best)


def test_a_full_batch_drafts_nothing_before_larger_steps_were_seen() -> None:
    times = StepTimes()
    for _ in range(32):
        times.observe(64, 0.01)
    chosen = np.zeros(64, np.int64)
    choose(64, np.full((64, 4), 0.9), np.full(64, 4), times.sizes, times.seconds, chosen)
    assert not chosen.any()


def test_a_small_batch_drafts_what_a_large_step_cost() -> None:
    times = StepTimes()
    for _ in range(32):
        times.observe(64, 0.012)
        times.observe(4, 0.010)
    chosen = np.zeros(4, np.int64)
    choose(4, np.full((4, 8), 0.5), np.full(4, 8), times.sizes, times.seconds, chosen)
    assert chosen.tolist() == [8] * 4


def prompt_of(name: str) -> int:
    return int(name.split("-")[1]) // 4


class Batch:
    """Requests that answer with given texts, as an engine with verified drafts would run them."""

    def __init__(self, texts: list[np.ndarray], prompt_tokens: int, drafts: Drafts) -> None:
        self.texts = texts
        self.prompt_tokens = prompt_tokens
        self.drafts = drafts
        self.token_ids = np.zeros((len(texts), 512), np.int32)
        self.ends = np.full(len(texts), prompt_tokens, np.int64)
        for row, text in enumerate(texts):
            self.token_ids[row, :prompt_tokens] = text[:prompt_tokens]

    def run(self, epoch: int, answers: Sequence[Answers] = ()) -> int:
        """Return the number of steps. ``answers``: of others, by prompt; each comes with the first of its samples."""
        waiting = dict(enumerate(answers))
        proposed: list[list[int]] = [[] for _ in self.texts]
        running = list(range(len(self.texts)))
        steps = 0
        while running:
            for row in running:
                text = self.texts[row]
                end = self.ends[row]
                right = 0
                while right < len(proposed[row]) and end + right < len(text) - 1:
                    if proposed[row][right] != text[end + right]:
                        break
                    right += 1
                new = text[end : end + right + 1]
                self.token_ids[row, end : end + len(new)] = new
                self.ends[row] += len(new)
            steps += 1
            names = [f"{epoch}-{row}" for row in running]
            answer = self.drafts.propose(
                names,
                self.token_ids[running],
                self.ends[running],
                [True] * len(running),
                lambda name: (
                    prompt_of(name),
                    self.prompt_tokens,
                    waiting.pop(prompt_of(name), []),
                ),
                512,
            )
            for row, tokens in zip(running, answer, strict=True):
                proposed[row] = tokens
            running = [row for row in running if self.ends[row] < len(self.texts[row])]
        return steps


def steady_clock() -> float:
    """Each step takes as long as the one before, whatever is in it."""
    steady_clock.now += 0.01  # type: ignore[attr-defined]
    return float(steady_clock.now)  # type: ignore[attr-defined]


steady_clock.now = 0.0  # type: ignore[attr-defined]


def test_an_epoch_with_the_same_answers_takes_few_steps() -> None:
    rng = default_rng(0)
    texts = [rng.integers(0, 5000, 100) for _ in range(8)]
    for row in range(8):
        texts[row][:10] = texts[row // 4 * 4][:10]  # four samples of each of two prompts
    drafts = Drafts(8, 12, 16, steady_clock)
    first = Batch(texts, 10, drafts).run(0)
    drafts.age()
    second = Batch(texts, 10, drafts).run(1)
    third = Batch(texts, 10, drafts).run(2)
    assert first == 90
    assert second < 60
    assert third < 30


def test_answers_of_others_make_an_epoch_short() -> None:
    rng = default_rng(0)
    texts = [rng.integers(0, 5000, 100) for _ in range(8)]
    for row in range(8):
        texts[row][:10] = texts[row // 4 * 4][:10]
    answers = [[(1, text[10:].astype(np.int32).tobytes()) for text in texts[begin : begin + 4]] for begin in (0, 4)]

    fresh = Batch(texts, 10, Drafts(8, 12, 16, steady_clock)).run(0)
    sent = Batch(texts, 10, Drafts(8, 12, 16, steady_clock)).run(0, answers)
    assert fresh == 90
    assert sent < 30


def test_full_counts_are_emptied_and_running_requests_go_on() -> None:
    rng = default_rng(1)
    texts = [rng.integers(0, 5000, 300) for _ in range(8)]
    drafts = Drafts(8, 12, 11, steady_clock)
    assert Batch(texts, 10, drafts).run(0) == 290
    assert max(drafts._counts.used) < 2**11
    assert drafts.emptied > 0


def test_rows_of_requests_that_are_gone_are_used_again() -> None:
    drafts = Drafts(4, 4, 12, steady_clock)
    for epoch in range(10):
        Batch([np.arange(20) + row for row in range(4)], 5, drafts).run(epoch)
    assert len(drafts._free) + len(drafts._row_of) == 4
