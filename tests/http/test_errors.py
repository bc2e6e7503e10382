import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from darts_server.exceptions import (
    DartsError,
    EngineBusy,
    EngineDead,
    GroupAborted,
    GroupFailed,
    InvalidRequest,
    SessionOver,
    StateDamaged,
    StateError,
    StateFull,
)
from darts_server.http.errors import error_fields, headers_of, install_handlers, status_of


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GroupFailed("no"), 500),
        (GroupAborted("stopped"), 503),
        (EngineDead("gone"), 503),
        (EngineBusy("full", 5), 503),
        (StateError("held"), 503),
        (StateDamaged("bits"), 503),
        (StateFull("full"), 507),
        (DartsError("?"), 500),
    ],
)
def test_every_error_has_the_status_of_its_closest_class(error: DartsError, status: int) -> None:
    assert status_of(error) == status


def test_clients_of_openai_do_not_send_the_request_of_a_session_that_is_over_again() -> None:
    error = SessionOver("session ses-1 is stopped", 409)
    assert status_of(error) == 409
    assert error_fields(error)["type"] == "darts_session_over"
    assert headers_of(error) == {"X-Should-Retry": "false"}


def test_the_body_is_openais_error_object() -> None:
    assert headers_of(EngineBusy("full", 5)) == {"Retry-After": "5"}
    error = {"message": "n: at most 4", "type": "BadRequestError", "param": "n", "code": 400}
    assert error_fields(InvalidRequest("n", "at most 4")) == error


JSON = {"Content-Type": "application/json"}


@pytest.mark.filterwarnings("ignore:Using `httpx`")
def test_http_exceptions_have_openais_error_object_too() -> None:
    app = FastAPI()
    install_handlers(app)

    @app.post("/")
    async def take(body: dict[str, str]) -> None: ...

    client = TestClient(app)
    answers = [client.post("/", content=b'{"a": "\xff"}', headers=JSON), client.get("/nowhere"), client.get("/")]
    assert [answer.status_code for answer in answers] == [400, 404, 405]
    for answer in answers:
        assert answer.json()["error"]["code"] == answer.status_code
        assert answer.json()["error"]["message"]
    assert answers[2].headers["Allow"] == "POST"
