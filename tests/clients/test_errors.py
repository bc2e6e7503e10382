import pickle

import pytest

import darts_client
from darts_client import DartsError, Overloaded, StatusError


def public_errors() -> list[type[DartsError]]:
    public = [getattr(darts_client, name) for name in darts_client.__all__]
    return [kind for kind in public if isinstance(kind, type) and issubclass(kind, DartsError)]


def test_the_tree_has_one_root_and_its_docstring_draws_every_error() -> None:
    from darts_client import _errors

    assert len(public_errors()) == 10
    for kind in public_errors():
        assert kind.__name__ in (_errors.__doc__ or "")


@pytest.mark.parametrize("kind", public_errors())
def test_every_error_survives_a_move_to_another_process(kind: type[DartsError]) -> None:
    moved = pickle.loads(pickle.dumps(kind("what happened")))
    assert type(moved) is kind
    assert str(moved) == "what happened"


def test_a_moved_status_error_keeps_what_the_server_said() -> None:
    error = Overloaded("busy", status_code=429, type="t", param="p", code=7, retry_after=2.0)
    moved: StatusError = pickle.loads(pickle.dumps(error))
    assert (moved.status_code, moved.type, moved.param, moved.code, moved.retry_after) == (429, "t", "p", 7, 2.0)
