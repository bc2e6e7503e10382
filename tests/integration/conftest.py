import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from darts_server.demo.server import DARTS, ENVIRONMENT, PLAIN, Launch, Server, launch, serving
from tests.conftest import FORKS
from tests.integration.fork_server import EAGER, Forks, Serve, can_fork

ENVIRONMENT["DARTS_POLICY"] = "uniform"  # most tests are of shaped groups; those of the default name it


@pytest.fixture(scope="session")
def forks() -> Iterator[Launch]:
    """`darts_server.demo.server.launch` for servers that start fast."""
    if not can_fork():
        yield launch
        return
    server = Forks(os.environ[FORKS])
    yield server.launch
    server.close()


@pytest.fixture(scope="session")
def serve(forks: Launch) -> Serve:
    """`serving` with servers that start fast. Tests of a server's own processes and signals use `serving` itself."""
    return partial(serving, launch=forks)


@pytest.fixture(
    scope="session",
    params=[1, *(pytest.param(count, marks=pytest.mark.nightly) for count in (2, 3))],
    ids="engines-{}".format,
)
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """darts-server under `uniform`, with the token route, and names of groups in sessions like SkyRL's."""
    flags = ("--enable-scale-out", "--group-pattern", "(.+)_[0-9]+")
    log = tmp_path_factory.mktemp("darts") / "log"
    with serve(DARTS, log, *flags) if request.param == 1 else fleet(request.param, log, *flags) as running:
        yield running


def fleet(count: int, log: Path, *flags: str) -> AbstractContextManager[Server]:
    """darts-server with several engines under Ray, on this machine's cores."""
    return serving(DARTS, log, "--replicas", str(count), "--cpus-per-replica", ".5", *flags)


@pytest.fixture(scope="session")
def plain(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own server."""
    with serve(PLAIN, tmp_path_factory.mktemp("plain") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """The environment of an engine that is started from this process."""
    with pytest.MonkeyPatch.context() as patch:
        # Not forked from this process, which has computed with several threads.
        for name, value in (ENVIRONMENT | EAGER | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
