"""Disks that are full, files that are damaged, and folders that are shared."""

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
from faults.case import PROMPT, Fault, Outcome, Scene, Where
from faults.others import ANSWER_SECONDS, GROUP, others
from tests.integration.weights import ORIGINAL

TINY_FILES = 8192
"""Bytes that a file may have while the disk counts as full."""
PATIENCE = 30.0


@contextmanager
def full(server: Server) -> Iterator[None]:
    """A limit on the size of the server's files stands for a disk without room."""
    process = psutil.Process(server.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (TINY_FILES, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_FSIZE, before)


async def disk_full_for_state(scene: Scene) -> Outcome:
    """Groups go on while nothing can be written; what was learned is written when there is room again."""
    outcome, server = Outcome(injected=1), scene.target
    async with others(server, outcome):
        with full(server):
            outcome.expect(await _becomes(server, "darts_store_fault", 1.0), "the fault does not show in the metrics")
            await asyncio.sleep(scene.few(10, 2))
        outcome.expect(await _becomes(server, "darts_store_fault", 0.0), "nothing is written again")
    return outcome


async def disk_full_for_weights(scene: Scene) -> Outcome:
    """Pushed weights are refused, with the folder's name, and the old ones served; later ones are taken."""
    outcome, server = Outcome(), scene.target
    url, body = f"{server.url}/darts/v1/weights", save(ORIGINAL)
    async with others(server, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        version = (await client.get(url)).json()["version"]
        with full(server):
            for _ in range(scene.few(10, 2)):
                outcome.injected += 1
                answer = await client.put(url, content=body)
                outcome.expect(answer.status_code == 507, f"answered with {answer.status_code} {answer.text[:200]}")
        outcome.expect((await client.get(url)).json()["version"] == version, "the version has changed")
        answer = await client.put(url, content=body)
        outcome.expect(answer.status_code == 200, f"with room again: {answer.status_code} {answer.text[:200]}")
    return outcome


async def damaged_state(scene: Scene) -> Outcome:
    """A state file with bits flipped or its end cut off is refused untouched, or read as it was."""
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
        for _ in range(scene.few(2000, 100)):
            outcome.injected += 1
            path.write_bytes(data := _damaged(whole, scene.random))
            try:
                with Store(folder) as store:
                    outcome.expect(dict(store.items("prompt")) == documents, "damage was read as if it were right")
            except StateError as error:
                outcome.expect(str(path) in str(error), f"the message does not name the file: {error}")
                outcome.expect(path.read_bytes() == data, "a file that was refused was changed")
            outcome.survived += 1
        if not scene.quick:
            path.write_bytes(whole[: len(whole) // 2])
            began = time.monotonic()
            command = [sys.executable, "-m", *DARTS, "--state-dir", str(folder)]
            ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=300)
            outcome.stall = time.monotonic() - began
            said = ended.stderr.strip().splitlines()[-1]
            outcome.expect(ended.returncode == 2 and str(path) in said, f"exit code {ended.returncode}: {said}")
    return outcome


async def two_servers(scene: Scene) -> Outcome:
    """Two servers learn in one folder: each sees what the other learned, and neither is held up."""
    one, two = scene.other, scene.target
    assert one is not None, "there is another server on the same folder"
    outcome = Outcome(injected=1)
    async with others(one, outcome), others(two, outcome), httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
        for number in range(scene.few(20, 3)):
            for ours, theirs in ((one, two), (two, one)):
                key = f"shared {number} {ours.url[-5:]}"
                body = {**GROUP, "prompts": [{"text": PROMPT, "key": key}]}
                (await client.post(f"{ours.url}/darts/v1/rollouts", json=body)).raise_for_status()
                outcome.expect(await _knows(client, theirs, key), f"{key} is not known to the other server")
    for server in (one, two):
        outcome.expect(server.metric("darts_store_fault") == 0, "the state cannot be written")
    return outcome


def _damaged(whole: bytes, lots: Random) -> bytes:
    if lots.random() < 0.3:
        return whole[: lots.randrange(len(whole))]
    data = bytearray(whole)
    for _ in range(lots.randint(1, 4)):
        data[lots.randrange(len(data))] ^= 1 << lots.randrange(8)
    return bytes(data)


async def _becomes(server: Server, metric: str, value: float) -> bool:
    began = time.monotonic()
    while await asyncio.to_thread(server.metric, metric) != value:
        if time.monotonic() - began > PATIENCE:
            return False
        await asyncio.sleep(0.1)
    return True


async def _knows(client: httpx.AsyncClient, server: Server, key: str) -> bool:
    began = time.monotonic()
    while (await client.get(f"{server.url}/darts/v1/prompts/{key}")).status_code != httpx.codes.OK:
        if time.monotonic() - began > PATIENCE:
            return False
        await asyncio.sleep(0.1)
    return True


FAULTS = [
    Fault("disk-full-state", "no room for what is learned", Where.SHARED, disk_full_for_state),
    Fault("disk-full-weights", "no room for pushed weights", Where.SHARED, disk_full_for_weights),
    Fault("damaged-state", "bits flipped in the state file, or its end cut off", Where.OWN, damaged_state),
    Fault("two-servers", "two servers on one state folder", Where.SECOND, two_servers),
]
