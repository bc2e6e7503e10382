"""Replay traced sessions of an agent on the real engine, under session groups and their controls; print a table.

    python -m benchmarks.sessions TRACE
    python -m benchmarks.sessions TRACE --token-scale 0.5 --policies off cap "tokens 487" "turns 4" "tail batching"

``TRACE`` is a trace of ``darts-server simulate`` with one session a line. Lengths are imposed, and tools sleep for
their traced seconds, both scaled, because the model is tiny. With a larger ``--token-scale`` decoding outweighs HTTP. A
step runs the groups of `GROUPS` prompts at once, and ends when each has `SIZE` sessions.

* ``off``: `SIZE` sessions of each prompt, all of them run to their end.
* ``first``: all traced sessions of each prompt; the `SIZE` that finish first are kept, as other servers do. Biased.
* ``uniform``: the same sessions as ``first``; the server selects, and gives weights.
* ``cap``: the sessions of ``off``, cut at the deadline.
* ``tail batching``: the sessions of ``off``, with `STARTED` times as many prompts. The first `GROUPS` complete groups
  end the step. The other prompts start again in the next step, with other sessions of the prompt.
* ``turns N``, ``tokens N``: the sessions of ``off`` with a limit of the agent. Tokens count before they are scaled.
  ``darts-server simulate`` prints the best limits in hindsight.

All policies get the same prompts in the same order. The bias is that of the mean length in generated tokens of all
traced sessions of a prompt, estimated from the kept sessions with their weights, as if nothing had cut them.
"""

import argparse
import asyncio
import random
import re
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
from darts_server.offline.simulation.model.sessions import Session, Turn
from darts_server.offline.simulation.sessions import limit_session
from darts_server.offline.simulation.workload import Format, read_traces

SIZE = 5
"""Kept sessions of a prompt. The trace has eight sessions of each prompt."""
GROUPS = 16
STARTED = 1.5
TOKEN_SCALE = 1 / 8
"""The tiny model generates an eighth of the tokens, in steps of some half the time of an 8B model on an H200."""
PROMPT_SCALE = 1 / 64
TOOL_SCALE = 1 / 4
TAIL = "tail batching"
POLICIES = ("off", "first", "uniform", "cap", TAIL)
ENVIRONMENT = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
DIGIT = 3
"""Any token of the tiny model."""


Prompts = Sequence[tuple[str, Sequence[Session]]]
"""Prompts with their key, each with its sessions."""


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
    kept: int = 0
    """Sessions that were kept."""
    cut: int = 0
    """Kept sessions that were cut."""
    tokens: int = 0
    """Tokens of the kept sessions, as if nothing had cut them."""
    lost: int = 0
    """Tokens of them that are missing."""


def load(trace: Path, seed: int, token_scale: float) -> list[list[Session]]:
    """Read the sessions of each prompt with scaled lengths, in random order."""
    rng = random.Random(seed)
    prompts, _ = read_traces([trace], Format.JSONL)
    scaled_prompts = []
    for prompt in prompts:
        sessions = []
        for session in prompt.sessions:
            turns = []
            for turn in session.turns:
                added = max(1, round(turn.added * PROMPT_SCALE))
                generated = max(1, round(turn.generated * token_scale))
                turns.append(Turn(added, generated, turn.tool_seconds * TOOL_SCALE))
            sessions.append(Session(tuple(turns), session.valid))
        scaled_prompts.append(rng.sample(sessions, len(sessions)))
    return scaled_prompts


def context_of(prompts: Sequence[Sequence[Session]]) -> int:
    """Return the tokens of the longest session, with its prompt and what its tools add."""
    return max(sum(turn.added + turn.generated for turn in each.turns) for sessions in prompts for each in sessions)


def parse_policy(text: str) -> str:
    """Check the name of a policy."""
    if text not in POLICIES and not re.fullmatch(r"(turns|tokens) [1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(POLICIES)}, turns N and tokens N")
    return text


