import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from darts_server.http.response_headers import WEIGHTS, ResponseHeader, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")


class Served:
    def __init__(self) -> None:
        self.version = 0
        self.are_initial = True
        self.loras: dict[str, int] = {}

    def client(self) -> TestClient:
        async def answer(_: Request) -> Response:
            return Response()

        app = Starlette(routes=[Route("/health", answer), Route("/v1/models", answer)])
        value_of = weights_of(lambda: self.version, lambda: self.are_initial, lambda: self.loras)
        return TestClient(ResponseHeader(app, WEIGHTS, value_of))


def fields(client: TestClient) -> dict[str, str]:
    return dict(part.split("=") for part in client.get("/health").headers[WEIGHTS].split("; "))


def test_health_says_which_weights_are_served() -> None:
    served = Served()
    client = served.client()
    before = fields(client)
    assert (before["version"], before["source"], before["loras"]) == ("0", "start", "none")
    served.version, served.are_initial = 7, False
    served.loras = {"ä": 3, "b": 7}
    after = fields(client)
    assert (after["version"], after["source"], after["start"]) == ("7", "update", before["start"])
    served.loras = {"b": 7, "ä": 3}
    assert fields(client) == after
    served.loras = {"b": 7, "ä": 4}
    assert fields(client)["loras"] != after["loras"]


def test_each_start_is_another_one() -> None:
    assert fields(Served().client())["start"] != fields(Served().client())["start"]


def test_other_routes_do_not_say_it() -> None:
    assert WEIGHTS not in Served().client().get("/v1/models").headers
