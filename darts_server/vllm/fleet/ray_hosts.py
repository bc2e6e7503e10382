"""Runs the hosts of engines on Ray, which places them and gives them GPUs. A host that ends is started again.

Requests and tokens do not go through Ray: each host connects to the coordinator itself.
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from darts_server.exceptions import InvalidSetting

logger = logging.getLogger(__name__)

# Seconds before a host is started again. The pause doubles after each host that did not last.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LASTED_SECONDS = 120.0
PRIVATE = 0o700
# A server whose engine of some rank fails so often at its start gives up.
MAX_FAILURES = 3
STOP_SECONDS = 15.0
HEAD_SECONDS = 10.0
"""Seconds in which the head of a cluster answers, even on a busy machine."""
END_SECONDS = 2.0
"""Seconds in which an actor ends its host."""
PLACE_SECONDS = 30
# The loop of an engine with a GPU keeps one core busy.
CPUS_WITH_GPU = 1.0
# An engine without a GPU uses all cores of its node, however many Ray reserves. A whole CPU for each would only limit
# the number of engines.
CPUS_WITHOUT_GPU = 0.1
INHERITED_PREFIXES = ("VLLM_", "DARTS_", "HF_", "NCCL_", "TORCH")
"""Prefixes of the environment variables that engines get from this process."""


T = TypeVar("T")


def call_in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    """Call Ray in a thread: a call takes a while, and hangs while the head of the cluster is gone."""
    future = Future[T]()

    def set_result() -> None:
        # False if the caller was cancelled before the thread has started.
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    # The end of the process does not wait for daemon threads, as it would for an executor's.
    threading.Thread(
        target=set_result,
        name="darts-ray",
        daemon=True,
    ).start()
    return asyncio.wrap_future(future)


def private_folder() -> Path:
    """Return the folder of this user's clusters, which no other user can enter.

    Raises:
        OSError: the folder cannot be created, or belongs to another user.
    """
    # Ray makes everything that it creates writable for everybody, so the parent folder is private. Its name is short,
    # because the path of a socket has at most 107 bytes.
    parent = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    folder = parent / f"darts-{os.getuid()}"
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    # Not `stat`, because another user may have put a link there.
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "is not a folder of this user; remove it, or set RAY_TMPDIR", str(folder))
    folder.chmod(PRIVATE)
    return folder / "ray"


def end_actor(actor: Any) -> None:
    # The actor may have ended.
    with suppress(Exception):
        ray.kill(actor)


class HostActor:
    """Runs one host as a child process, with the devices that Ray gives this actor."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, start: bytes, environment: dict[str, str]) -> int:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "darts_server.vllm.fleet.host", str(os.getpid())],
            stdin=subprocess.PIPE,
            env=os.environ | environment,
            # A process group for the host and its engine.
            start_new_session=True,
        )
        # Send `start` to the host's input, and wait for the host's end.
        self._child.communicate(start)
        # The host's engine may have processes that still run.
        self.end(signal.SIGKILL)
        return self._child.returncode

    def end(self, signal_number: int = signal.SIGTERM) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal_number)


