"""Agents' own loops with groups of sessions: see `harnesses/`. The server stops the losers, and their loops end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from darts_server.offline.demo.server import DARTS, Server, serving
from tests.trainers.environments import ROOT, create_or_skip
from tests.trainers.harnesses.group import SIZE, TURNS

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
SECONDS = 600
"""For one program: imports take most of it."""
MAX_LATE_SECONDS = 10.0
"""Time in which the loop of a loser ends after its group. TRL's first waits after an error are 1, 2 and 1 s."""
STOPPED = len(TURNS) - SIZE
REFUSED = "darts_session_requests_refused_total"


class Case(NamedTuple):
    """``refused``: requests that the loop of a stopped session may send. ``error``: how the loop of a stopped session
    may end, or None if it ends as after a final answer.
    """

    harness: str
    stopped_as: str
    over_status: int
    refused: int
    error: str | None


CASES = (
    Case("verifiers", "abort", 410, 1, "ProviderError"),
    Case("verifiers", "length", 200, 1, None),
    Case("openenv", "abort", 410, 1, "APIStatusError"),
    Case("openenv", "abort", 409, 1, "ConflictError"),
    Case("openenv", "length", 200, 1, None),
    Case("skyrl", "abort", 410, 1, "ClientResponseError"),
    # TRL's loop sends a request again after an error, up to ninety times.
    Case("trl", "length", 200, 1, None),
)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose tiny policy calls a tool in every answer."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "every-answer")
    plugin = ("--tool-parser-plugin", str(ROOT / "tests" / "trainers" / "harnesses" / "calls.py"))
    flags = ("--policy", "uniform", "--enable-scale-out", "--dialect", "skyrl", *tools, *plugin)
    with serving(DARTS, tmp_path_factory.mktemp("harnesses") / "log", *flags) as server:
        yield server


def run(name: str, python: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a program; return the lines that it has printed as JSON."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "clients")))
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    # verifiers starts `uv`, which prepares the process of its harness.
    environment["PATH"] = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    command = [str(python), "-m", f"tests.trainers.harnesses.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT)
    if "failed to prepare uv script" in done.stderr:
        pytest.skip("uv cannot install the packages of verifiers' harness here")
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def python_of(harness: str) -> Path:
    return Path(sys.executable) if harness == "trl" else create_or_skip(harness)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.harness}-{case.stopped_as}-{case.over_status}")
def test_the_loops_of_stopped_sessions_end_with_their_group(case: Case, calling: Server) -> None:
    python = python_of(case.harness)
    settings = ("--stopped-as", case.stopped_as, "--over-status", str(case.over_status))
    before = calling.metric(REFUSED)
    lines = run(case.harness, python, calling.url, *settings)
    refused = calling.metric(REFUSED) - before

    assert [line["index"] for line in lines] == list(range(len(TURNS)))
    selected = [line for line in lines if line["selected"]]
    stopped = [line for line in lines if line["end"] == "stopped"]
    assert len(selected) == SIZE
    assert len(stopped) == STOPPED
    for line in selected:
        assert (line["end"], line["turns"], line["error"]) == ("finished", TURNS[line["index"]], None)
    for line in stopped:
        assert line["turns"] < TURNS[line["index"]]
        assert line["late"] < MAX_LATE_SECONDS
        assert line["error"] is None or (case.error is not None and case.error in line["error"])
    assert refused <= case.refused * STOPPED


@pytest.mark.parametrize("harness", ["trl", "skyrl"])
def test_the_examples_return_the_selected_sessions_of_a_group(harness: str, calling: Server) -> None:
    python = python_of(harness)
    before = calling.metric(REFUSED)
    ends = calling.metric("darts_sessions_total", end="stopped")
    (line,) = run(f"{harness}_group", python, calling.url)
    assert line["trajectories"] == SIZE
    assert all(tokens > 0 for tokens in line["trained"])
    stopped = calling.metric("darts_sessions_total", end="stopped") - ends
    assert calling.metric(REFUSED) - before <= stopped


def test_the_answer_of_a_stopped_session_calls_no_tool(calling: Server) -> None:
    group = httpx.post(f"{calling.url}/darts/v1/sessions", json={"size": 1, "extra": 0, "policy": "off"}).json()
    (session,) = group["sessions"]
    tool = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "7a-5b*4>"}], "tools": [tool]}

    def answer(**fields: Any) -> Any:
        response = httpx.post(f"{session['base_url']}/chat/completions", json=chat | fields, timeout=60)
        return response.json()["choices"][0]

    first = answer(max_tokens=5)
    assert first["finish_reason"] == "tool_calls"
    assert first["message"]["tool_calls"][0]["function"]["name"] == "calculator"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(answer, max_tokens=250, ignore_eos=True)
        while calling.count_requests() == 0:
            time.sleep(0.01)
        httpx.delete(f"{calling.url}/darts/v1/session-groups/{group['group_id']}").raise_for_status()
        last = running.result()
    assert last["finish_reason"] == "abort"
    assert not last["message"].get("tool_calls")
