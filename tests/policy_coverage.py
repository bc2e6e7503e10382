"""Measures which branches of `darts_server.policy` the tests in `tests/policy` take.

``pytest -p tests.policy_coverage`` loads it.

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

POLICY = "darts_server.policy"
TESTS = Path(__file__).parent / "policy"
MEASURED = coverage.Coverage(data_suffix=True)


@contextmanager
def measuring() -> Iterator[None]:
    MEASURED.start()
    try:
        yield
    finally:
        MEASURED.stop()


def import_policy() -> None:
    """Import all of the package: the tests do not run the lines of modules that others have imported already."""
    for found in pkgutil.walk_packages(import_module(POLICY).__path__, f"{POLICY}."):
        import_module(found.name)


assert POLICY not in sys.modules, "imported before the coverage of its lines could be measured"
with measuring():
    import_policy()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if TESTS not in item.path.parents or any(map(item.get_closest_marker, ("hypothesis", "untraced"))):
        return (yield)
    with measuring():
        return (yield)


def pytest_unconfigure() -> None:
    MEASURED.save()
