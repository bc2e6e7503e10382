"""Replay traced sessions of an agent on the real engine, under session groups and their controls; print a table.

    python -m benchmarks.sessions TRACE
    python -m benchmarks.sessions TRACE --steps 4 --policies off uniform

``TRACE`` has one session a line, with its turns and tools: the form of ``multiturn_workload`` of PolyTrace, as in
``darts-server simulate --trace``. Lengths are imposed, and tools sleep for their traced seconds, both scaled, because
the model is tiny. A step runs the groups of `GROUPS` prompts at once, and ends when each has `SIZE` sessions.

* ``off``: `SIZE` sessions of each prompt, all of them run to their end.
* ``first``: all traced sessions of each prompt; the `SIZE` that finish first are kept, as other servers do. Biased.
* ``uniform``: the same sessions as ``first``; the server selects, and gives weights.
* ``cap``: the sessions of ``off``, cut at the deadline.

All policies get the same sessions, in the same order. The bias is that of the mean length in generated tokens of all
traced sessions of a prompt, estimated from the kept sessions with their weights.
"""

import argparse
import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.tables import markdown
from darts_server.offline.demo.server import DARTS, Server, serving

SIZE = 5
"""Kept sessions of a prompt. The trace has eight sessions of each prompt."""
GROUPS = 16
TOKEN_SCALE = 1 / 8
PROMPT_SCALE = 1 / 64
TOOL_SCALE = 1 / 4
"""The tiny model generates an eighth of the tokens, in steps of some half the time of an 8B model on an H200."""
CONTEXT = 1024
POLICIES = ("off", "first", "uniform", "cap")
FLAGS = ("--policy", "off", "--max-model-len", str(CONTEXT), "--max-num-seqs", "256")
ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
DIGIT = 3
"""Any token of the tiny model."""


@dataclass(frozen=True, slots=True)
class TracedSession:
    """A session. ``turns``: new prompt tokens and generated tokens of each turn. ``tools``: seconds after each turn."""

    turns: tuple[tuple[int, int], ...]
    tools: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return sum(generated for _, generated in self.turns)


Step = Sequence[tuple[str, Sequence[TracedSession]]]
"""The prompts of a step, each with its sessions."""


