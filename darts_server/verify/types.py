"""A verifier's arguments and results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from darts_server.types import PromptSpec


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished candidate."""

    prompt: PromptSpec
    """Its metadata has the columns that verifiers read."""
    text: str
    """Without stop tokens."""
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification. Without a reward, both fields are None."""

    reward: float | None
    """Finite, also if two rewards are subtracted."""
    correct: bool | None


NO_VERDICT = Verdict(None, None)


class Verifier(Protocol):
    """Gives rewards to answers."""

    async def verify(self, answer: Answer, names: Sequence[str] = ()) -> Verdict:
        """Verify an answer by the verifiers ``names``, or all. Ends in limited time, and never raises."""
        ...

    @property
    def names(self) -> Sequence[str]: ...
