"""What each program runs with a harness's own loop: a group of sessions, whose losers the server stops."""

import argparse
import asyncio
import json
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SIZE = 2
"""Sessions that are returned."""
TURNS = (2, 6, 6, 6, 6, 6)
"""Turns of each session's agent. The first session is the shortest, so most others are stopped."""
MAX_TOKENS = 24
"""Tokens of a turn. Six turns fit into the context of the tiny policy."""
TOOL_SECONDS = 0.5
"""Time of a tool call. With it, some sessions are stopped in a tool, and others in a turn."""
PROMPT = "7a-5b*4>"
FINAL_SHARE = 0.3
"""Share of the turns that are final, where agents have no number of turns each."""

Session = dict[str, Any]
Loop = Callable[[Session, int], Awaitable[None]]
"""Runs the agent of a session for a number of turns, with the harness's own code."""


def calculate(text: str) -> str:
    """Stand in for a tool: return the length of a text, in the alphabet of the tiny policy."""
    time.sleep(TOOL_SECONDS)
    return f"{len(text) % 10}a+1b>"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--stopped-as", default="abort")
    parser.add_argument("--over-status", type=int, default=410)
    return parser.parse_args()


async def run(run_loop: Loop, args: argparse.Namespace) -> None:
    """Run a group, and print a line of JSON for each session."""
    # Python's own number of threads depends on the machine, and loops that wait for threads would not end.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4 * len(TURNS)))
    url = args.url
    settings = {"policy": "uniform", "stopped_as": args.stopped_as, "over_status": args.over_status}
    size = {"prompt_key": "calculator", "size": SIZE, "extra": len(TURNS) - SIZE}
    group = call(f"{url}/darts/v1/sessions", size | settings)
    group_url = f"{url}/darts/v1/session-groups/{group['group_id']}"
    ended = asyncio.create_task(asyncio.to_thread(wait_for_end, group_url))
    lines = await asyncio.gather(*(play(run_loop, url, session) for session in group["sessions"]))
    group_ended_at = await ended
    for line, state in zip(lines, call(group_url)["sessions"], strict=True):
        line["late"] = round(line.pop("ended_at") - group_ended_at, 2)
        print(json.dumps(line | {name: state[name] for name in ("end", "turns", "selected")}), flush=True)


async def play(run_loop: Loop, url: str, session: Session) -> dict[str, Any]:
    """Run the agent of one session, and end the session as a trainer does.

    Raises:
        Exception: of the loop, if the session was not stopped.
    """
    error = None
    session_url = f"{url}/darts/v1/sessions/{session['id']}"
    try:
        await run_loop(session, TURNS[session["index"]])
    except Exception as exc:
        state = await asyncio.to_thread(call, session_url)
        if state["state"] == "open":
            await asyncio.to_thread(call, f"{url}/darts/v1/session-groups/{state['group_id']}", method="DELETE")
            raise
        error = f"{type(exc).__name__}: {exc}"
    ended_at = time.monotonic()
    if error is None:
        # For a session that was stopped, this only keeps the reward.
        await asyncio.to_thread(call, f"{session_url}:end", {"reward": 1.0})
    return {"index": session["index"], "error": error, "ended_at": ended_at}


def wait_for_end(group_url: str) -> float:
    """Return the time at which the group was complete."""
    after = 0
    while True:
        answer = call(f"{group_url}/events?wait=20&after={after}")
        after = answer["next"]
        if any(event["type"] in ("completed", "failed", "cancelled") for event in answer["events"]):
            return time.monotonic()


def call(url: str, body: Any = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
