"""Profiles of hypothesis, the option ``--all``, and the environment that engines run in.

Property tests of a push try the same examples on every run. ``HYPOTHESIS_PROFILE`` names another profile: ``nightly``,
the default with ``--all``, draws six times as many new ones on every run, ``search`` 120 times as many.
"""

import functools
import inspect
import logging
import os
import re
import ssl
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.integration.fork_server import FORKS, ForkServer

FORK_SERVER = pytest.StashKey[ForkServer]()
FLEET = re.compile("engines-[2-9]")

SLOW_MACHINES = [HealthCheck.too_slow]
settings.register_profile("push", max_examples=25, derandomize=True, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.register_profile("nightly", settings.get_profile("push"), max_examples=150, derandomize=False, print_blob=True)
settings.register_profile("search", settings.get_profile("push"), max_examples=3_000, derandomize=False)

# vLLM binds each engine to the same core unless it is switched off, and tests run several engines at a time.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# TRL, once imported, makes vLLM log errors alone in every process that is started from here, unless a level is set.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run nightly tests too, and the nightly profile of hypothesis")


def pytest_configure(config: pytest.Config) -> None:
    default = "nightly" if config.getoption("--all") else "push"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", default))
    if FORKS not in os.environ:  # workers of xdist inherit it
        config.stash[FORK_SERVER] = fork_server = ForkServer()
        os.environ[FORKS] = fork_server.address


def pytest_unconfigure(config: pytest.Config) -> None:
    if fork_server := config.stash.get(FORK_SERVER, None):
        fork_server.close()
        del os.environ[FORKS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out nightly tests unless ``--all`` is given, and put what takes long first: fleets, then other engines.

    What is nightly with one engine does not run with several at all. Losses of engines come last, when little else
    runs: each that comes back imports vLLM anew.
    """

    def is_left_out(item: pytest.Item) -> bool:
        marks = len([*item.iter_markers("nightly")])
        return marks > 1 and bool(FLEET.search(item.nodeid)) if config.getoption("--all") else marks > 0

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]

    def place(item: pytest.Item) -> tuple[bool, ...]:
        return (
            "test_losses" in item.nodeid,
            not FLEET.search(item.nodeid),
            item.get_closest_marker("engine") is None,
        )

    items.sort(key=place)


class ByServer(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Give a worker whole modules, and one worker all tests with so many engines, as they share a server."""

    def _split_scope(self, nodeid: str) -> str:
        fleet = FLEET.search(nodeid)
        return fleet[0] if fleet else nodeid.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServer:
    return ByServer(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Read root certificates once, not in each call of httpx, where it takes longer than the request: 30 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_requests() -> Iterator[None]:
    """Let requests without a timeout of their own wait for a minute: on a busy machine httpx's five seconds are few."""
    default: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(default, phase, 60.0)
        yield


@pytest.fixture(autouse=True)
def default_log_level() -> None:
    """Log warnings: a library that vLLM uses raises the root logger's level to ERROR when vLLM's app is made."""
    logging.root.setLevel(logging.WARNING)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: so small a model gains nothing from more, and they wait for each other on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def nightly(pytestconfig: pytest.Config) -> bool:
    """Whether ``--all`` is given, for tests that then try more cases."""
    return bool(pytestconfig.getoption("--all"))
