from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from darts_server.http.security.first_error import end_at_first_error


class Inner(BaseModel):
    ids: list[int]


class Outer(BaseModel):
    prompt: list[int] | list[list[int]] | str = []
    inner: Inner | None = None


def test_all_routes_of_an_app_end_validation_at_the_first_error() -> None:
    application = FastAPI()
    api = APIRouter()

    @api.post("/")
    async def echo(body: Outer) -> Outer:
        return body

    application.include_router(api)
    end_at_first_error(application)
    client = TestClient(application)
    # Each type of the union has an error.
    for body, most in (({"prompt": [1.5] * 1000}, 3), ({"inner": {"ids": ["x"] * 1000}}, 1)):
        answer = client.post("/", json=body)
        assert answer.status_code == 422
        assert 1 <= len(answer.json()["detail"]) <= most
    good = {"prompt": [[1], [2]], "inner": {"ids": [3]}}
    assert client.post("/", json=good).json() == good


@pytest.mark.parametrize("wrong", [1, [], None, {"a": 1}])
def test_a_validator_that_fails_on_another_type_refuses_the_body(wrong: Any) -> None:
    class Checked(BaseModel):
        limits: dict[str, int] = {}

        @model_validator(mode="before")
        @classmethod
        def check(cls, data: dict[str, Any]) -> dict[str, Any]:
            assert data["limits"].get("a") is None or data["limits"]["b"] > 0
            return data

    application = FastAPI()

    @application.post("/")
    async def echo(body: Checked) -> Checked:
        return body

    end_at_first_error(application)
    client = TestClient(application)
    assert client.post("/", json={"limits": wrong}).status_code == 422
    assert client.post("/", json={"limits": {"c": 2}}).json() == {"limits": {"c": 2}}
