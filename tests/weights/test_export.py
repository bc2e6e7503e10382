"""Reading the served weights."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save, save_file

from darts_server.exceptions import Conflict, UpdateRunning
from darts_server.weights import export as export_module
from darts_server.weights.export import open_weights
from darts_server.weights.tensors import read_tensors
from darts_server.weights.updates import UpdateOptions
from tests.weights.harness import Harness
from tests.weights.model import SHAPES, tensors, write

pytestmark = pytest.mark.anyio


async def exported(harness: Harness) -> tuple[int, dict[str, np.ndarray]]:
    export = await harness.updates.export()
    data = b"".join(export.chunks())
    assert len(data) == export.size
    return export.version, load(data)


async def test_pushed_weights_are_read_as_they_were_pushed(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await harness.push(5, options=UpdateOptions(version=7))
    version, found = await exported(harness)
    assert version == 7
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors(5).items()
    }


async def test_a_partial_update_is_read_as_the_full_set_that_is_served(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await harness.push(5)
    await harness.push(6, "layers.0.weight")
    _, found = await exported(harness)
    assert {name: set(tensor.flatten().tolist()) for name, tensor in found.items()} == {
        name: {6.0 if name == "layers.0.weight" else 5.0} for name in SHAPES
    }


async def test_before_any_update_the_checkpoint_is_read(tmp_path: Path) -> None:
    version, found = await exported(Harness(tmp_path))
    assert version == 0
    assert found.keys() == SHAPES.keys()


async def test_what_was_read_can_be_pushed_and_gives_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source, target = Harness(tmp_path / "a"), Harness(tmp_path / "b")
    await source.push(5)
    await source.push(6, "layers.0.weight")
    export = await source.updates.export()
    await target.push_bytes(b"".join(export.chunks()), UpdateOptions(version=export.version))
    target.check_serves(2, all=5, layer0=6)


async def test_weights_that_are_in_no_file_cannot_be_read(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await harness.trainer.update()
    with pytest.raises(Conflict, match="push a full set"):
        await harness.updates.export()


async def test_weights_are_not_read_while_they_change(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await harness.trainer.start()
    with pytest.raises(UpdateRunning):
        await harness.updates.export()


async def test_an_update_while_files_are_opened_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path)
    await harness.push(5)
    real = export_module.open_weights

    def open_late(*arguments: Any) -> object:
        harness.updates.coordinator.version += 1
        return real(*arguments)

    monkeypatch.setattr("darts_server.weights.updates.open_weights", open_late)
    with pytest.raises(UpdateRunning):
        await harness.updates.export()


async def test_an_update_does_not_disturb_who_reads_the_weights_before(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    await harness.push(5)
    export = await harness.updates.export()
    await harness.push(6)
    assert load(b"".join(export.chunks()))["layers.0.weight"].flatten()[0] == 5


def test_several_files_and_types_become_one_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sets: list[dict[str, np.ndarray]] = [
        {"b": rng.normal(size=(3, 5)).astype(np.float16), "a": rng.normal(size=(2,)).astype(np.float32)},
        {"c": rng.integers(0, 9, (7, 1), dtype=np.int8), "empty": np.zeros((0, 4), np.float32)},
    ]
    for number, each in enumerate(sets):
        save_file(each, tmp_path / f"{number}.safetensors")
    found = load(b"".join(open_weights(read_tensors(tmp_path, "path"), 1).chunks()))
    for name, tensor in (sets[0] | sets[1]).items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert (found[name] == tensor).all()


def test_a_file_that_changes_while_it_is_read_does_not_look_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "CHUNK_BYTES", 8)
    path = write(tmp_path / "one.safetensors", 5)
    export = open_weights(read_tensors(path, "path"), 1)
    chunks = export.chunks()
    got = [next(chunks)]
    path.write_bytes(save(tensors(6)))
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="changed while"):
        got.extend(chunks)
    assert sum(map(len, got)) < export.size


def test_a_file_that_is_cut_off_does_not_look_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "one.safetensors", 5)
    export = open_weights(read_tensors(path, "path"), 1)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(OSError, match="while it was read"):
        list(export.chunks())


def test_a_changed_file_is_not_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "one.safetensors", 5)
    read = read_tensors(path, "path")
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="has changed"):
        open_weights(read, 1)
