from collections.abc import Iterator

import pytest

from darts_server.demo.server import DARTS, ENVIRONMENT, PLAIN, Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """darts-server with its defaults, and the token route."""
    with serving(DARTS, tmp_path_factory.mktemp("darts") / "log", "--enable-scale-out") as running:
        yield running


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """vLLM's own server."""
    with serving(PLAIN, tmp_path_factory.mktemp("plain") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What vLLM is told where its engine is started from this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"
