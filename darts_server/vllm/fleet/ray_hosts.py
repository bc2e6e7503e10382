"""Ray places the hosts of engines, gives them their GPUs, and says when one has ended; then another is started.

The traffic of candidates does not go through Ray: each host connects to the coordinator by itself.
"""

import asyncio
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from darts_server.exceptions import InvalidSetting

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before an engine is started again; twice as many after each that did not last."""
LASTED_SECONDS = 120.0
PRIVATE = 0o700
MAX_FAILURES = 3  # of engines of one rank: then a server that has not started yet gives up
STOP_SECONDS = 15.0
HEAD_SECONDS = 10.0
"""Seconds in which the head of a cluster answers, also on a busy machine; otherwise it is taken for gone."""
END_SECONDS = 2.0  # within which an actor ends its host, and notices it
CPUS_WITH_GPU = 1.0
"""CPUs that Ray reserves for an engine with a GPU, whose loop keeps one core busy."""
CPUS_WITHOUT_GPU = 0.1
"""The same for an engine without a GPU. Such an engine uses all cores of its node, however many Ray reserves: a whole
CPU for each would only limit the number of engines."""
HANDED_ON = ("VLLM_", "DARTS_", "HF_", "NCCL_", "TORCH")
"""Beginnings of the names of environment variables that engines get from this process."""


T = TypeVar("T")


def in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Make a call of Ray's outside the event loop: it takes a while, and waits for the head of a cluster that is gone.

    In a thread that the end of the process does not wait for.
    """
    future = Future[T]()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, name="darts-ray", daemon=True).start()
    return asyncio.wrap_future(future)


def private_folder() -> Path:
    """Return the folder for the files and sockets of this user's clusters, which no other user can enter.

    Ray makes all that it creates writable for everybody, so the folder that is private is the one above. The names are
    short: the path of a socket has 107 bytes at most.

    Raises:
        OSError: it cannot be created, or is somebody else's.
    """
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    folder = parent / f"darts-{os.getuid()}"
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "is not a folder of this user; remove it, or set RAY_TMPDIR", str(folder))
    folder.chmod(PRIVATE)
    return folder / "ray"


def end_actor(actor: Any) -> None:
    """End an actor with its host, if it has not ended."""
    with suppress(Exception):
        ray.kill(actor)


class HostActor:
    """Runs one host as its child, with the devices that Ray gives this actor, until that ends."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, start: bytes, environment: dict[str, str]) -> int:
        """Return the exit code of the host."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "darts_server.vllm.fleet.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,  # a group of its own, with its engine
        )
        self._child.communicate(start)
        self.end(signal.SIGKILL)  # what is left of its engine
        return self._child.returncode

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the host and its engine."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)