@dataclass(slots=True, eq=False)
class PlacedHosts:
    """The hosts of all engines. Implements `darts_server.vllm.api.launch.EngineHosts`.

    ``resources``: CPUs and GPUs of each host. ``is_own_cluster``: whether this process started it.
    """

    placement_group: Any
    resources: dict[str, float]
    environment: dict[str, str]
    is_own_cluster: bool
    failure: InvalidSetting | None = None
    _actor_of_rank: dict[int, Any] = field(default_factory=dict)
    _ending_tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def keep_running(self, rank: int, start: bytes) -> None:
        """Run a host of an engine, and start another host whenever it ends, until cancelled."""
        failures = 0
        pause = FIRST_PAUSE
        while True:
            started_at = time.monotonic()
            try:
                actor, exit_code = await call_in_thread(partial(self._start_host, rank, start))
                self._actor_of_rank[rank] = actor
                reason = f"exit code {await exit_code}; its log says why"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            ended_actor = self._actor_of_rank.pop(rank, None)
            if ended_actor is not None:
                call_in_thread(partial(end_actor, ended_actor))

            # Wait before the next host is started.
            failures += 1
            pause = min(2 * pause, LONGEST_PAUSE)
            if time.monotonic() - started_at > LASTED_SECONDS:
                pause = FIRST_PAUSE
            logger.error("the host of engine %d has ended: %s", rank, reason)
            # `failure` is read only until all engines have joined, so later failures do no harm.
            if failures == MAX_FAILURES:
                self.failure = InvalidSetting(f"engine {rank} does not start: {reason}")
            await self._wait_for_head(rank)
            logger.warning("another host of engine %d starts in %.0f s", rank, pause)
            await asyncio.sleep(pause)

    async def _wait_for_head(self, rank: int) -> None:
        """Wait until the head of the cluster answers. Without the head Ray starts no actor, and reports no error."""
        answer = call_in_thread(ray.nodes)
        await asyncio.wait([answer], timeout=HEAD_SECONDS)
        if not answer.done():
            remedy = "see its cluster's log"
            if self.is_own_cluster:
                remedy = "it ended, and does not come back: restart the server"
            logger.error("engine %d is not started again until the head of Ray's cluster answers; %s", rank, remedy)
        # The next start reports an error.
        with suppress(Exception):
            await answer

    def _start_host(self, rank: int, start: bytes) -> tuple[Any, Any]:
        """Return an actor that runs a host, and Ray's reference to the host's exit code."""
        bundle = PlacementGroupSchedulingStrategy(self.placement_group, placement_group_bundle_index=rank)
        remote_class = ray.remote(HostActor).options(
            num_cpus=self.resources["CPU"],
            num_gpus=self.resources.get("GPU", 0.0),
            # `end` is called while `run` runs.
            max_concurrency=2,
            scheduling_strategy=bundle,
        )
        actor = remote_class.remote()
        return actor, actor.run.remote(start, self.environment)

    def restart(self, rank: int) -> None:
        """End the host of an engine: `keep_running` starts another."""
        actor = self._actor_of_rank.get(rank)
        if actor is not None:
            # Tasks are kept here, because asyncio keeps only weak references.
            task = asyncio.get_running_loop().create_task(self._kill_host(actor))
            self._ending_tasks.add(task)
            task.add_done_callback(self._ending_tasks.discard)

    async def _kill_host(self, actor: Any) -> None:
        with suppress(Exception):
            async with asyncio.timeout(END_SECONDS):
                end_call = await call_in_thread(partial(actor.end.remote, signal.SIGKILL))
                await end_call
        # If the actor hangs, `keep_running` waits until the actor ends.
        await asyncio.sleep(END_SECONDS)
        await call_in_thread(partial(end_actor, actor))

    async def stop(self) -> None:
        """Send SIGTERM to all hosts. Ray ends other actors when this process disconnects."""

        async def end(actor: Any) -> None:
            # Ray returns a reference to the call at once.
            end_call = await call_in_thread(actor.end.remote)
            await end_call

        with suppress(Exception):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*map(end, self._actor_of_rank.values()), return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The place where engines run.

    ``address``: address of a Ray cluster, or None to start a cluster that ends with the block of `place`. ``gpus``:
    number of GPUs of each engine, or None for the number that its model is divided over.
    """

    address: str | None
    gpus: float | None

    @property
    def host(self) -> str:
        """Address at which the hosts of engines reach this process."""
        if self.address is None:
            return "127.0.0.1"
        return str(ray.util.get_node_ip_address())

    @asynccontextmanager
    async def place(self, starts: Sequence[bytes], gpus_per_engine: int) -> AsyncIterator[PlacedHosts]:
        """Keep a host for each engine running until the block ends.

        Raises:
            InvalidSetting: there is no cluster, or it lacks GPUs or CPUs.
        """
        try:
            if self.address is None:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    _temp_dir=str(private_folder()),
                )
            else:
                ray.init(address=self.address)
        except Exception as error:
            # Ray's exceptions have no common class.
            problem = "cannot be started here"
            if self.address is not None:
                problem = f"at {self.address} was not reached"
            raise InvalidSetting(f"a Ray cluster {problem}: {error}") from error

        try:
            gpus = self.gpus
            if gpus is None:
                gpus = 0
                has_gpus = ray.cluster_resources().get("GPU", 0) > 0
                if has_gpus:
                    gpus = gpus_per_engine
            resources = {"CPU": CPUS_WITHOUT_GPU}
            if gpus:
                resources = {"CPU": CPUS_WITH_GPU, "GPU": gpus}
            # A bundle for each host: Ray reserves it on one node.
            group = placement_group([resources] * len(starts))
            if not await asyncio.to_thread(group.wait, PLACE_SECONDS):
                raise InvalidSetting(
                    f"Ray's cluster does not have {len(starts)} x ({gpus:g} GPUs, {resources['CPU']:g} CPUs) on single "
                    f"nodes that are free; it has {ray.cluster_resources()}"
                )

            environment = {name: value for name, value in os.environ.items() if name.startswith(INHERITED_PREFIXES)}
            hosts = PlacedHosts(
                group,
                resources,
                environment,
                is_own_cluster=self.address is None,
            )
            tasks = [asyncio.create_task(hosts.keep_running(rank, start)) for rank, start in enumerate(starts)]
            try:
                yield hosts
            finally:
                await hosts.stop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await call_in_thread(ray.shutdown)
