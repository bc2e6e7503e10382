"""What overlap keeps of a prompt and of a candidate, and which of them go into the next forward pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ._forward import KeysValues, Result, Row


@dataclass(slots=True, eq=False)
class Fed:
    """Tokens that are fed to the model in order, all but the last: nothing is known to follow that one."""

    tokens: list[int]
    fed: int = 0
    kept: KeysValues | None = None  # of the fed ones

    @property
    def waiting(self) -> int:
        """Tokens that can be fed."""
        return len(self.tokens) - 1 - self.fed

    def past(self) -> list[KeysValues]:
        """What the next tokens attend to."""
        return [] if self.kept is None else [self.kept]

    def row(self, count: int) -> Row:
        """The next `count` tokens."""
        return Row(self.past(), self.tokens[self.fed : self.fed + count], [])

    def take(self, result: Result) -> None:
        """The row has been forwarded."""
        self.kept = result.kept if self.kept is None else self.kept.then(result.kept)
        self.fed += len(result.kept)


@dataclass(slots=True, eq=False)
class Prompt(Fed):
    """A prompt. Its last token begins each candidate, so that the first completion token is scored like any other."""

    closed: bool = False  # no candidate comes any more
    candidates: "list[Candidate]" = field(default_factory=list)

    def forget_if_unused(self) -> None:
        """Let go what is kept, and forward nothing more, once nothing can attend to it."""
        if self.closed and not any(candidate.continues for candidate in self.candidates):
            self.kept, self.fed = None, len(self.tokens) - 1


@dataclass(slots=True, eq=False, kw_only=True)
class Candidate(Fed):
    """The last token of its prompt and then its own. It attends to what is kept of the prompt, without a copy."""

    trajectory_id: str
    number: int
    prompt: Prompt
    finished: bool = False
    logprobs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Completion tokens added so far."""
        return len(self.tokens) - 1

    @property
    def continues(self) -> bool:
        """Whether it has, or may get, tokens to feed."""
        return not self.finished or self.waiting > 0

    def past(self) -> list[KeysValues]:
        return [*self.prompt.past(), *Fed.past(self)]

    def row(self, count: int) -> Row:
        start, end = self.fed, self.fed + count
        return Row(self.past(), self.tokens[start:end], self.tokens[start + 1 : end + 1])

    def take(self, result: Result) -> None:
        Fed.take(self, result)
        self.logprobs.append(result.logprobs)
        if result.entropies is not None:
            self.entropies.append(result.entropies)
        self.forget_if_done()

    def finish(self, length: int) -> None:
        """Its first `length` tokens are all that counts."""
        del self.tokens[length + 1 :]
        self.fed = min(self.fed, length)
        self.finished = True
        self.forget_if_done()

    def forget_if_done(self) -> None:
        """Let go what is kept once nothing more is fed."""
        if not self.continues:
            self.kept = None
            self.prompt.forget_if_unused()

    def joined(self, pieces: list[Tensor]) -> Tensor:
        """Log-probs or entropies [length]; what was computed past the end does not count."""
        return torch.cat(pieces)[: self.length] if pieces else torch.empty(0)


def next_batch(waiting: Iterable[Fed], batch_tokens: int) -> list[tuple[Fed, Row]]:
    """What to feed together: those with most waiting first, so that rows are alike and none waits for ever.

    Rows times (longest past + most inputs), so with padding, are at most `batch_tokens`; one row alone may have that
    many inputs beside its past.
    """
    batch: list[tuple[Fed, Row]] = []
    longest = 0
    for fed in sorted(waiting, key=lambda fed: fed.waiting, reverse=True):
        row = fed.row(min(fed.waiting, batch_tokens))
        longest = max(longest, sum(map(len, row.past)))
        width = len(batch[0][1].inputs) if batch else len(row.inputs)
        if batch and (len(batch) + 1) * (longest + width) > batch_tokens:
            break
        batch.append((fed, row))
    return batch