def with_limit(policy: str, session: Session, token_scale: float) -> Session:
    """Return the session as an agent runs it under the policy's limit, or as it is if the policy has no limit."""
    unit, _, most = policy.partition(" ")
    if unit == "turns":
        return limit_session(session, turns=int(most))
    if unit == "tokens":
        return limit_session(session, tokens=max(1, round(int(most) * token_scale)))
    return session


async def run_session(client: httpx.AsyncClient, access: Mapping[str, Any], traced: Session, counts: Counts) -> None:
    """Run one session as an agent does, until its end or until the server stops it."""
    history: list[int] = []
    for turn in traced.turns:
        if turn.tool_seconds:
            begin = time.monotonic()
            try:
                await asyncio.sleep(turn.tool_seconds)
            finally:
                # A busy machine wakes later than it should.
                counts.tool_seconds += min(turn.tool_seconds, time.monotonic() - begin)
        history += [DIGIT] * turn.added
        body = {
            "model": "tiny",
            "prompt": history,
            "max_tokens": turn.generated,
            "min_tokens": turn.generated,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await client.post(f"{access['base_url']}/completions", json=body)
        if answer.status_code == httpx.codes.GONE:
            counts.after_stop += 1
            return
        answer.raise_for_status()
        if answer.json()["darts_session"]["state"] == "over":
            return
        counts.turns += 1
        history += answer.json()["choices"][0]["token_ids"]
    answer = await client.post(f"/darts/v1/sessions/{access['id']}:end", json={})
    answer.raise_for_status()


async def run_group(
    client: httpx.AsyncClient, key: str, sessions: Sequence[Session], policy: str, counts: Counts
) -> None:
    """Run a group until it has `SIZE` sessions, and compare their means with those of all traced sessions."""
    runs_all = policy in ("first", "uniform")
    request = {
        "prompt_key": key,
        "policy": policy if policy in ("uniform", "cap") else "off",
        "size": len(sessions) if policy == "first" else SIZE,
        "extra": len(sessions) - SIZE if policy == "uniform" else 0,
    }
    group = (await client.post("/darts/v1/sessions", json=request)).raise_for_status().json()
    url = f"/darts/v1/session-groups/{group['group_id']}"
    tasks = {}
    for access in group["sessions"]:
        traced = with_limit(policy, sessions[access["index"]], OPTIONS.token_scale)
        tasks[access["id"]] = asyncio.create_task(run_session(client, access, traced, counts))
    finished = 0
    after = 0
    is_over = False
    try:
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
    except asyncio.CancelledError:
        # The step has ended without this group.
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await client.delete(url)
        raise
    results = await asyncio.gather(*tasks.values(), return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result

    state = (await client.get(url)).json()
    kept = [s for s in state["sessions"] if s["end"] in ("finished", "stopped") and s["selected"]]
    if policy == "first":
        kept = [s for s in state["sessions"] if s["end"] == "finished"][:SIZE]
    counts.failed += len(kept) != SIZE
    for session in kept:
        whole = sessions[session["index"]].tokens
        counts.kept += 1
        counts.cut += session["cut"] or session["tokens"] < whole
        counts.tokens += whole
        counts.lost += max(0, whole - session["tokens"])
    for name, value in (("tokens", lambda s: s.tokens), ("turns", lambda s: len(s.turns))):
        weights = [1.0 if s["weight"] is None or not runs_all else s["weight"] for s in kept]
        mean = sum(w * value(sessions[s["index"]]) for w, s in zip(weights, kept, strict=True)) / sum(weights)
        counts.differences[name].append(mean - fmean(value(session) for session in sessions))


async def run_step(url: str, prompts: Prompts, policy: str, counts: Counts, enough: int) -> Prompts:
    """Run a step until enough groups are complete, and return the other prompts."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        tasks = {}
        for key, sessions in prompts:
            tasks[asyncio.create_task(run_group(client, key, sessions, policy, counts))] = (key, sessions)
        pending = {*tasks}
        while len(tasks) - len(pending) < enough:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return [prompt for task, prompt in tasks.items() if task in pending]


def replay(server: Server, steps: Sequence[Prompts], spare: Prompts) -> dict[str, Counts]:
    """Run all steps under all policies. ``spare``: prompts that tail batching starts in addition."""
    counts = {policy: Counts() for policy in OPTIONS.policies}
    rng = random.Random(OPTIONS.seed)
    with tqdm(total=len(steps) * len(counts), unit="step") as bar:
        # Before the first step that counts, the engine is warmed up.
        asyncio.run(run_step(server.url, steps[0][:4], "off", Counts(), 4))
        for number, prompts in enumerate(steps):
            # By turns, so that another load of the machine meets all policies alike.
            for policy in sorted(counts, key=lambda name: (hash(name) + number) % len(counts)):
                before = server.metric("darts_decode_steps_total")
                begin = time.monotonic()
                started = [*spare, *prompts] if policy == TAIL else prompts
                unfinished = asyncio.run(run_step(server.url, started, policy, counts[policy], len(prompts)))
                counts[policy].seconds.append(time.monotonic() - begin)
                counts[policy].decode_steps.append(server.metric("darts_decode_steps_total") - before)
                if policy == TAIL:
                    spare = [(key, rng.sample(sessions, len(sessions))) for key, sessions in unfinished]
                bar.update()
    return counts


def ratio(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the mean of paired ratios with its standard error."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"{fmean(ratios):.2f} ± {error:.2f}"


def format_bias(differences: Sequence[float]) -> str:
    error = stdev(differences) / len(differences) ** 0.5
    mean = fmean(differences)
    return f"{mean:+.2f} ({mean / error if error else 0:+.1f})"


def table(counts: Mapping[str, Counts]) -> str:
    base = counts[OPTIONS.policies[0]]
    rows = []
    for policy, total in counts.items():
        row = [
            policy,
            ratio(total.seconds, base.seconds),
            ratio(total.decode_steps, base.decode_steps),
            str(total.turns),
            f"{total.tool_seconds:.0f}",
            str(total.after_stop),
            format_bias(total.differences["tokens"]),
            format_bias(total.differences["turns"]),
            f"{total.cut / total.kept:.1%}",
            f"{total.lost / total.tokens:.1%}",
            str(total.failed),
        ]
        rows.append(row)
    head = [
        "policy",
        f"time of a step, of `{OPTIONS.policies[0]}`",
        "decode steps",
        "answered turns",
        "tool seconds",
        "requests after a stop",
        "bias of the length in tokens (z)",
        "bias of the number of turns (z)",
        "sessions that are cut",
        "tokens that are lost by that",
        "groups without all sessions",
    ]
    return markdown(head, rows)


def main() -> None:
    prompts = load(OPTIONS.trace, OPTIONS.seed, OPTIONS.token_scale)
    # The engine needs a place more than the longest session.
    context = context_of(prompts) + 1
    flags = ["--policy", "off", "--max-model-len", str(context), "--max-num-seqs", "256"]
    flags += ["--hf-overrides", f'{{"max_position_embeddings": {context}}}']
    keyed = [(f"prompt {number}", sessions) for number, sessions in enumerate(prompts)]
    extra = round((STARTED - 1) * GROUPS)
    spare = keyed[:extra]
    keyed = keyed[extra:]
    steps = [keyed[begin : begin + GROUPS] for begin in range(0, len(keyed) - GROUPS + 1, GROUPS)][: OPTIONS.steps]
    print(f"{len(steps)} steps of {GROUPS} prompts, {SIZE} sessions of each")
    with TemporaryDirectory() as folder, serving(DARTS, Path(folder) / "log", *flags, env=ENVIRONMENT) as server:
        print(table(replay(server, steps, spare)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.sessions", description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--policies", nargs="+", type=parse_policy, default=POLICIES, metavar="POLICY")
    scale_help = "traced tokens are multiplied by this (default: %(default)s)"
    parser.add_argument("--token-scale", type=float, default=TOKEN_SCALE, help=scale_help)
    parser.add_argument("--seed", type=int, default=0)
    OPTIONS = parser.parse_args()
    main()