@dataclass(slots=True)
class Counts:
    """What a policy's steps have done."""

    seconds: list[float] = field(default_factory=list)
    decode_steps: list[float] = field(default_factory=list)
    turns: int = 0
    tool_seconds: float = 0.0
    after_stop: int = 0
    differences: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Differences of weighted means from the means of all traced sessions, group by group."""
    failed: int = 0


def load(trace: Path, seed: int) -> list[list[TracedSession]]:
    """Read the sessions of each prompt, in random order."""
    groups: dict[tuple[int, int], list[TracedSession]] = defaultdict(list)
    for line in trace.read_text().splitlines():
        row = json.loads(line)
        turns = []
        before = 0
        for turn in row["turns"]:
            new = max(1, round((turn["prompt_tokens"] - before) * PROMPT_SCALE))
            turns.append((new, max(1, round(turn["generated"] * TOKEN_SCALE))))
            before = turn["prompt_tokens"] + turn["generated"]
        seconds = {tool["turn"]: tool["seconds"] * TOOL_SCALE for tool in row["tools"]}
        tools = tuple(seconds.get(number, 0.0) for number in range(len(turns)))
        groups[row["step"], row["group"]].append(TracedSession(tuple(turns), tools))
    rng = random.Random(seed)
    shuffled = [rng.sample(sessions, len(sessions)) for sessions in groups.values()]
    return [sessions for sessions in shuffled if all(sum(n + g for n, g in s.turns) < CONTEXT for s in sessions)]


async def run_session(
    client: httpx.AsyncClient, session: Mapping[str, Any], traced: TracedSession, counts: Counts
) -> None:
    """Run one session as an agent does, until its end or until the server stops it."""
    history: list[int] = []
    for (new, generated), seconds in zip(traced.turns, traced.tools, strict=True):
        history += [DIGIT] * new
        body = {
            "model": "tiny",
            "prompt": history,
            "max_tokens": generated,
            "min_tokens": generated,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await client.post(f"{session['base_url']}/completions", json=body)
        if answer.status_code == httpx.codes.GONE:
            counts.after_stop += 1
            return
        answer.raise_for_status()
        if answer.json()["darts_session"]["state"] == "over":
            return
        counts.turns += 1
        history += answer.json()["choices"][0]["token_ids"]
        if seconds:
            begin = time.monotonic()
            try:
                await asyncio.sleep(seconds)
            finally:
                # A busy machine wakes later than it should.
                counts.tool_seconds += min(seconds, time.monotonic() - begin)
    ended = await client.post(f"/darts/v1/sessions/{session['id']}:end", json={})
    ended.raise_for_status()


async def run_group(
    client: httpx.AsyncClient, key: str, sessions: Sequence[TracedSession], policy: str, counts: Counts
) -> None:
    """Run a group until it has `SIZE` sessions, and compare their means with those of all traced sessions."""
    runs_all = policy in ("first", "uniform")
    request = {
        "prompt_key": key,
        "policy": "off" if policy == "first" else policy,
        "size": len(sessions) if policy == "first" else SIZE,
        "extra": len(sessions) - SIZE if policy == "uniform" else 0,
    }
    made = (await client.post("/darts/v1/sessions", json=request)).raise_for_status().json()
    url = f"/darts/v1/session-groups/{made['group_id']}"
    tasks = {
        session["id"]: asyncio.create_task(run_session(client, session, sessions[session["index"]], counts))
        for session in made["sessions"]
    }
    finished = 0
    after = 0
    is_over = False
    while not is_over:
        answer = (await client.get(f"{url}/events", params={"after": after})).json()
        after = answer["next"]
        for event in answer["events"]:
            # The agent's environment is ended with its session, in the middle of a tool, too.
            if event["type"] == "stopped":
                tasks[event["session"]].cancel()
            finished += event["type"] == "ended"
            is_over |= event["type"] in ("completed", "failed", "cancelled")
        if policy == "first" and finished >= SIZE and not is_over:
            await client.delete(url)
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result

    state = (await client.get(url)).json()
    kept = [s for s in state["sessions"] if s["end"] in ("finished", "stopped") and s["selected"]]
    if policy == "first":
        kept = [s for s in state["sessions"] if s["end"] == "finished"][:SIZE]
    counts.failed += len(kept) != SIZE
    for name, value in (("tokens", lambda s: s.tokens), ("turns", lambda s: len(s.turns))):
        weights = [1.0 if s["weight"] is None or not runs_all else s["weight"] for s in kept]
        mean = sum(w * value(sessions[s["index"]]) for w, s in zip(weights, kept, strict=True)) / sum(weights)
        counts.differences[name].append(mean - fmean(value(session) for session in sessions))


async def run_step(
    url: str, groups: Sequence[tuple[str, Sequence[TracedSession]]], policy: str, counts: Counts
) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client, asyncio.TaskGroup() as tasks:
        for key, sessions in groups:
            tasks.create_task(run_group(client, key, sessions, policy, counts))


def replay(server: Server, steps: Sequence[Step]) -> dict[str, Counts]:
    counts = {policy: Counts() for policy in OPTIONS.policies}
    with tqdm(total=len(steps) * len(counts), unit="step") as bar:
        # Before the first step that counts, the engine is warmed up.
        asyncio.run(run_step(server.url, steps[0][:4], "off", Counts()))
        for number, groups in enumerate(steps):
            # By turns, so that another load of the machine meets all policies alike.
            for policy in sorted(counts, key=lambda name: (hash(name) + number) % len(counts)):
                before = server.metric("darts_decode_steps_total")
                begin = time.monotonic()
                asyncio.run(run_step(server.url, groups, policy, counts[policy]))
                counts[policy].seconds.append(time.monotonic() - begin)
                counts[policy].decode_steps.append(server.metric("darts_decode_steps_total") - before)
                bar.update()
    return counts


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the mean of paired ratios with its standard error."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"{fmean(ratios):.2f} ± {error:.2f}"


def z_of(differences: Sequence[float]) -> str:
    error = stdev(differences) / len(differences) ** 0.5
    mean = fmean(differences)
    return f"{mean:+.2f} ({mean / error if error else 0:+.1f})"


def table(counts: Mapping[str, Counts]) -> str:
    base = counts[OPTIONS.policies[0]]
    rows = []
    for policy, of in counts.items():
        rows.append(
            [
                policy,
                ratio(of.seconds, base.seconds),
                ratio(of.decode_steps, base.decode_steps),
                str(of.turns),
                f"{of.tool_seconds:.0f}",
                str(of.after_stop),
                z_of(of.differences["tokens"]),
                z_of(of.differences["turns"]),
                str(of.failed),
            ]
        )
    head = [
        "policy",
        f"time of a step, of `{OPTIONS.policies[0]}`",
        "decode steps",
        "answered turns",
        "tool seconds",
        "requests after a stop",
        "bias of the length in tokens (z)",
        "bias of the number of turns (z)",
        "groups without all sessions",
    ]
    return markdown(head, rows)


def main() -> None:
    groups = load(OPTIONS.trace, OPTIONS.seed)
    keyed = [(f"prompt {number}", sessions) for number, sessions in enumerate(groups)]
    steps = [keyed[begin : begin + GROUPS] for begin in range(0, len(keyed) - GROUPS + 1, GROUPS)][: OPTIONS.steps]
    print(f"{len(steps)} steps of {GROUPS} prompts, {SIZE} sessions of each")
    with TemporaryDirectory() as folder, serving(DARTS, Path(folder) / "log", *FLAGS, env=ENVIRONMENT) as server:
        counts = replay(server, steps)
        print(table(counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.sessions", description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--seed", type=int, default=0)
    OPTIONS = parser.parse_args()
    main()
