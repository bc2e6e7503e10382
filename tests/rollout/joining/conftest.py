import pytest

from tests.rollout.joining.joining import SteppedLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """A clock that only the test advances."""
    return "asyncio", {"loop_factory": SteppedLoop}
