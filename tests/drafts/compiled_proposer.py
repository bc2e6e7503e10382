"""Which drafts are made for a batch, and what is learned from it."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.random import default_rng

from darts_server.drafts.acceptance import CELLS, PRIOR_TRIES, Acceptance, learn_acceptance
from darts_server.drafts.history import Answers
from darts_server.drafts.lengths import (
    LEAST_GAIN,
    LOST_SHARE,
    PLAIN_EVERY,
    PLAIN_STEPS,
    RESERVE,
    Savings,
    StepTimes,
    choose_lengths,
)
from darts_server.drafts.proposer import Drafts


def test_acceptance_learns_up_to_the_first_wrong_token() -> None:
    acceptance = Acceptance()
    tokens = np.array([4, 5, 6], np.int64)
    cells = np.array([0, 1, 2], np.int64)
    totals = np.zeros((2, 2), np.int64)
    sampled = np.array([4, 9, 6], np.int64)
    learn_acceptance(acceptance.hits, acceptance.tries, totals, tokens, cells, 3, 3, sampled)
    assert (acceptance.tries[:3] - PRIOR_TRIES).tolist() == [1, 1, 0]
    assert (acceptance.hits[:3] - Acceptance().hits[:3]).tolist() == [1, 0, 0]
    assert totals.tolist() == [[3, 0], [1, 0]]


def test_only_verified_tokens_are_counted_by_source_and_the_next_token_teaches_too() -> None:
    acceptance = Acceptance()
    totals = np.zeros((2, 2), np.int64)
    tokens = np.array([4, 5, 6], np.int64)
    cells = np.array([0, CELLS // 2, CELLS // 2], np.int64)
    # Two tokens were verified and accepted. The model then sampled the token that was drafted third.
    sampled = np.array([4, 5, 6], np.int64)
    learn_acceptance(acceptance.hits, acceptance.tries, totals, tokens, cells, 3, 2, sampled)
    assert totals.tolist() == [[1, 1], [1, 1]]
    assert (acceptance.tries[cells] - PRIOR_TRIES).tolist() == [1, 2, 2]
    assert (acceptance.hits[cells] - Acceptance().hits[cells]).tolist() == [1, 2, 2]


@pytest.mark.parametrize("seed", range(10))
def test_draft_lengths_give_the_most_tokens_per_second(seed: int) -> None:
    rng = default_rng(seed)
    rows, most = 3, 3
    chances = np.sort(rng.random((rows, most)), axis=1)[:, ::-1].copy()
    drafted = rng.integers(0, most + 1, rows)
    times = StepTimes()
    times.sizes = np.array([0.0, 4.0, 16.0])
    times.seconds = np.array([1.0, 1.2, 1.2 + 3 * rng.random()])
    times.draft_fixed_seconds = 0.3 * rng.random()
    times.draft_cost_share = rng.random()
    chosen, _ = choose_lengths(chances, drafted, times, 1.0)
    plain = times.plain_seconds(rows)

    def rate(lengths: tuple[int, ...]) -> float:
        if not any(lengths):
            return float(LEAST_GAIN * rows / plain)
        tokens = rows + sum(chances[row, :length].sum() for row, length in enumerate(lengths))
        full = times.plain_seconds(rows + sum(lengths)) - plain
        return float(tokens / (plain + times.draft_fixed_seconds + times.draft_cost_share * full))

    best = max(map(rate, itertools.product(*(range(length + 1) for length in drafted))))
    assert rate(tuple(chosen)) == pytest.approx(best)


def seconds_of(sequences: int, drafted: int) -> float:
    """Seconds of a step as measured with the tiny model on two cores of a CPU."""
    seconds = 2.7e-3 + 96e-6 * sequences
    if drafted:
        seconds += 0.73e-3 + 25e-6 * drafted
    return seconds


def test_what_drafts_cost_is_learned_in_spite_of_steps_that_waited() -> None:
    rng = default_rng(0)
    times = StepTimes()
    for _ in range(400):
        sequences = int(rng.integers(1, 129))
        drafted = int(rng.integers(1, 400))
        noise = 0.9 + 0.2 * rng.random(2)
        # Every tenth step waits for another process.
        noise[rng.random(2) < 0.1] *= 10
        times.observe_plain(sequences, seconds_of(sequences, 0) * noise[0])
        times.observe_drafted(sequences, drafted, seconds_of(sequences, drafted) * noise[1])
    assert times.plain_seconds(64) == pytest.approx(seconds_of(64, 0), rel=0.2)
    for drafted in (50, 300):
        full = times.plain_seconds(64 + drafted) - times.plain_seconds(64)
        extra = times.draft_fixed_seconds + times.draft_cost_share * full
        assert times.plain_seconds(64) + extra == pytest.approx(seconds_of(64, drafted), rel=0.2)


def test_before_drafts_were_measured_they_cost_as_much_as_sequences() -> None:
    times = StepTimes()
    for _ in range(32):
        times.observe_plain(64, 0.010)
        times.observe_plain(8, 0.004)
    times.observe_drafted(8, 56, 0.010)
    assert times.draft_cost_share == pytest.approx(1)
    assert times.draft_fixed_seconds == pytest.approx(0, abs=1e-9)


def test_drafts_that_lose_end_until_there_is_time_to_lose() -> None:
    savings = Savings()
    assert not savings.may_draft(8)
    for _ in range(PLAIN_STEPS):
        savings.count_plain(8, 1.0)
    assert savings.may_draft(8)
    assert not savings.may_draft(64), "nothing was measured there"

    # Each step with drafts takes twice as long, for as many tokens.
    steps = drafted = 0
    while steps < 10_000:
        steps += 1
        if savings.may_draft(8):
            drafted += 1
            savings.count_drafted(8, 1.0, 2.0, tokens=8)
        else:
            savings.count_plain(8, 1.0)
    lost = drafted * 1.0
    assert 0.8 * LOST_SHARE < lost / steps < 1.1 * LOST_SHARE


def test_drafts_that_win_are_compared_now_and_then() -> None:
    savings = Savings()
    drafted = 0
    for _ in range(1000):
        if savings.may_draft(8):
            drafted += 1
            savings.count_drafted(8, 1.0, 1.2, tokens=16)
        else:
            savings.count_plain(8, 1.0)
    assert drafted == pytest.approx(1000 * PLAIN_EVERY / (PLAIN_EVERY + 1), abs=5)
    # What was saved is lost soon when drafts begin to lose.
    lost = 0
    while savings.may_draft(8) or lost == 0:
        savings.count_drafted(8, 1.0, 2.0, tokens=8)
        lost += 1
        if lost % PLAIN_EVERY == 0:
            savings.count_plain(8, 1.0)
    assert lost <= 1.1 * RESERVE


class Clock:
    """Seconds, to which a batch adds the duration of each step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_drafts(rows: int, most: int, bits: int, padded: int = 1 << 20) -> Drafts:
    return Drafts(rows, most, bits, Clock(), padded)


