"""Routes of trainers, as their clients call them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from fastapi import FastAPI, Request
from starlette.routing import Route
from starlette.testclient import TestClient

from darts_server.exceptions import InvalidRequest, UpdateFailed
from darts_server.http import dialects, errors
from darts_server.http.body import BodyLimits
from darts_server.http.dialects import CompletionTokenIds, Controls
from darts_server.http.security.access import Access, Keys
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.rollout.turns import Turn, Turns
from darts_server.serving.gate import Gate
from darts_server.settings.fields import Dialect
from darts_server.types import TurnKind
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates
from tests.http.serving import HERE, LARGEST, URL
from tests.weights.lora_sets import save_to
from tests.weights.model import SHAPES, FakeModel, write

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")
NAMES = get_args(Dialect)
OLD = dict.fromkeys(SHAPES, 0)


class Trainer:
    """A trainer, and the objects behind its requests. ``paused``: its pauses. ``updated``: calls of vLLM's route."""

    def __init__(self, folder: Path, *, vllm_has_route: bool = False) -> None:
        self.model = FakeModel(folder)
        self.turns = Turns()
        self.paused: list[str] = []
        self.updated: list[Any] = []
        self.vllm_has_route = vllm_has_route

    async def pause_generation(self, *, mode: str) -> None:
        self.paused.append(mode)
        self.updates.coordinator.paused_by_trainer = True

    async def resume_generation(self) -> None:
        self.paused.append("resume")
        self.updates.coordinator.paused_by_trainer = False

    async def start_weight_update(self) -> None:
        self.updated.append("start")

    async def write_weights(self, update_info: dict[str, Any]) -> None:
        self.updated.append(update_info)

    async def finish_weight_update(self) -> None:
        self.updated.append("finish")

    @contextmanager
    def calling(
        self, folder: Path, *names: str, host: str = HERE, keys: tuple[str, ...] = (), dangerous: bool = False
    ) -> Iterator[TestClient]:
        with Staging(folder) as staging:
            self.updates = Updates(self.model, Gate(), staging, folder)
            app = FastAPI()
            errors.install_handlers(app)
            if self.vllm_has_route:

                @app.post("/update_weights")
                @app.post("/collective_rpc")
                async def update_weights(raw_request: Request) -> dict[str, str]:
                    self.updated.append(await raw_request.json())
                    return {"message": "Weights updated"}

            dialects.add_routes(app, names, Controls(self.updates, self, self.turns, dangerous))
            access = Access(Keys(keys), allow_dangerous=dangerous)
            limits = BodyLimits(LARGEST)
            overrides = dialects.access_overrides(names)
            app.add_middleware(
                SecurityMiddleware, access=access, limits=limits, on_refusal=Mock(), access_overrides=overrides
            )
            yield TestClient(app, URL, client=(host, 1))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_every_route_of_a_dialect_has_its_access(trainer: Trainer, tmp_path: Path) -> None:
    with trainer.calling(tmp_path, *NAMES) as caller:
        assert isinstance(caller.app, FastAPI)
        routes = [route for route in caller.app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    assert len(routes) == 14
    with trainer.calling(tmp_path, *NAMES, host="10.0.0.1") as stranger:
        for route in routes:
            expected = 422 if route.path == "/finish_session" else 403
            assert stranger.post(route.path, json={}).status_code == expected
    assert (trainer.paused, trainer.model.calls) == ([], [])


def test_areal_pauses_updates_and_continues(trainer: Trainer, tmp_path: Path) -> None:
    write(tmp_path / "v1" / "model.safetensors", 5)
    save_to(tmp_path / "lora", 6)
    with trainer.calling(tmp_path, "areal") as caller:
        assert caller.post("/areal_pause_generation", json={}).json()["success"] is True
        assert caller.post("/areal_update_weights", json={"model_path": str(tmp_path / "v1")}).json()["success"] is True
        body = {"lora_model_path": "lora", "lora_name": "a", "lora_int_id": 1, "base_model_name": "tiny"}
        assert caller.post("/areal_update_weights_lora", json=body).json()["success"] is True
        assert trainer.paused == ["abort"]
        assert caller.post("/areal_continue_generation", json={}).json()["success"] is True
    assert trainer.paused == ["abort", "resume"]
    assert trainer.model.values == dict.fromkeys(SHAPES, 5)
    assert trainer.updates.coordinator.version == 2


AREAL = [
    ("/areal_update_weights", {"model_path": "v1", "abort_all_requests": True}),
    ("/areal_update_weights_lora", {"lora_model_path": "lora", "lora_name": "a", "lora_int_id": 1}),
]


@pytest.mark.parametrize(("path", "body"), AREAL)
@pytest.mark.parametrize("fails", [False, True])
def test_without_a_pause_areals_update_aborts_what_runs_and_resumes(
    trainer: Trainer, tmp_path: Path, path: str, body: dict[str, Any], fails: bool
) -> None:
    write(tmp_path / "v1" / "model.safetensors", 5)
    save_to(tmp_path / "lora", 6)
    paused_at: list[list[str]] = []
    trainer.model.during["pause"] = lambda: paused_at.append(list(trainer.paused))
    trainer.model.fail["set_version"] = [UpdateFailed("broken") if fails else None]
    with trainer.calling(tmp_path, "areal") as caller:
        answer = caller.post(path, json=body)
    assert answer.status_code == (503 if fails else 200), answer.text
    # The pause is before the change of the weights.
    assert paused_at == [["abort"]]
    assert trainer.paused == ["abort", "resume"]
    assert trainer.updates.coordinator.version == (0 if fails else 1)


@pytest.mark.parametrize(("path", "body"), AREAL)
def test_bad_weights_of_areal_abort_nothing(trainer: Trainer, tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    write(tmp_path / "v1" / "model.safetensors", 5, "layers.0.weight")
    (tmp_path / "lora").mkdir()
    with trainer.calling(tmp_path, "areal") as caller:
        assert caller.post(path, json=body).status_code == 400
    assert (trainer.paused, trainer.updates.coordinator.version) == ([], 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/update_weights", {}, 400, "weight_dir"),
        ("/update_weights", {"weight_dir": "/etc"}, 400, "weight_dir"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/etc"}, 400, "lora_path"),
        ("/load_lora_adapter", {"lora_name": "a:raw", "lora_path": "x"}, 400, "lora_name"),
        ("/skyrl/v1/load_lora_adapter", {"lora_name": "model", "lora_path": "x"}, 400, "lora_name"),
        ("/areal_update_weights", {"model_path": "../x"}, 400, "model_path"),
        ("/areal_update_weights_lora", {"lora_name": "a", "lora_model_path": "/etc"}, 400, "lora_model_path"),
        (
            "/collective_rpc",
            {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": False}},
            400,
            "kwargs.is_checkpoint_format",
        ),
        ("/collective_rpc", {"method": "update_weights_nccl"}, 400, "kwargs.update_info"),
        ("/collective_rpc", {"method": "update_weights_ipc", "kwargs": {"update_info": {}}}, 403, None),
        ("/areal_update_weights_xccl", {}, 501, None),
    ],
)
def test_errors_name_the_trainers_fields_and_nothing_changes(
    trainer: Trainer, tmp_path: Path, path: str, body: dict[str, object], status: int, field: str | None
) -> None:
    with trainer.calling(tmp_path, *NAMES) as caller:
        answer = caller.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
        assert (trainer.model.values, trainer.updates.coordinator.version, trainer.paused) == (OLD, 0, [])
        assert "pause" not in trainer.model.calls


def test_prime_rl_loads_weights_from_a_folder_and_other_updates_reach_vllms_route(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, vllm_has_route=True)
    body = {"update_info": {"names": ["a"]}}
    folder = write(tmp_path / "broadcasts" / "step_1" / "model.safetensors", 5).parent
    (folder / "NCCL_READY").touch()
    with trainer.calling(tmp_path, "prime-rl") as caller:
        # As after /pause?mode=keep.
        trainer.updates.coordinator.paused_by_trainer = True
        assert caller.post("/update_weights", json=body).json() == {"message": "Weights updated"}
        answer = caller.post("/update_weights", json={"weight_dir": folder.as_posix()})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert trainer.updated == [body]
    assert trainer.model.values == dict.fromkeys(SHAPES, 5)
    assert trainer.updates.coordinator.version == 1
    assert trainer.model.calls.count("resume") == 0


SKYRL = (
    {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": True}},
    {"method": "update_weights_nccl", "kwargs": {"update_info": {"names": ["a"]}}},
    {"method": "skyrl_finish_weight_update"},
)


def test_skyrl_sends_full_weights_as_through_vllms_own_routes(trainer: Trainer, tmp_path: Path) -> None:
    with trainer.calling(tmp_path, "skyrl") as caller:
        for body in SKYRL:
            answer = caller.post("/collective_rpc", json=body)
            assert (answer.status_code, answer.json()) == (200, {"results": [None]})
    assert trainer.updated == ["start", {"names": ["a"]}, "finish"]


@pytest.mark.parametrize("path", ["/collective_rpc", "/collective_rpc/", "/%63ollective_rpc"])
@pytest.mark.parametrize("dangerous", [True, False])
def test_a_dialect_opens_no_other_method_of_the_workers(tmp_path: Path, path: str, dangerous: bool) -> None:
    trainer = Trainer(tmp_path, vllm_has_route=True)
    other = {"method": "load_model", "args": []}
    with trainer.calling(tmp_path, "skyrl", dangerous=dangerous) as caller:
        assert caller.post(path, json=other).status_code == (200 if dangerous else 403)
    assert trainer.updated == ([other] if dangerous else [])
    for names, host in (((), HERE), (("areal", "prime-rl"), HERE), (NAMES, "10.0.0.1")):
        with trainer.calling(tmp_path, *names, host=host) as caller:
            for body in (other, *SKYRL):
                assert caller.post(path, json=body).status_code == 403
    assert trainer.updated == ([other] if dangerous else [])


def test_only_its_own_caller_finishes_a_session_and_may_open_it_again(trainer: Trainer, tmp_path: Path) -> None:
    for caller_name in ("", "another"):
        trainer.turns.add_answer(Turn([1, 2], session="u_1", caller=caller_name), [3])
    again = Turn([7, 8], session="u_1")
    assert trainer.turns.classify(again) is TurnKind.SESSION
    with trainer.calling(tmp_path, "skyrl") as caller:
        assert caller.post("/finish_session?session_id=u_1").json() == {"known": True}
        assert caller.post("/finish_session?session_id=u_1").json() == {"known": False}
        assert caller.post("/finish_session").status_code == 422
    assert trainer.turns.classify(again) is TurnKind.OPENING
    assert trainer.turns.classify(Turn([7, 8], session="u_1", caller="another")) is TurnKind.SESSION
    with trainer.calling(tmp_path, "skyrl", keys=("key",), host="10.0.0.1") as caller:
        assert caller.post("/finish_session?session_id=u_1").status_code == 401
        headers = {"Authorization": "Bearer key"}
        assert caller.post("/finish_session?session_id=u_1", headers=headers).json() == {"known": False}


NVEXT = {"extra_fields": ["completion_token_ids"]}


def completion(**fields: Any) -> SimpleNamespace:
    defaults = {"prompt": [1, 2], "n": 1, "stream": False, "return_token_ids": None, "nvext": NVEXT}
    return SimpleNamespace(**defaults | fields)


def test_nemo_rl_gets_the_token_ids_that_it_requests_and_nothing_else_changes() -> None:
    extension = CompletionTokenIds()
    request = completion()
    extension.prepare_request(request)
    assert request.return_token_ids is True
    answer = SimpleNamespace(choices=[SimpleNamespace(token_ids=[3, 4])])
    extension.complete_answer(request, answer)
    assert answer.nvext == {"completion_token_ids": [3, 4]}
    plain = completion(nvext=None)
    whole = SimpleNamespace(choices=answer.choices)
    error = SimpleNamespace(error="x")
    for other in (plain, SimpleNamespace()):
        extension.prepare_request(other)
    extension.complete_answer(plain, whole)
    extension.complete_answer(request, error)
    assert plain.return_token_ids is None
    assert not hasattr(whole, "nvext")
    assert not hasattr(error, "nvext")


@pytest.mark.parametrize(
    "fields",
    [
        {"nvext": {"extra_fields": ["engine_data"]}},
        {"nvext": {"extra_fields": ["completion_token_ids"], "token_data": [1]}},
        {"nvext": "completion_token_ids"},
        {"prompt": "text"},
        {"prompt": [[1, 2], [3]]},
        {"n": 8},
        {"stream": True},
    ],
)
def test_unsupported_parts_of_nvext_are_refused(fields: dict[str, Any]) -> None:
    request = completion(**fields)
    with pytest.raises(InvalidRequest, match="nvext"):
        CompletionTokenIds().prepare_request(request)
    assert request.return_token_ids is None
