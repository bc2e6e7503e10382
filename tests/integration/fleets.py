"""Servers with several engines, and the processes of these."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

from darts_server.offline.demo.server import Launch, Server, launch, serving
from tests.integration.fork_server import ROOT

MARK = "DARTS_TEST_FLEET"
"""Environment variable by which the processes of a fleet are found: Ray's are no children of the server."""
HOST = "darts_server.vllm.fleet.host"
FORKED_HOSTS = {"PYTHONPATH": f"{Path(__file__).parent / 'forked_hosts'}:{ROOT}"}
"""Environment of a server whose hosts of engines start fast."""
START_SECONDS = 900.0
"""Each engine imports vLLM by itself: half a minute of a core, beside whatever other tests do."""
BACK_SECONDS = 480.0


@contextmanager
def fleet(
    count: int,
    command: Sequence[str],
    log: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    forks: Launch = launch,
) -> Iterator[Server]:
    """Run a server with several engines, on this machine's cores. ``forks``: what starts it, see `Forks`."""
    if forks is not launch:
        env = FORKED_HOSTS | (env or {})
    flags = ("--replicas", str(count), *flags)
    with serving(command, log, *flags, env=env, launch=forks, patience=START_SECONDS) as running:
        yield running


class Marked:
    """The processes of a fleet. ``env``: to be given to its server."""

    def __init__(self) -> None:
        self.env = {MARK: uuid4().hex}

    def hosts(self) -> list[psutil.Process]:
        """The hosts of engines that are up or start, in any order."""
        return [process for process in psutil.process_iter() if self._is_ours(process) and HOST in _command(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.environ().get(MARK) == self.env[MARK])
        return False

    def process(self, kind: str) -> psutil.Process:
        """Return Ray's ``gcs_server`` or ``raylet``, or of an engine that is up ``host``, ``actor`` or ``engine``."""
        if kind in ("gcs_server", "raylet"):
            return next(each for each in psutil.process_iter() if each.name() == kind and self._is_ours(each))
        hosts = sorted(self.hosts(), key=lambda each: -len(each.children()))
        if kind == "host":
            return hosts[0]
        if kind == "actor":
            return hosts[0].parent()
        children = (child for each in hosts for child in each.children())
        return max(children, key=lambda each: len(each.children()))  # it has a worker


def _command(process: psutil.Process) -> Sequence[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return ()


def wait_up(server: Server, count: int) -> float:
    """Wait until so many engines take requests; return the seconds that it took."""
    began = time.monotonic()
    while time.monotonic() < began + BACK_SECONDS:
        if server.metric("darts_engines_up") == count:
            return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"{server.metric('darts_engines_up')} of {count} engines are up:\n{server.log_tail()}")
