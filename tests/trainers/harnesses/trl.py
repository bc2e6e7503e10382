"""The loop of TRL's asynchronous trainer, unmodified: one loop for each session, with the session's URL."""

import asyncio
from typing import Any

import aiohttp
from accelerate import PartialState

from tests.trainers.harnesses.group import MAX_TOKENS, PROMPT, Session, calculate, parse_args, run
from tests.trainers.programs.trl import make_loop


def calculator(text: str) -> str:
    """Calculate.

    Args:
        text: a problem.
    """
    return calculate(text)


def make_calculating_loop(url: str, size: int, turns: int, loop_class: Any = None) -> Any:
    """Return TRL's loop, with a policy that calls the calculator in every answer with tokens."""
    loop = make_loop(url, [PROMPT], size, turns - 1, loop_class)
    loop.max_tokens = MAX_TOKENS
    loop.tools = loop._standalone_tools = [calculator]
    read = loop.tokenizer.parse_response

    def parse_response(ids: list[int], **more: Any) -> dict[str, Any]:
        message: dict[str, Any] = read(ids, **more)
        call = {"name": "calculator", "arguments": {"text": message["content"]}}
        message["tool_calls"] = [{"type": "function", "function": call}]
        return message if ids else {"role": "assistant", "content": ""}

    loop.tokenizer.parse_response = parse_response
    return loop


async def run_loop(session: Session, turns: int) -> None:
    loop = make_calculating_loop(session["base_url"].removesuffix("/v1"), 1, turns)
    prompt = [{"role": "user", "content": PROMPT}]
    async with aiohttp.ClientSession() as loop.session:
        await loop._generate_one(prompt, {"calculator": calculator}, [calculator])


if __name__ == "__main__":
    PartialState()
    asyncio.run(run(run_loop, parse_args()))
