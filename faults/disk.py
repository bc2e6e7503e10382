"""Full disks, damaged files, and a state folder that two servers share."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import httpx
import psutil
from safetensors.torch import save

from darts_server.demo.server import DARTS, Server
from darts_server.exceptions import StateError
from darts_server.store import Store
from darts_server.store.database import FILE_NAME
from faults.bystanders import ANSWER_SECONDS, GROUP, bystanders
from faults.case import PROMPT, Fault, Outcome, Scene, Target
from tests.integration.weights import ORIGINAL

SMALL_FILE_BYTES = 8192
"""The largest file while the disk counts as full."""
TIMEOUT_SECONDS = 30.0


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """Limit the size of the server's files, in place of a disk that is really full."""
    process = psutil.Process(server.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (SMALL_FILE_BYTES, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


async def disk_full_for_state(scene: Scene) -> Outcome:
    """Fill the disk: groups go on while nothing can be written, and writing goes on once there is space."""
    outcome, server = Outcome(injected=1), scene.target
    async with bystanders(server, outcome):
        with full_disk(server):
            outcome.expect(await _becomes(server, "darts_store_fault", 1.0), "the fault is not in the metrics")
            await asyncio.sleep(scene.count(10, 2))
        outcome.expect(await _becomes(server, "darts_store_fault", 0.0), "writing does not go on")
    return outcome


async def disk_full_for_weights(scene: Scene) -> Outcome:
    """Push weights to a full disk: they are refused, the old ones stay, and later ones are accepted."""
    outcome, server = Outcome(), scene.target
    url, body = f"{server.url}/darts/v1/weights", save(ORIGINAL)
    async with bystanders(server, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        version = (await client.get(url)).json()["version"]
        with full_disk(server):
            for _ in range(scene.count(10, 2)):
                outcome.injected += 1
                answer = await client.put(url, content=body)
                outcome.expect(answer.status_code == 507, f"answered with {answer.status_code} {answer.text[:200]}")
        outcome.expect((await client.get(url)).json()["version"] == version, "the version has changed")
        answer = await client.put(url, content=body)
        outcome.expect(answer.status_code == 200, f"with space again: {answer.status_code} {answer.text[:200]}")
    return outcome


async def damaged_state(scene: Scene) -> Outcome:
    """Flip bits of a state file, or truncate it: it is refused and left unchanged, or its documents are intact."""
    outcome = Outcome()
    with TemporaryDirectory(dir=scene.folder) as name:
        folder = Path(name)
        documents: dict[str, dict[str, str | int | float | bool | None]] = {
            f"{number:032}": {"number": number, "mean": number / 7} for number in range(200)
        }
        with Store(folder) as store:
            for key, document in documents.items():
                store.put("prompt", key, document)
        path, whole = folder / FILE_NAME, (folder / FILE_NAME).read_bytes()
        for _ in range(scene.count(2000, 100)):
            outcome.injected += 1
            path.write_bytes(data := _damaged(whole, scene.random))
            try:
                with Store(folder) as store:
                    outcome.expect(dict(store.items("prompt")) == documents, "damaged documents were read")
            except StateError as error:
                outcome.expect(str(path) in str(error), f"the message does not name the file: {error}")
                outcome.expect(path.read_bytes() == data, "a refused file was changed")
            outcome.survived += 1
        if not scene.quick:
            path.write_bytes(whole[: len(whole) // 2])
            began = time.monotonic()
            command = [sys.executable, "-m", *DARTS, "--state-dir", str(folder)]
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
            outcome.stall = time.monotonic() - began
            message = ended.stderr.strip().splitlines()[-1]
            outcome.expect(ended.returncode == 2 and str(path) in message, f"exit code {ended.returncode}: {message}")
    return outcome


async def two_servers(scene: Scene) -> Outcome:
    """Run two servers on one state folder: each sees the other's prompts, and neither is held up."""
    one, two = scene.other, scene.target
    assert one is not None, "the other server on this folder is missing"
    outcome = Outcome(injected=1)
    async with bystanders(one, outcome), bystanders(two, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        for number in range(scene.count(20, 3)):
            for ours, theirs in ((one, two), (two, one)):
                key = f"shared {number} {ours.url[-5:]}"
                body = {**GROUP, "prompts": [{"text": PROMPT, "key": key}]}
                (await client.post(f"{ours.url}/darts/v1/rollouts", json=body)).raise_for_status()
                outcome.expect(await _has_prompt(client, theirs, key), f"the other server does not have {key}")
    for server in (one, two):
        outcome.expect(server.metric("darts_store_fault") == 0, "the state cannot be written")
    return outcome


def _damaged(whole: bytes, rng: Random) -> bytes:
    if rng.random() < 0.3:
        return whole[: rng.randrange(len(whole))]
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


async def _becomes(server: Server, metric: str, value: float) -> bool:
    began = time.monotonic()
    while await asyncio.to_thread(server.metric, metric) != value:
        if time.monotonic() - began > TIMEOUT_SECONDS:
            return False
        await asyncio.sleep(0.1)
    return True


async def _has_prompt(client: httpx.AsyncClient, server: Server, key: str) -> bool:
    began = time.monotonic()
    while (await client.get(f"{server.url}/darts/v1/prompts/{key}")).status_code != httpx.codes.OK:
        if time.monotonic() - began > TIMEOUT_SECONDS:
            return False
        await asyncio.sleep(0.1)
    return True


FAULTS = [
    Fault("disk-full-state", "no space for the state", Target.SHARED, disk_full_for_state),
    Fault("disk-full-weights", "no space for pushed weights", Target.SHARED, disk_full_for_weights),
    Fault("damaged-state", "a state file with flipped bits or truncated", Target.OWN, damaged_state),
    Fault("two-servers", "two servers on one state folder", Target.SECOND, two_servers),
]
