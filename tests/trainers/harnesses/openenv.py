"""OpenEnv's own loop, `MCPHarnessAdapter`, with its client of OpenAI's API."""

import asyncio
from typing import Any

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ResourceSession, ToolResult, VerifyResult
from openenv.core.harness.collect import build_model_step
from openenv.core.llm_client import OpenAIClient

from tests.trainers.harnesses.group import MAX_TOKENS, PROMPT, Session, calculate, parse_args, run


class Calculator(ResourceSession):
    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": PROMPT}]

    def list_tools(self) -> list[Tool]:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [Tool(name="calculator", description="Calculate.", input_schema=schema)]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(data=calculate(arguments["text"]))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> VerifyResult:
        return VerifyResult(env_reward=1.0, done=True)

    def close(self) -> None:
        pass


async def run_loop(session: Session, turns: int) -> None:
    client = OpenAIClient(session["base_url"], None, "tiny", api_key=session["api_key"], max_tokens=MAX_TOKENS)
    limits = HarnessRunLimits(max_turns=turns, sampling={"temperature": 1.0})
    await asyncio.to_thread(MCPHarnessAdapter().run_white_box, build_model_step(client), Calculator(), limits)


if __name__ == "__main__":
    asyncio.run(run(run_loop, parse_args()))
