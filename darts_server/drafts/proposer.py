"""Drafts for all running requests of an engine, in each decode step."""

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from darts_server.drafts.acceptance import SOURCES, Acceptance, score
from darts_server.drafts.contexts import (
    EVERYWHERE,
    LONGEST,
    MOST_FULL,
    SLOTS_OF_TOKEN,
    draft,
    grow,
    learn,
    new_counts,
    new_texts,
    skip,
)
from darts_server.drafts.history import Answers
from darts_server.drafts.lengths import EXPLORED_STEPS, Savings, StepTimes, choose
from darts_server.drafts.recall import GROWTH, STEP_TOKENS, Recall

PROMPT_WEIGHT = 0.001
"""Weight of a token of a prompt: it decides only where no sample has a continuation."""
MAX_PROMPT_TOKENS = 1024
"""The last tokens of a prompt that are counted: a prompt of 30,000 tokens would hold all requests up for 50 ms."""
LEAST_CHANCE = 0.02
"""A token is drafted only if the draft up to it is accepted at least this often."""
MAX_WEIGHT = 2.0**60
FIRST_BITS = 18
"""Counts begin with 8 MiB and grow. In small tables searches are faster, and the first use of memory takes time."""
GROWTH_BITS = 2
"""Tables grow to four times their size. No request decodes meanwhile: half a second for 128 MiB, two for 512 MiB."""

Ints = NDArray[np.int64]
PromptOf = Callable[[str], tuple[object, int, Answers]]
"""Returns the key of a request's prompt, its number of tokens, and answers that others have generated."""


@njit(nogil=True)
def _propose(  # type: ignore[no-untyped-def]
    counts,
    texts,
    lengths,
    roots,
    rows,
    token_ids,
    ends,
    room,
    weight,
    hits,
    tries,
    totals,
    rates,
    least,
    tokens,
    chances,
    cells,
    drafted,
    verified,
):
    """Learn the new tokens of each row's text, score its last draft by them, and draft again.

    ``rows``: the number of each request's text. ``ends``: the length of each text with its new tokens. ``room``: how
    many tokens may be drafted for each request.
    """
    for place in range(rows.shape[0]):
        row = rows[place]
        length = lengths[row]
        new = token_ids[place, length : ends[place]]
        score(hits, tries, totals, tokens[row], cells[row], drafted[row], verified[row], new)
        lengths[row] = learn(counts, texts[row], length, roots[row], new, weight)
        drafted[row] = 0
        verified[row] = 0
        if room[place] > 0:
            drafted[row] = draft(
                counts,
                texts[row],
                lengths[row],
                roots[row],
                weight,
                rates,
                min(room[place], tokens.shape[1]),
                least,
                tokens[row],
                chances[row],
                cells[row],
            )