def prompt_of(name: str) -> int:
    return int(name.split("-")[1]) // 4


class Batch:
    """Requests that answer with given texts, as an engine with verified drafts would run them."""

    def __init__(self, texts: list[np.ndarray], prompt_tokens: int, drafts: Drafts) -> None:
        self.texts = texts
        self.seconds_of = seconds_of
        self.drafted = 0
        self.prompt_tokens = prompt_tokens
        self.drafts = drafts
        self.token_ids = np.zeros((len(texts), 512), np.int32)
        self.ends = np.full(len(texts), prompt_tokens, np.int64)
        for row, text in enumerate(texts):
            self.token_ids[row, :prompt_tokens] = text[:prompt_tokens]

    def run(self, epoch: int, answers: Sequence[Answers] = ()) -> int:
        """Return the number of steps. ``answers``: of others, by prompt; each comes with the first of its samples."""
        waiting = dict(enumerate(answers))
        self.ends[:] = self.prompt_tokens
        proposed: list[list[int]] = [[] for _ in self.texts]
        running = list(range(len(self.texts)))
        steps = 0
        while running:
            drafted = sum(len(proposed[row]) for row in running)
            self.drafted += drafted
            self.drafts._clock.now += self.seconds_of(len(running), drafted)  # type: ignore[attr-defined]
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


