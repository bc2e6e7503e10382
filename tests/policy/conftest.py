"""Coverage of `darts_server/policy` is measured in these tests, but for those that repeat the same lines too often."""

import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that is marked ``untraced`` without the tracer of coverage, which makes it thrice as slow."""
    tracer = sys.gettrace()
    if item.get_closest_marker("untraced") is None or tracer is None:
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