class Drafts:
    """Texts of running requests, and the counts of their prompts.

    Args:
        rows: maximum number of running requests.
        most: maximum number of tokens of a draft.
        bits: the counts have at most 2 ** bits slots, of 32 bytes.
        clock: monotonic, in seconds.
        padded: maximum number of rows of log-probs that vLLM makes in a step: the number of requests, times one more
            than the tokens of the longest draft.
    """

    def __init__(self, rows: int, most: int, bits: int, clock: Callable[[], float], padded: int) -> None:
        self.most = most
        self.is_on = True
        """Whether tokens are drafted. If not, the drafts go on learning."""
        self.acceptance = Acceptance()
        self.times = StepTimes()
        self.savings = Savings()
        self.totals = np.zeros((2, SOURCES), np.int64)
        """Drafted tokens and accepted tokens, by the counts that proposed them: of the prompt, and of all prompts."""
        self._bits = bits
        self._clock = clock
        self._padded = padded
        self._texts = new_texts(rows)
        self._lengths = np.zeros(rows, np.int64)
        self._roots = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, most), np.int64)
        self._chances = np.zeros((rows, most))
        self._cells = np.zeros((rows, most), np.int64)
        self._drafted = np.zeros(rows, np.int64)
        self._verified = np.zeros(rows, np.int64)
        self._free = list(range(rows))
        self._row_of: dict[str, int] = {}
        self._root_of: dict[object, int] = {}
        self._next_root = EVERYWHERE + 1
        self._weight = 1.0
        self._recall = Recall()
        self.emptied = 0
        """Number of times that full counts were emptied."""
        self._least = LEAST_CHANCE
        self._undrafted = 0
        self._last: float | None = None
        self._batch: list[str] = []
        self._rows = np.zeros(0, np.int64)
        # Lengths of the texts of requests that have left the batch, by name. A preempted request may come back.
        self._earlier_lengths: dict[str, int] = {}
        self._counts = new_counts(4)
        # Compile the functions now, which takes seconds. Two requests of a prompt call all functions.
        names = ["first", "second"][:rows]
        tokens = np.ones((len(names), 8), np.int32)
        self.propose(names, tokens, np.full(len(names), 2), [True] * len(names), lambda _: (None, 1, []), 8)
        self._set_batch([], tokens, lambda _: (None, 0, []))
        self._last = None
        self._earlier_lengths = {}
        self._empty_counts()
        self.emptied = 0

    def _make_space(self, tokens: int) -> None:
        """Let the counts grow until new tokens fit, or to their maximum."""
        slots = self._counts.keys.size
        needed = (self._counts.used.max() + tokens * SLOTS_OF_TOKEN) / MOST_FULL
        if needed > slots and slots < 1 << self._bits:
            bits = max(int(needed).bit_length(), (slots - 1).bit_length() + GROWTH_BITS)
            larger = new_counts(min(bits, self._bits))
            grow(self._counts, larger)
            self._counts = larger

    def _empty_counts(self) -> None:
        """Forget all counts. Running requests keep their texts, so nothing is counted again."""
        # The new counts will be as full as the old counts, so they have the same size from the start.
        bits = max(FIRST_BITS, (self._counts.keys.size - 1).bit_length())
        self._counts = new_counts(min(bits, self._bits))
        self._weight = 1.0
        self.emptied += 1
        running = set(self._roots[list(self._row_of.values())].tolist())
        self._root_of = {key: root for key, root in self._root_of.items() if root in running}

    def age(self) -> None:
        """Count earlier tokens less from now on, because the weights of the model have changed."""
        # Later tokens count more, so that no count of an earlier token must be changed.
        self._weight *= GROWTH
        if self._weight > MAX_WEIGHT:
            for array in (self._counts.totals, self._counts.counts, self._counts.pair_counts):
                array /= self._weight
            self._weight = 1.0

    def propose(
        self,
        names: Sequence[str],
        token_ids: NDArray[np.int32],
        ends: Ints,
        is_decoding: Sequence[bool],
        prompt_of: PromptOf,
        longest: int | Ints,
    ) -> list[list[int]]:
        """Return the draft of each request of a batch, in order.

        ``names``: ids of the requests. ``token_ids``: [requests, longest], their tokens so far. ``ends``: how many
        tokens they have. ``is_decoding``: whether a request got tokens in this step, so that its next step decodes.
        ``longest``: maximum length of all texts, or of each.
        """
        now = self._clock()
        count = len(names)
        has_new = False
        if self._batch != names:
            has_new = self._set_batch(names, token_ids, prompt_of)
        new_tokens = int(ends.sum() - self._lengths[self._rows].sum())
        # A step with the prompt of a new request is no decode step.
        if self._last is not None and not has_new and all(is_decoding):
            self._observe(now - self._last, new_tokens)
        self._last = now

        # Even if no draft is verified, a first token is drafted: it teaches how often such tokens are right.
        most = 1
        least = LEAST_CHANCE
        may_draft = self.is_on and self.savings.may_draft(count)
        if may_draft:
            most = min(self.most, max(1, self._padded // count - 1))
            if self._undrafted < EXPLORED_STEPS:
                least = max(least, self._least)
        room = np.minimum(longest - 1 - ends, most)
        room[~np.asarray(is_decoding, dtype=bool)] = 0
        self._make_space(new_tokens + STEP_TOKENS)
        self._recall.count(self._counts, self._weight)
        _propose(
            self._counts,
            self._texts,
            self._lengths,
            self._roots,
            self._rows,
            token_ids,
            ends,
            room,
            self._weight,
            self.acceptance.hits,
            self.acceptance.tries,
            self.totals,
            self.acceptance.rates,
            least,
            self._tokens,
            self._chances,
            self._cells,
            self._drafted,
            self._verified,
        )
        self.acceptance.update()
        if self._counts.used.max() > MOST_FULL * self._counts.keys.size:
            self._empty_counts()

        self._undrafted += 1
        if not may_draft:
            return [[]] * count
        chosen = self._choose(count)
        return [self._tokens[row, :length].tolist() for row, length in zip(self._rows, chosen, strict=True)]

    def _observe(self, seconds: float, tokens: int) -> None:
        """Learn from the last step, with its number of new tokens."""
        count = len(self._batch)
        drafted = int(self._verified[self._rows].sum())
        if drafted:
            seconds = self.times.observe_drafted(count, drafted, seconds)
            self.savings.count_drafted(count, self.times.plain(count), seconds, tokens)
        else:
            self.times.observe_plain(count, seconds)
            self.savings.count_plain(count, self.times.plain(count))

    def _choose(self, count: int) -> Ints:
        """Return the number of tokens of each draft that are verified."""
        scale = 0.5 if self._undrafted > EXPLORED_STEPS else 1.0
        chosen = np.zeros(count, np.int64)
        chances = self._chances[self._rows]
        worth = choose(count, chances, self._drafted[self._rows], self.times, scale, chosen)
        # Drafts that would not be verified need not be made. Half of the threshold, as the next step may be cheaper.
        self._least = min(worth, 1.0) / 2
        self._verified[self._rows] = chosen
        if chosen.any():
            self._undrafted = 0
        return chosen

    def _set_batch(self, names: Sequence[str], token_ids: NDArray[np.int32], prompt_of: PromptOf) -> bool:
        """Give new requests a row, free the rows of requests that are gone, and return whether a request is new."""
        for name in self._row_of.keys() - set(names):
            row = self._row_of.pop(name)
            self._free.append(row)
            self._earlier_lengths[name] = int(self._lengths[row])
            if len(self._earlier_lengths) > len(self._texts):
                oldest = next(iter(self._earlier_lengths))
                del self._earlier_lengths[oldest]

        has_new = False
        for place, name in enumerate(names):
            if name not in self._row_of:
                has_new = True
                self._begin_text(name, token_ids[place], prompt_of)
        self._batch = list(names)
        self._rows = np.array([self._row_of[name] for name in names], np.int64)
        return has_new

    def _begin_text(self, name: str, token_ids: NDArray[np.int32], prompt_of: PromptOf) -> None:
        """Give a new request a row with its text so far, and count the prompt if it is new."""
        row = self._free.pop()
        key, prompt_tokens, answers = prompt_of(name)
        self._row_of[name] = row
        self._drafted[row] = 0
        self._verified[row] = 0
        text = self._texts[row]
        text[:] = 0
        # A request that was preempted, and runs again, has counted its own tokens too.
        counted = self._earlier_lengths.pop(name, prompt_tokens)

        root = self._root_of.get(key)
        if root is None:
            # A root stands for a prompt in the counts.
            root = self._next_root
            self._root_of[key] = root
            self._next_root += 1
            begin = max(0, prompt_tokens - MAX_PROMPT_TOKENS)
            prompt = token_ids[begin:prompt_tokens]
            self._make_space(len(prompt))
            self._lengths[row] = learn(self._counts, text, begin, root, prompt, PROMPT_WEIGHT * self._weight)
        else:
            # The first request of the prompt has counted its tokens. No context is longer than `LONGEST`, so only the
            # last tokens are needed.
            begin = max(0, counted - 2 * LONGEST)
            self._lengths[row] = skip(text, begin, token_ids[begin:counted])
        self._roots[row] = root
        self._recall.add(root, text, prompt_tokens, answers)
