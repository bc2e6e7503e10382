import multiprocessing
import os
from collections.abc import Iterator
from functools import partial

import pytest

from darts_server.offline.demo.server import DARTS, ENVIRONMENT, PLAIN, Launch, Server, launch, serving
from tests.integration.fleets import fleet
from tests.integration.fork_server import EAGER, FORKS, Forks, Serve, can_fork

ENVIRONMENT["DARTS_POLICY"] = "uniform"  # most tests are of shaped groups; those of the default name it


@pytest.fixture(scope="session")
def forks() -> Iterator[Launch]:
    """`darts_server.offline.demo.server.launch` for servers that start fast."""
    if not can_fork():
        yield launch
        return
    server = Forks(os.environ[FORKS])
    yield server.launch
    server.close()


@pytest.fixture(scope="session")
def serve_one(forks: Launch) -> Serve:
    """`serving` with a server that starts fast and has one engine: it ends with it."""
    return partial(serving, launch=forks)


@pytest.fixture(
    scope="session",
    params=[1, *(pytest.param(count, marks=pytest.mark.nightly) for count in (2, 3))],
    ids="engines-{}".format,
)
def serve(forks: Launch, serve_one: Serve, request: pytest.FixtureRequest) -> Serve:
    """`serving` with servers that start fast, of one engine, and at night of several under Ray.

    Tests of a server's own processes and signals use `serving` itself.
    """
    count = request.param
    return serve_one if count == 1 else partial(fleet, count, forks=forks)


@pytest.fixture(scope="session")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """darts-server under `uniform`, with the token route, and names of groups in sessions like SkyRL's."""
    flags = ("--enable-scale-out", "--group-pattern", "(.+)_[0-9]+")
    with serve(DARTS, tmp_path_factory.mktemp("darts") / "log", *flags) as running:
        yield running


@pytest.fixture(scope="session")
def plain(forks: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own server."""
    with serving(PLAIN, tmp_path_factory.mktemp("plain") / "log", launch=forks) as running:
        yield running


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """The environment of an engine that is started from this process.

    It is not forked from this process, which has computed with several threads, but from a server of Python's own that
    has imported all.
    """
    import vllm.envs

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | EAGER | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}).items():
            patch.setenv(name, value)
        if can_fork():
            multiprocessing.set_forkserver_preload(["tests.integration.preloaded"])
            method = {"VLLM_WORKER_MULTIPROC_METHOD": lambda: "forkserver"}
            patch.setattr(vllm.envs, "environment_variables", vllm.envs.environment_variables | method)
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