class Placed:
    """Hosts, each of which is started again when it has ended. Implements `darts_server.vllm.api.launch.Places`."""

    def __init__(self, group: Any, wanted: dict[str, float], environment: dict[str, str], *, is_own: bool) -> None:
        self.failure: InvalidSetting | None = None
        self._is_own = is_own  # whether the cluster was started by this process
        self._group = group
        self._wanted = wanted
        self._environment = environment
        self._actors: dict[int, Any] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def keep(self, rank: int, start: bytes) -> None:
        """Run the host of an engine, again and again."""
        failures, pause = 0, FIRST_PAUSE
        while True:
            began = time.monotonic()
            try:
                self._actors[rank], code = await in_thread(partial(self._start, rank, start))
                reason = f"exit code {await code}; its log says why"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            if (ended := self._actors.pop(rank, None)) is not None:
                in_thread(partial(end_actor, ended))
            lasted = time.monotonic() - began > LASTED_SECONDS
            failures, pause = failures + 1, FIRST_PAUSE if lasted else min(2 * pause, LONGEST_PAUSE)
            logger.error("the host of engine %d has ended: %s", rank, reason)
            if failures == MAX_FAILURES:
                self.failure = InvalidSetting(f"engine {rank} does not start: {reason}")
            await self._wait_for_head(rank)
            logger.warning("another host of engine %d starts in %.0f s", rank, pause)
            await asyncio.sleep(pause)

    async def _wait_for_head(self, rank: int) -> None:
        """Wait until the head of the cluster answers: without it Ray starts nothing, and no call of Ray's says so."""
        answer = in_thread(ray.nodes)
        await asyncio.wait([answer], timeout=HEAD_SECONDS)
        if not answer.done():
            remedy = "it ended, and does not come back: restart the server" if self._is_own else "see its cluster's log"
            logger.error("engine %d is not started again until the head of Ray's cluster answers; %s", rank, remedy)
        with suppress(Exception):  # a start will say what is wrong
            await answer

    def _start(self, rank: int, start: bytes) -> tuple[Any, Any]:
        """Return an actor that runs a host, and the reference of the host's exit code."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        options = {"num_cpus": self._wanted["CPU"], "num_gpus": self._wanted.get("GPU", 0.0)}
        # Two calls at once, so that `end` is called while it runs.
        made = ray.remote(HostActor).options(**options, max_concurrency=2, scheduling_strategy=strategy)
        actor = made.remote()
        return actor, actor.run.remote(start, self._environment)

    def restart(self, rank: int) -> None:
        if (actor := self._actors.get(rank)) is not None:
            task = asyncio.get_running_loop().create_task(self._end(actor))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, actor: Any) -> None:
        """End a host that hangs, and then an actor that does."""
        with suppress(Exception):
            async with asyncio.timeout(END_SECONDS):
                await (await in_thread(partial(actor.end.remote, signal.SIGKILL)))
        await asyncio.sleep(END_SECONDS)
        await in_thread(partial(end_actor, actor))

    async def stop(self) -> None:
        async def end(actor: Any) -> None:
            await (await in_thread(actor.end.remote))

        with suppress(Exception):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*map(end, self._actors.values()), return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where engines run. ``address``: of a Ray cluster; ``None``: one that is started here, and ends with the block."""

    address: str | None
    gpus: float | None

    @property
    def host(self) -> str:
        """The address at which engines reach this process."""
        return "127.0.0.1" if self.address is None else str(ray.util.get_node_ip_address())

    @asynccontextmanager
    async def place(self, starts: Sequence[bytes], divided_over: int) -> AsyncIterator[Placed]:
        """Keep a host for each engine running until the block ends. ``divided_over``: GPUs of one engine's model.

        Raises:
            InvalidSetting: there is no cluster, or it has not what they need.
        """
        try:
            if self.address is None:
                ray.init(address="local", include_dashboard=False, _temp_dir=str(private_folder()))
            else:
                ray.init(address=self.address)
        except Exception as error:  # it raises exceptions of no common class
            where = "cannot be started here" if self.address is None else f"at {self.address} was not reached"
            raise InvalidSetting(f"a Ray cluster {where}: {error}") from error
        try:
            has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            gpus = self.gpus if self.gpus is not None else divided_over * has_gpus
            wanted = {"CPU": CPUS_WITH_GPU, "GPU": gpus} if gpus else {"CPU": CPUS_WITHOUT_GPU}
            group = placement_group([wanted for _ in starts])
            if not await asyncio.to_thread(group.wait, 30):
                raise InvalidSetting(
                    f"Ray's cluster has not {len(starts)} x ({gpus:g} GPUs, {wanted['CPU']:g} CPUs) on single nodes "
                    f"that are free; it has {ray.cluster_resources()}"
                )
            environment = {name: value for name, value in os.environ.items() if name.startswith(HANDED_ON)}
            placed = Placed(group, wanted, environment, is_own=self.address is None)
            tasks = [asyncio.create_task(placed.keep(rank, start)) for rank, start in enumerate(starts)]
            try:
                yield placed
            finally:
                await placed.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await in_thread(ray.shutdown)
