"""What a verifier gets and returns. Values only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from darts_server.types import PromptSpec


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished candidate.

    ``prompt``: the caller's prompt. Its metadata is a JSON object with the columns that verifiers read.
    ``text``: the generated text, without stop tokens.
    ``token_ids``: the generated tokens.
    """

    prompt: PromptSpec
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says of an answer.

    ``reward``: finite also if two are subtracted. None if the verifier failed, took too long, or returned no number.
    ``correct``: whether the answer is right, or None without a reward.
    """

    reward: float | None
    correct: bool | None


NO_VERDICT = Verdict(None, None)


class Verifier(Protocol):
    """Gives rewards to answers, outside the event loop.

    An implementation limits the time of a call, so that every call of `verify` ends. It never raises: a verifier that
    fails gives `NO_VERDICT`.
    """

    async def verify(self, answer: Answer, names: Sequence[str] = ()) -> Verdict:
        """Verify an answer. ``names``: the verifiers of the command line that are used; all of them if empty."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Names that a request may choose from."""
        ...
