"""Rewards, new weights and a shutdown while groups are running."""

import asyncio
import signal
import time

import httpx
from safetensors.torch import save

from darts_server.store import Store
from faults.bystanders import ANSWER_SECONDS, GROUP, LONG, bystanders, wait_until_started
from faults.case import Fault, Outcome, Scene, Target
from tests.integration.weights import ORIGINAL

RULES = ("finish", "keep", "restart")


async def rewards(scene: Scene) -> Outcome:
    """Report rewards twice, late, and for unknown trajectories."""
    outcome, url = Outcome(), f"{scene.target.url}/darts/v1/rewards"
    async with bystanders(scene.target, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        late: list[str] = []
        for number in range(scene.count(100, 10)):
            answer = await client.post(f"{scene.target.url}/darts/v1/rollouts", json=GROUP)
            ids = [t["trajectory_id"] for group in answer.json()["groups"] for t in group["trajectories"]]
            named = [*ids[:2], *ids[:2], *late, f"unknown-{number}:0", "no id"]
            reported = await client.post(url, json={"rewards": [{"trajectory_id": i, "reward": 1.0} for i in named]})
            counts, expected = reported.json(), {"matched": 2 + len(late), "repeated": 2, "unknown": 2}
            outcome.injected += len(named)
            outcome.expect({k: counts.get(k) for k in expected} == expected, f"{counts} instead of {expected}")
            late = ids[2:]
    return outcome


async def weights(scene: Scene) -> Outcome:
    """Push weights again and again under each rule, and one incomplete set, while groups and streams run."""
    outcome, server = Outcome(), scene.target
    sets = [save(ORIGINAL), save({name: tensor * 1.001 for name, tensor in ORIGINAL.items()})]
    async with bystanders(server, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        stream = asyncio.create_task(client.post(f"{server.url}/v1/completions", json={**LONG, "stream": True}))
        for number in range(scene.count(60, 6)):
            for rule in RULES:
                url = f"{server.url}/darts/v1/weights?rule={rule}"
                answer = await client.put(url, content=sets[number % 2])
                outcome.expect(
                    answer.status_code == 200, f"an update by {rule}: {answer.status_code} {answer.text[:200]}"
                )
                outcome.injected += 1
        bad = await client.put(f"{server.url}/darts/v1/weights", content=sets[0][:-100])
        outcome.expect(bad.status_code == 400, f"a set that is cut off: {bad.status_code}")
        streamed = await stream
        outcome.expect("[DONE]" in streamed.text, f"a stream ended with {streamed.text[-200:]}")
    return outcome


async def sigterm(scene: Scene) -> Outcome:
    """Send SIGTERM while groups are running: each caller gets its group or an error, and state is saved."""
    outcome, server = Outcome(injected=1), scene.target
    started = server.metric("darts_candidates_started_total")
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_connections=None)) as client:
        bodies = [{**LONG, "stream": bool(number % 2)} for number in range(24)]
        requests = [asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body)) for body in bodies]
        await wait_until_started(server, started + 6 * len(bodies))
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for answer in await asyncio.gather(*requests, return_exceptions=True):
            answered = isinstance(answer, httpx.Response) and _is_group_or_error(answer)
            outcome.survived += answered
            outcome.lost += not answered
        outcome.stall = time.monotonic() - began
    code = await asyncio.to_thread(server.process.wait, ANSWER_SECONDS)
    outcome.expect(code == 0, f"exit code {code}: {server.log_tail()}")
    with Store(scene.folder / "state") as store:
        outcome.expect(store.count("prompt") > 0, "the state folder has no prompt statistics")
    return outcome


def _is_group_or_error(answer: httpx.Response) -> bool:
    streamed = answer.headers.get("Content-Type", "").startswith("text/event-stream")
    if streamed:
        return "[DONE]" in answer.text or '"error"' in answer.text
    return bool(answer.json().get("choices") or answer.json().get("error"))


FAULTS = [
    Fault("rewards", "rewards repeated, late, for unknown trajectories", Target.SHARED, rewards),
    Fault("weights", "new weights while groups and streams run", Target.SHARED, weights),
    Fault("sigterm", "SIGTERM under load", Target.SECOND, sigterm),
]
