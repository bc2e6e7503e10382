"""Answers of earlier requests, from which engines that did not generate them count continuations, too.

The server's process keeps them: an engine forgets its counts when it starts again, and knows nothing of other engines.
This module imports no compiler, unlike its neighbours.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

import numpy as np

PROMPT_BYTES = 4 * 65_536
"""Maximum of a prompt's answers: 65,536 tokens, which a worker counts in a tenth of a second."""
ANSWER_BYTES = 512
"""Memory of an answer beside its tokens."""
MAX_MEMORIES = 64
"""Limit of memories in `Prompt.last_sent`."""
KEY_BYTES = 16
_HEAD = Struct(f"<{KEY_BYTES}sI")

Answers = Sequence[tuple[int, bytes]]
"""Age in updates of the weights, and token ids as int32, of each answer."""


class Answer(NamedTuple):
    """``tokens``: token ids as int32. ``counted_by``: the memory that has counted it already, or None."""

    prompt_key: bytes
    epoch: int
    tokens: bytes
    counted_by: int | None


class Prompt:
    """The answers of a prompt, by their numbers in ascending order.

    ``last_sent``: the last number that each memory has.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.token_bytes = 0
        self.last_sent: dict[int, int] = {}


def hash_prompt(token_ids: Sequence[int], adapter: str | None) -> bytes:
    """Return the key of a prompt's answers."""
    adapter_name = b"" if adapter is None else adapter.encode()
    digest = blake2b(adapter_name + b"\0", digest_size=KEY_BYTES)
    digest.update(array("i", token_ids))
    return digest.digest()


class History:
    """The newest answers of all prompts.

    A *memory* is the number of one engine's counts, until they are emptied or lost.

    Args:
        limit: maximum bytes. The oldest answers are dropped.
        save: called with the number and the content of each new answer, and with None for an answer that is dropped.
    """

    def __init__(self, limit: int, save: Callable[[int, bytes | None], None]) -> None:
        self.bytes = 0
        """Memory that all answers take."""
        self._max_bytes = limit
        self._save = save
        # Answers by number, the oldest first, and their prompts by key.
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._prompts: dict[bytes, Prompt] = {}
        self._last_number = 0
        # Number of updates of the weights so far.
        self._epoch = 0
        self._weight_version: object = None

    @property
    def prompts(self) -> int:
        return len(self._prompts)

    def restore(self, rows: Iterable[tuple[int, bytes | None]], vocabulary: int) -> int:
        """Add saved answers in ascending order of their numbers, and return how many were unusable and are dropped.

        ``vocabulary``: number of tokens of the model. A draft with another token would end the engine.
        """
        unusable = 0
        for number, saved in rows:
            self._last_number = number
            tokens = b"" if saved is None else saved[_HEAD.size :]
            if saved is None or not _are_valid_tokens(tokens, vocabulary):
                unusable += 1
                self._save(number, None)
                continue
            prompt_key, epoch = _HEAD.unpack_from(saved)
            # The weights may have changed since. Answers of other runs are at least one update old.
            self._epoch = max(self._epoch, epoch + 1)
            self._keep(number, Answer(prompt_key, epoch, tokens, None))
        return unusable

    def age_if_new_version(self, version: object) -> None:
        # The age of an answer is the number of epochs since its own.
        if self._weight_version is not None and version != self._weight_version:
            self._epoch += 1
        self._weight_version = version

    def add(self, key: bytes, tokens: bytes, memory: int) -> None:
        """Keep an answer that ``memory`` has counted. ``tokens``: token ids as int32."""
        answer = Answer(key, self._epoch, tokens[:PROMPT_BYTES], memory)
        self._last_number += 1
        self._save(self._last_number, _HEAD.pack(answer.prompt_key, answer.epoch) + answer.tokens)
        self._keep(self._last_number, answer)

    def take_unsent(self, key: bytes, memory: int) -> Answers:
        """Return the answers of a prompt that a memory does not have, the newest first, and mark them as sent."""
        # A memory numbers the counts of one engine. Emptied counts get a new number.
        prompt = self._prompts.get(key)
        if prompt is None:
            return []
        last_sent = prompt.last_sent.pop(memory, 0)
        prompt.last_sent[memory] = prompt.numbers[-1]
        # The memory that has waited longest is first, because others were put at the end again. If its engine still
        # runs, it gets the answers again.
        if len(prompt.last_sent) > MAX_MEMORIES:
            del prompt.last_sent[next(iter(prompt.last_sent))]
        unsent = []
        for number in reversed(prompt.numbers):
            if number <= last_sent:
                break
            answer = self._answers[number]
            # A memory has counted the answers of its own engine.
            if answer.counted_by != memory:
                unsent.append((self._epoch - answer.epoch, answer.tokens))
        return unsent

    def send_again(self, key: bytes, memory: int) -> None:
        """Let a memory get the answers of a prompt once more, because it did not receive them."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            prompt.last_sent.pop(memory, None)

    def _keep(self, number: int, answer: Answer) -> None:
        self._answers[number] = answer
        prompt = self._prompts.setdefault(answer.prompt_key, Prompt())
        prompt.numbers.append(number)
        prompt.token_bytes += len(answer.tokens)
        self.bytes += len(answer.tokens) + ANSWER_BYTES
        while prompt.token_bytes > PROMPT_BYTES:
            self._drop(prompt.numbers[0])
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._answers)))

    def _drop(self, number: int) -> None:
        answer = self._answers.pop(number)
        prompt = self._prompts[answer.prompt_key]
        # Callers drop the oldest answer of the prompt or of all prompts. Both are the first of their prompt.
        prompt.numbers.pop(0)
        prompt.token_bytes -= len(answer.tokens)
        self.bytes -= len(answer.tokens) + ANSWER_BYTES
        if not prompt.numbers:
            del self._prompts[answer.prompt_key]
        self._save(number, None)


def _are_valid_tokens(tokens: bytes, vocabulary: int) -> bool:
    if not tokens or len(tokens) % 4:
        return False
    ids = np.frombuffer(tokens, np.int32)
    return bool(ids.min() >= 0 and ids.max() < vocabulary)
