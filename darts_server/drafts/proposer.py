"""Drafts for all running requests of an engine, in each decode step."""

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from darts_server.drafts.acceptance import SOURCES, Acceptance, learn_acceptance
from darts_server.drafts.contexts import (
    EVERYWHERE,
    LONGEST,
    MOST_FULL,
    SLOTS_OF_TOKEN,
    append_counted,
    append_uncounted,
    copy_counts,
    draft,
    new_counts,
    new_hashes,
)
from darts_server.drafts.history import Answers
from darts_server.drafts.lengths import EXPLORED_STEPS, Savings, StepTimes, choose_lengths
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
def _learn_and_draft(  # type: ignore[no-untyped-def]
    counts,
    hashes,
    lengths,
    roots,
    rows,
    token_ids,
    ends,
    draft_limits,
    token_weight,
    hits,
    tries,
    totals,
    rates,
    min_chance,
    tokens,
    chances,
    cells,
    drafted,
    verified,
):
    """Learn the new tokens of each request, compare its last draft with them, and draft again.

    ``rows``: the row of each request in ``hashes``, ``lengths``, ``roots``, and all arrays from ``tokens`` on.
    ``ends``: the length of each text with its new tokens. ``draft_limits``: how many tokens may be drafted for each
    request.
    """
    for place in range(rows.shape[0]):
        row = rows[place]
        length = lengths[row]
        new_tokens = token_ids[place, length : ends[place]]
        learn_acceptance(hits, tries, totals, tokens[row], cells[row], drafted[row], verified[row], new_tokens)
        lengths[row] = append_counted(counts, hashes[row], length, roots[row], new_tokens, token_weight)
        drafted[row] = 0
        verified[row] = 0
        if draft_limits[place] > 0:
            drafted[row] = draft(
                counts,
                hashes[row],
                lengths[row],
                roots[row],
                token_weight,
                rates,
                min(draft_limits[place], tokens.shape[1]),
                min_chance,
                tokens[row],
                chances[row],
                cells[row],
            )


