"""Prompts that a server which stops cannot save, on the scripted engine."""

import logging
from pathlib import Path

import pytest

from darts_server.rollout.batches.carried import WRITE_BYTES, CarriedPrompt, Carry, SavedPrompts
from darts_server.store.transactions import CarriedFile
from darts_server.types import PromptSpec
from tests.rollout.batches.test_saved import STOPPING, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("fault", [None, "DROP TABLE entries"])
async def test_the_number_of_prompts_that_cannot_be_saved_is_returned(
    fault: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as server:
        await server.begin(15, "30", "40", carry=Carry.RESUME)
        await server.registry.hand_back(STOPPING)
        if fault is not None:
            server._store._connection.execute(fault)
        assert await server.registry.close() == (0 if fault is None else 2)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    if fault is None:
        assert errors == []
    else:
        assert "cannot be saved: " in errors[0]
        assert errors[1].startswith("2 prompts that were carried over are lost")


async def test_without_a_folder_nothing_is_lost_that_was_to_be_kept() -> None:
    async with serving(None) as server:
        server.registry._carried.put(None, [CarriedPrompt(PromptSpec(text="1"), ("1", "1"))])
        assert await server.registry.close() == 0


class FullDisk(CarriedFile):
    """Has room for one write."""

    writes = 0

    def write(self, changes: object) -> None:
        self.writes += 1
        if self.writes > 1:
            self._connection.execute("PRAGMA query_only = ON")
        super().write(changes)  # type: ignore[arg-type]


def test_what_was_written_before_an_error_counts_as_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = "a" * (WRITE_BYTES // 2)
    prompts = [(None, CarriedPrompt(PromptSpec(text=large + str(number)), (str(number), ""))) for number in range(3)]
    with FullDisk(tmp_path) as store:
        saved = SavedPrompts(store, "model").save(prompts)
    assert "cannot be saved: " in caplog.text
    with CarriedFile(tmp_path) as store:
        assert [prompt.identity[0] for _, prompt in SavedPrompts(store, "model").take(0)] == ["0", "1"][:saved]
    assert saved == 2
