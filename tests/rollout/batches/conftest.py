import pytest

from tests.rollout.joining.joining import SteppedLoop


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """A clock that stands still. Polls then take no time, so they are done in every turn."""
    return "asyncio", {"loop_factory": SteppedLoop}