class Drafts:
    """Texts of running requests, and the counts of their prompts.

    Args:
        rows: maximum number of running requests.
        max_bits: the counts have at most 2 ** max_bits slots, of 32 bytes.
        clock: monotonic, in seconds.
        max_logprob_rows: limit of the rows of log-probs that vLLM makes in a step: the number of requests, times one
            more than the tokens of the longest draft.
    """

    def __init__(
        self,
        rows: int,
        max_draft_tokens: int,
        max_bits: int,
        clock: Callable[[], float],
        max_logprob_rows: int,
    ) -> None:
        self.is_on = True
        """Whether tokens are drafted. If not, the drafts go on learning."""
        self.acceptance = Acceptance()
        self.times = StepTimes()
        self.savings = Savings()
        self.totals = np.zeros((2, SOURCES), np.int64)
        """Drafted tokens and accepted tokens, by the counts that proposed them: of the prompt, and of all prompts."""
        self.emptied = 0
        """Number of times that full counts were emptied."""
        self._max_draft_tokens = max_draft_tokens
        self._max_bits = max_bits
        self._clock = clock
        self._max_logprob_rows = max_logprob_rows

        # Each running request has a row: its text, then its latest draft.
        self._hashes = new_hashes(rows)
        self._lengths = np.zeros(rows, np.int64)
        self._roots = np.zeros(rows, np.int64)
        self._tokens = np.zeros((rows, max_draft_tokens), np.int64)
        self._chances = np.zeros((rows, max_draft_tokens))
        self._cells = np.zeros((rows, max_draft_tokens), np.int64)
        self._drafted = np.zeros(rows, np.int64)
        self._verified = np.zeros(rows, np.int64)
        self._free_rows = list(range(rows))
        self._row_of: dict[str, int] = {}

        self._root_of: dict[object, int] = {}
        self._next_root = EVERYWHERE + 1
        self._token_weight = 1.0
        self._recall = Recall()
        self._min_chance = LEAST_CHANCE
        self._steps_since_draft = 0
        self._last_proposed_at: float | None = None
        self._batch: list[str] = []
        self._batch_rows = np.zeros(0, np.int64)
        # Lengths of the texts of requests that have left the batch, by name. A preempted request may come back.
        self._earlier_lengths: dict[str, int] = {}

        # Compile the functions now, which takes seconds. Two requests of a prompt call all functions, and small counts
        # must grow, which calls `copy_counts`.
        self._counts = new_counts(4)
        names = ["first", "second"][:rows]
        tokens = np.ones((len(names), 8), np.int32)
        self.propose(names, tokens, np.full(len(names), 2), [True] * len(names), lambda _: (None, 1, []), 8)
        self._set_batch([], tokens, lambda _: (None, 0, []))
        self._last_proposed_at = None
        self._earlier_lengths = {}
        self._empty_counts()
        self.emptied = 0

    def _make_space(self, tokens: int) -> None:
        """Let the counts grow until new tokens fit, or to their maximum."""
        slots = self._counts.keys.size
        needed = (self._counts.used.max() + tokens * SLOTS_OF_TOKEN) / MOST_FULL
        if needed > slots and slots < 1 << self._max_bits:
            bits = max(int(needed).bit_length(), (slots - 1).bit_length() + GROWTH_BITS)
            larger = new_counts(min(bits, self._max_bits))
            copy_counts(self._counts, larger)
            self._counts = larger

    def _empty_counts(self) -> None:
        # The new counts will be as full as the old counts, so they have the same size from the start.
        bits = max(FIRST_BITS, (self._counts.keys.size - 1).bit_length())
        self._counts = new_counts(min(bits, self._max_bits))
        self._token_weight = 1.0
        self.emptied += 1
        # Running requests keep their roots and texts, so nothing is counted again.
        running_roots = set(self._roots[list(self._row_of.values())].tolist())
        self._root_of = {key: root for key, root in self._root_of.items() if root in running_roots}

    def age_counts(self) -> None:
        """Count earlier tokens less from now on, because the weights of the model have changed."""
        # Later tokens count more, so that no count of an earlier token must be changed.
        self._token_weight *= GROWTH
        if self._token_weight > MAX_WEIGHT:
            for weights in (self._counts.totals, self._counts.counts, self._counts.pair_counts):
                weights /= self._token_weight
            self._token_weight = 1.0

    def propose(
        self,
        names: Sequence[str],
        token_ids: NDArray[np.int32],
        ends: Ints,
        is_decoding: Sequence[bool],
        prompt_of: PromptOf,
        max_lengths: int | Ints,
    ) -> list[list[int]]:
        """Return the draft of each request of a batch, in order.

        ``names``: ids of the requests. ``token_ids``: [requests, longest text]. ``ends``: how many tokens they have.
        ``is_decoding``: whether a request got tokens in this step, so that its next step decodes. ``max_lengths``:
        maximum length of all texts, or of each.
        """
        now = self._clock()
        count = len(names)
        has_new = False
        if self._batch != names:
            has_new = self._set_batch(names, token_ids, prompt_of)
        new_tokens = int(ends.sum() - self._lengths[self._batch_rows].sum())
        # A step with the prompt of a new request is no decode step.
        if self._last_proposed_at is not None and not has_new and all(is_decoding):
            self._observe_step(now - self._last_proposed_at, new_tokens)
        self._last_proposed_at = now

        # Even if no draft is verified, a first token is drafted: it teaches how often such tokens are right.
        max_draft_tokens = 1
        min_chance = LEAST_CHANCE
        may_draft = self.is_on and self.savings.may_draft(count)
        is_exploring = self._steps_since_draft >= EXPLORED_STEPS
        if may_draft:
            max_draft_tokens = min(self._max_draft_tokens, max(1, self._max_logprob_rows // count - 1))
            if not is_exploring:
                min_chance = max(min_chance, self._min_chance)
        # The token that is sampled after the draft needs a place.
        draft_limits = np.minimum(max_lengths - ends - 1, max_draft_tokens)
        draft_limits[~np.asarray(is_decoding, dtype=bool)] = 0

        self._make_space(new_tokens + STEP_TOKENS)
        self._recall.count_some(self._counts, self._token_weight)
        _learn_and_draft(
            self._counts,
            self._hashes,
            self._lengths,
            self._roots,
            self._batch_rows,
            token_ids,
            ends,
            draft_limits,
            self._token_weight,
            self.acceptance.hits,
            self.acceptance.tries,
            self.totals,
            self.acceptance.rates,
            min_chance,
            self._tokens,
            self._chances,
            self._cells,
            self._drafted,
            self._verified,
        )
        self.acceptance.update_rates()
        if self._counts.used.max() > MOST_FULL * self._counts.keys.size:
            self._empty_counts()

        self._steps_since_draft += 1
        if not may_draft:
            return [[]] * count
        chosen = self._choose_verified(is_exploring)
        return [self._tokens[row, :length].tolist() for row, length in zip(self._batch_rows, chosen, strict=True)]

    def _observe_step(self, seconds: float, new_tokens: int) -> None:
        count = len(self._batch)
        verified = int(self._verified[self._batch_rows].sum())
        if verified:
            seconds = self.times.observe_drafted(count, verified, seconds)
            self.savings.count_drafted(count, self.times.plain_seconds(count), seconds, new_tokens)
        else:
            self.times.observe_plain(count, seconds)
            self.savings.count_plain(count, self.times.plain_seconds(count))

    def _choose_verified(self, is_exploring: bool) -> Ints:
        # Without drafts their cost is not measured, and may have fallen.
        cost_scale = 0.5 if is_exploring else 1.0
        rows = self._batch_rows
        chosen, least_chance = choose_lengths(self._chances[rows], self._drafted[rows], self.times, cost_scale)
        # Drafts that would not be verified need not be made. Half of the threshold, as the next step may be cheaper.
        self._min_chance = min(least_chance, 1.0) / 2
        self._verified[rows] = chosen
        if chosen.any():
            self._steps_since_draft = 0
        return chosen

    def _set_batch(self, names: Sequence[str], token_ids: NDArray[np.int32], prompt_of: PromptOf) -> bool:
        """Return whether a request is new."""
        for name in self._row_of.keys() - set(names):
            row = self._row_of.pop(name)
            self._free_rows.append(row)
            self._earlier_lengths[name] = int(self._lengths[row])
            if len(self._earlier_lengths) > len(self._hashes):
                oldest = next(iter(self._earlier_lengths))
                del self._earlier_lengths[oldest]

        has_new = False
        for place, name in enumerate(names):
            if name not in self._row_of:
                has_new = True
                self._begin_text(name, token_ids[place], prompt_of)
        self._batch = list(names)
        self._batch_rows = np.array([self._row_of[name] for name in names], np.int64)
        return has_new

    def _begin_text(self, name: str, token_ids: NDArray[np.int32], prompt_of: PromptOf) -> None:
        """Give a new request a row, and count its prompt once."""
        row = self._free_rows.pop()
        key, prompt_tokens, answers = prompt_of(name)
        self._row_of[name] = row
        self._drafted[row] = 0
        self._verified[row] = 0
        hashes = self._hashes[row]
        hashes[:] = 0
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
            weight = PROMPT_WEIGHT * self._token_weight
            self._lengths[row] = append_counted(self._counts, hashes, begin, root, prompt, weight)
        else:
            # The first request of the prompt has counted its tokens. No context is longer than `LONGEST`, so the last
            # tokens are enough, with a margin.
            begin = max(0, counted - 2 * LONGEST)
            self._lengths[row] = append_uncounted(hashes, begin, token_ids[begin:counted])
        self._roots[row] = root
        self._recall.add_answers(root, hashes, prompt_tokens, answers)
