"""The agent: one session of turns and calls of the calculator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedTokenizerFast

from darts_server.offline.demo.problems import EQUALS
from examples.calculator.task import MAX_TOKENS, Problem, calculator, reward, tool_seconds
from examples.tiny_rl.tokenizer import EOS_ID, build_tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MODEL_NAME = "tiny"
SESSION_OVER = 410
"""Status of the answer to a request of a session that the server has stopped."""

End = Literal["answered", "truncated", "stopped"]


@dataclass(frozen=True)
class Turn:
    """The policy's part of a turn."""

    token_ids: Sequence[int]
    is_aborted: bool = False
    """Whether the server stopped the session in the turn."""


Complete = Callable[[Sequence[int], int], Awaitable[Turn]]
"""Samples a turn after these tokens, with this limit of tokens. Raises `SessionOver`."""
Wait = Callable[[int], Awaitable[None]]
"""Waits as long as the calculator takes for the call of this number."""


class SessionOver(Exception):
    """The server refused a request, because it had stopped the session."""


@dataclass
class Episode:
    """One session as the agent sees it."""

    problem: Problem
    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    tokens: list[int] = field(default_factory=list)
    """All tokens so far, without an aborted turn."""
    prompt_length: int = 0
    text: str = ""
    """Text of the last turn, without the end of sequence."""
    turns: int = 0
    """Number of requests for a turn."""
    calls: int = 0
    """Number of calls of the calculator."""
    is_calling: bool = False
    """Whether the calculator has not answered the last turn yet."""
    end: End | None = None
    refused: int = 0
    """Number of requests that the server refused, because it had stopped the session."""

    def __post_init__(self) -> None:
        self.tokens = self.tokenizer.encode(self.problem.prompt)
        self.prompt_length = len(self.tokens)

    @property
    def reward(self) -> float:
        """Reward of the final answer, or 0 without a final answer."""
        if self.end != "answered":
            return 0.0
        return reward(self.problem, self.text)

    @property
    def room(self) -> int:
        """Number of tokens that the policy may still write."""
        return MAX_TOKENS - len(self.tokens)

    def take_turn(self, turn: Turn) -> None:
        """Add a turn that the policy has written."""
        if turn.is_aborted:
            self.end = "stopped"
            return
        self.tokens += turn.token_ids
        last = self.tokens[-1]
        self.text = str(self.tokenizer.decode([token for token in turn.token_ids if token != EOS_ID]))
        if last == EOS_ID:
            self.end = "answered"
        elif self.text.endswith(EQUALS):
            self.calls += 1
            self.is_calling = True
        else:
            self.end = "truncated"

    def take_result(self) -> None:
        """Add the calculator's answer to the last turn."""
        self.is_calling = False
        self.tokens += self.tokenizer.encode(calculator(self.text))
        if self.room <= 0:
            self.end = "truncated"


async def play(episode: Episode, complete: Complete, wait: Wait) -> None:
    """Continue a session to its end. A cancelled session can be continued later, from its last whole turn."""
    while episode.end is None:
        if episode.is_calling:
            await wait(episode.calls)
            episode.take_result()
            continue
        episode.turns += 1
        try:
            turn = await complete(episode.tokens, episode.room)
        except SessionOver:
            episode.refused += 1
            episode.end = "stopped"
            return
        episode.take_turn(turn)


def openai_complete(client: AsyncOpenAI) -> Complete:
    """Return a function that samples turns with an OpenAI client, whose URL or key names the session."""
    # Import it here: agents on scripted policies do not need the package.
    from openai import APIStatusError

    [stop] = build_tokenizer().encode(EQUALS)

    async def complete(tokens: Sequence[int], limit: int) -> Turn:
        options: dict[str, Any] = {"stop_token_ids": [stop], "return_token_ids": True}
        try:
            answer = await client.completions.create(
                model=MODEL_NAME,
                prompt=list(tokens),
                max_tokens=limit,
                temperature=1.0,
                extra_body=options,
            )
        except APIStatusError as error:
            if error.status_code != SESSION_OVER:
                raise
            raise SessionOver(error.message) from error
        choice = answer.choices[0]
        extra = choice.model_extra or {}
        return Turn(extra["token_ids"] or (), str(choice.finish_reason) == "abort")

    return complete


def slow_tool(seed: str) -> Wait:
    """Return a function that sleeps as long as each call takes. Times depend only on the seed and the call."""

    async def wait(call: int) -> None:
        await asyncio.sleep(tool_seconds(Random(f"{seed}/{call}")))

    return wait


async def fast_tool(_: int) -> None:
    """Answer at once."""
