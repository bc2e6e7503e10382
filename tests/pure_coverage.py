"""Measures which branches of the pure rooms their own tests take.

``pytest -p tests.pure_coverage`` loads it.

Property tests are not measured: what their random examples reach differs from run to run, so each branch needs a test
that always takes it. Coverage's tracer makes code thrice as slow, so those that are marked ``untraced`` because they
repeat the same lines often, and tests of other packages, run without it too. Each process of a test run leaves a file
for ``coverage combine``.
"""

import pkgutil
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import coverage
import pytest

ROOMS = ("group", "estimates", "policy", "offline.simulation.model")
TESTS = [Path(__file__).parent / room.replace(".", "/") for room in ROOMS]
MEASURED = coverage.Coverage(data_suffix=True)


@contextmanager
def measuring() -> Iterator[None]:
    MEASURED.start()
    try:
        yield
    finally:
        MEASURED.stop()


def import_rooms() -> None:
    """Import all modules of the rooms: a test does not run the lines of a module that was imported before it."""
    for room in ROOMS:
        package = f"darts_server.{room}"
        assert package not in sys.modules or room == "estimates", f"{package} was imported before the measurement"
        for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            import_module(found.name)


with measuring():
    import_rooms()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    is_of_room = any(tests in item.path.parents for tests in TESTS)
    if not is_of_room or any(map(item.get_closest_marker, ("hypothesis", "untraced"))):
        return (yield)
    with measuring():
        return (yield)


def pytest_unconfigure() -> None:
    MEASURED.save()
