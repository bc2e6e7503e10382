"""verifiers' own agent: its harness `null` is a process with the tool loop, whose requests verifiers passes on."""

import asyncio
import os

import verifiers.v1 as vf
from verifiers.v1.agent import Agent
from verifiers.v1.mcp import SharedToolServer
from verifiers.v1.mcp.launch import serve_shared
from verifiers.v1.runtimes import SubprocessConfig

from tests.trainers.harnesses.group import MAX_TOKENS, PROMPT, Session, parse_args, run
from tests.trainers.harnesses.verifiers_tools import Calculator


async def play(session: Session, turns: int, tools: dict[str, SharedToolServer]) -> None:
    key = f"KEY_{session['index']}"
    os.environ[key] = session["api_key"]
    config = vf.AgentConfig(
        harness={"id": "null"},
        runtime=SubprocessConfig(),
        model="tiny",
        client=vf.EvalClientConfig(base_url=session["base_url"], api_key_var=key),
        sampling=vf.SamplingConfig(max_tokens=MAX_TOKENS, temperature=1.0),
        max_turns=turns,
    )
    trace = await Agent(config).run(vf.Task(vf.TaskData(prompt=PROMPT)), tools=tools)
    if not trace.ok:
        raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")


async def main() -> None:
    async with serve_shared([Calculator(vf.ToolsetConfig())]) as tools:
        await run(lambda session, turns: play(session, turns, tools), parse_args())


if __name__ == "__main__":
    asyncio.run(main())