def test_an_epoch_with_the_same_answers_takes_few_steps() -> None:
    rng = default_rng(0)
    texts = [rng.integers(0, 5000, 100) for _ in range(8)]
    for row in range(8):
        texts[row][:10] = texts[row // 4 * 4][:10]  # four samples of each of two prompts
    drafts = make_drafts(8, 12, 16)
    first = Batch(texts, 10, drafts).run(0)
    drafts.age_counts()
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

    fresh = Batch(texts, 10, make_drafts(8, 12, 16)).run(0)
    sent = Batch(texts, 10, make_drafts(8, 12, 16)).run(0, answers)
    assert fresh == 90
    # A new engine has to learn what drafts cost.
    assert sent < 72


def test_full_counts_are_emptied_and_running_requests_go_on() -> None:
    rng = default_rng(1)
    texts = [rng.integers(0, 5000, 300) for _ in range(8)]
    drafts = make_drafts(8, 12, 11)
    assert Batch(texts, 10, drafts).run(0) == 290
    assert max(drafts._counts.used) < 2**11
    assert drafts.emptied > 0


def test_rows_of_requests_that_are_gone_are_used_again() -> None:
    drafts = make_drafts(4, 4, 12)
    for epoch in range(10):
        Batch([np.arange(20) + row for row in range(4)], 5, drafts).run(epoch)
    assert len(drafts._free_rows) + len(drafts._row_of) == 4


def plain_seconds(texts: list[np.ndarray], prompt_tokens: int) -> float:
    """Return how long the texts take without drafts."""
    lengths = np.array([len(text) - prompt_tokens for text in texts])
    return sum(seconds_of(int((lengths > step).sum()), 0) for step in range(int(lengths.max())))


def draw_texts(kind: str, rng: np.random.Generator, samples: int) -> list[np.ndarray]:
    lengths = rng.geometric(1 / 100, samples) + 11
    if kind == "random":
        return [rng.integers(0, 5000, length) for length in lengths]
    # Each token has three continuations, as answers of a small model have.
    texts = []
    for length in lengths:
        text = list(range(11))
        while len(text) < length:
            text.append((text[-1] * 7 + int(rng.choice(3, p=[0.6, 0.3, 0.1]))) % 64)
        texts.append(np.array(text))
    return texts


@pytest.mark.parametrize("kind", ["random", "alike"])
@pytest.mark.parametrize("samples", [1, 16, 128])
def test_no_epoch_takes_longer_than_without_drafts(kind: str, samples: int) -> None:
    rng = default_rng(samples)
    drafts = make_drafts(128, 12, 20)
    for epoch in range(4):
        texts = draw_texts(kind, rng, samples)
        begin = drafts._clock()
        Batch(texts, 10, drafts).run(epoch)
        seconds = drafts._clock() - begin
        plain = plain_seconds(texts, 10)
        # A single step may lose some of its time.
        assert seconds < 1.02 * plain + 1e-3, epoch
        if kind == "alike" and samples > 1 and epoch == 3:
            assert seconds < 0.8 * plain


def test_drafts_that_cost_more_than_any_gain_are_given_up() -> None:
    """Texts repeat, so all drafts are right. But each step with drafts takes twenty times as long."""
    rng = default_rng(0)
    drafts = make_drafts(16, 12, 18)
    texts = draw_texts("alike", rng, 16)
    for epoch in range(6):
        batch = Batch(texts, 10, drafts)
        batch.seconds_of = lambda sequences, drafted: seconds_of(sequences, 0) * (20 if drafted else 1)
        begin = drafts._clock()
        batch.run(epoch)
        seconds = drafts._clock() - begin
        if epoch > 1:
            assert seconds < 1.1 * plain_seconds(texts, 10)


def test_without_verification_drafts_go_on_learning() -> None:
    rng = default_rng(0)
    texts = draw_texts("alike", rng, 8)
    drafts = make_drafts(8, 12, 16)
    drafts.is_on = False
    batch = Batch(texts, 10, drafts)
    for epoch in range(3):
        batch.run(epoch)
    assert batch.drafted == 0
    assert not drafts.totals.any()
    assert drafts.acceptance.tries.sum() > CELLS * PRIOR_TRIES + 500
    drafts.is_on = True
    batch.run(3)
    assert batch.drafted > 100
    assert (drafts.totals[1] <= drafts.totals[0]).all()
    assert 0 < drafts.totals[0].sum() <= batch.drafted


def test_the_longest_draft_is_short_where_vllm_would_make_too_many_logits() -> None:
    texts = [np.tile(np.arange(20, 30), 30)] * 8
    longest = []
    for padded in (16, 32):
        drafts = make_drafts(8, 12, 16, padded)
        propose = drafts.propose
        drafts.propose = lambda *args, propose=propose: note(propose(*args))  # type: ignore[method-assign]
        seen: list[int] = []

        def note(answer: list[list[int]], seen: list[int] = seen) -> list[list[int]]:
            seen.extend(map(len, answer))
            return answer

        Batch(texts, 10, drafts).run(0)
        longest.append(max(seen))
    assert longest == [1, 3]


def test_tokens_of_a_request_that_was_preempted_count_once() -> None:
    text = np.arange(40)
    token_ids = text[None].astype(np.int32)

    def propose(drafts: Drafts, names: list[str], end: int) -> None:
        count = len(names)
        ends = np.full(count, end)
        drafts.propose(names, np.repeat(token_ids, count, 0), ends, [True] * count, lambda _: ("prompt", 10, []), 64)

    totals = []
    for others in ([], ["another"]):
        drafts = make_drafts(2, 4, 12)
        propose(drafts, ["first"], 20)
        if others:
            # The first request makes room and comes back.
            propose(drafts, others, 10)
        propose(drafts, ["first"], 25)
        totals.append(float(drafts._counts.totals.sum()))
    assert totals[0] == pytest.approx(totals[1])


def test_counts_grow_and_keep_what_they_have() -> None:
    rng = default_rng(0)
    texts = [rng.integers(0, 50_000, 450) for _ in range(64)]
    drafts = make_drafts(64, 12, 22)
    small = drafts._counts.keys.size
    steps = [Batch(texts, 10, drafts).run(epoch) for epoch in range(4)]
    assert drafts._counts.keys.size > small
    assert steps[0] == 440
    assert steps[-1] < 150
    occupied = np.flatnonzero(drafts._counts.keys)
    assert len(occupied) == drafts._counts.used[0]
    assert len(np.flatnonzero(drafts._counts.pair_keys)) == drafts._counts.used[1]
    # Emptied counts keep their size, so that no step waits for their growth again.
    size = drafts._counts.keys.size
    drafts._empty_counts()
    assert drafts._counts.keys.size == size
    assert not drafts._counts.used.any()
