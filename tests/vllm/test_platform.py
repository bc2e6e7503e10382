import pytest

from darts_server.vllm import worker
from darts_server.vllm.platform import extension


class Users:
    """A user's own extension."""

    def users_own(self) -> str:
        return "here"


def resolved(name: str) -> type:
    """As vLLM does it in its worker."""
    module, _, attribute = name.rpartition(".")
    assert module == worker.__name__
    found = getattr(worker, attribute)
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize("users", [None, ""])
def test_the_workers_extension_is_ours(users: str | None) -> None:
    assert resolved(extension(users)) is worker.WorkerExtension


def test_a_users_extension_is_beside_ours_and_the_same_each_time() -> None:
    both = resolved(extension(f"{__name__}.Users"))
    assert issubclass(both, Users)
    assert issubclass(both, worker.WorkerExtension)
    assert resolved(extension(f"{__name__}.Users")) is both


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError):
        resolved(f"{worker.__name__}.Other")
