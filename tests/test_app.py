"""The wiring of all rooms, with an engine that runs nothing."""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY

from darts_server import app, settings
from darts_server.engine.scripted import Script, ScriptedEngine
from darts_server.http.security.access import Access, Keys
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, SavedPrompts
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.serving.gate import Gate
from darts_server.store import Store
from darts_server.types import PromptSpec
from darts_server.verify.verifiers import Verifiers
from darts_server.weights.staging import Staging

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def own_metrics() -> Iterator[None]:
    """Unregister the metrics of the test, since a process can have the metrics of only one server."""
    # Another test of this process may have made a server.
    others = [
        collector for collector, names in REGISTRY._collector_to_names.items() if any("darts" in name for name in names)
    ]
    for collector in others:
        REGISTRY.unregister(collector)
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
    for collector in others:
        REGISTRY.register(collector)


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_rooms(closing: ExitStack, folder: Path, access: Access | None = None) -> tuple[app.Rooms, Store]:
    """Connect all rooms to an engine that runs nothing. Also return the store in the folder."""
    engine: Any = SimpleNamespace(
        llm=SimpleNamespace(gate=Gate(), set_drafting=Mock()),
        port=ScriptedEngine(lambda *_: Script(1)),
        renderer=Mock(),
        model=Mock(),
        model_name="m",
        fingerprint="of m",
    )
    store = closing.enter_context(Store(folder))
    staging = closing.enter_context(Staging())
    loaded = settings.load({"state_dir": str(folder)}, None)
    rooms = app.make_rooms(loaded, engine, access or Access(), store, staging, closing, Verifiers([]))
    return rooms, store


PROMPT = CarriedPrompt(PromptSpec(text="a"), ("a", "a"))


async def test_a_server_that_fails_to_start_leaves_carried_prompts_for_the_next_server(
    closing: ExitStack, tmp_path: Path
) -> None:
    rooms, store = make_rooms(closing, tmp_path)
    SavedPrompts(store, "of m").save([(None, PROMPT)])
    await rooms.batches.close()
    assert rooms.batches.carried.count(None) == 0
    rooms.batches.restore_carried()
    assert rooms.batches.carried.count(None) == 1
    assert SavedPrompts(store, "of m").take(0) == []


async def test_carried_tokens_are_not_saved_after_a_weight_update(closing: ExitStack, tmp_path: Path) -> None:
    rooms, store = make_rooms(closing, tmp_path)
    group: CarriedGroup[Any] = CarriedGroup("terms", False, (1,), [CarriedCandidate()])
    rooms.batches.carried.put(None, [CarriedPrompt(PromptSpec(text="a"), ("a", "a"), group)])
    has_group = []
    for is_updated in (False, True):
        if is_updated:
            rooms.updates.loaded.record(None)
        await rooms.batches.close()
        [(_, saved)] = SavedPrompts(store, "of m").take(0)
        has_group.append(saved.group is not None)
    assert has_group == [True, False]


async def test_keys_are_taken_from_the_environment_so_that_the_engine_does_not_inherit_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in {"VLLM_API_KEY": "one", "DARTS_ADMIN_API_KEY": "root"}.items():
        monkeypatch.setenv(name, key)
    args = Namespace(api_key=None, host="127.0.0.1", uds=None, allowed_origins=[])
    access = app._make_access(settings.load({}, None), args)
    assert access.keys.find_name(b"one")
    assert access.admin_keys.find_name(b"root")
    assert not {"one", "root"} & set(os.environ.values())


async def test_carried_prompts_of_a_removed_key_are_dropped(closing: ExitStack, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    access = Access(Keys([], file))
    rooms, _ = make_rooms(closing, tmp_path / "state", access)
    owners = [access.keys.find_name(key) for key in (b"one", b"two")]
    for owner in owners:
        rooms.batches.carried.put(owner, [PROMPT])
    file.write_text("two\nthree\n")
    app._reload_keys(access, rooms.batches)
    assert [rooms.batches.carried.count(owner) for owner in owners] == [0, 1]


@pytest.mark.parametrize(("ended_with", "code"), [(0, 3), (3, 3), (1, 1)])
def test_a_disk_that_is_full_at_the_end_shows_in_the_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ended_with: int, code: int
) -> None:
    with Store(tmp_path) as store:
        assert store._connection is not None
        # SQLite then reports a full disk.
        store._connection.execute("PRAGMA max_page_count = 10")
        for number in range(1000):
            store.put("prompt", f"{number}", {"text": "x" * 100})
        assert app.close_store(store, ended_with) == code
    assert "full disk" in caplog.messages[-1]
    with Store(tmp_path / "other") as store:
        assert app.close_store(store, ended_with) == ended_with


async def test_a_server_starts_the_verifiers_of_its_settings() -> None:
    chosen = settings.load({"policy": "informative", "verifier": ["regex:#(.)"]}, None)
    async with app._start_verifiers(chosen) as verifiers:
        assert verifiers.names == ("regex",)
