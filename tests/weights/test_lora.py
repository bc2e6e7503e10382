"""LoRA adapters of a fake model: what is served after each outcome of an update."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from darts_server.exceptions import Forbidden, InvalidRequest, NotFound, UpdateFailed, WeightsLost
from darts_server.serving.gate import Gate
from darts_server.types import UpdateOutcome
from darts_server.weights.coordinator import State
from darts_server.weights.port import Rule
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates
from tests.weights.harness import Harness
from tests.weights.lora_sets import bytes_of, push, save_to
from tests.weights.model import FakeModel

pytestmark = pytest.mark.anyio


def served(harness: Harness) -> Mapping[str, float]:
    """Return the engine's adapters. Check that they are the reported ones, and that no other files exist."""
    assert harness.model.loras is not None
    names = set(harness.updates.loras.served)
    assert set(harness.model.loras.served) == names
    assert {path.name for path in harness.staging.glob("lora-*")} == {f"lora-{name}" for name in names}
    assert len(harness.staging.glob("*.lora")) == len(names)
    return harness.model.loras.served


async def test_a_lora_adapter_is_pushed_replaced_and_removed(harness: Harness) -> None:
    await push(harness, 5)
    assert served(harness) == {"a": 5}
    assert harness.model.calls == ["announced 1", "pause", "load_lora", "set_version", "resume", "ended completed"]
    await push(harness, 6, "b", rule=Rule.KEEP)
    await push(harness, 7, version=40)
    assert served(harness) == {"a": 7, "b": 6}
    assert {name: one.version for name, one in harness.updates.loras.served.items()} == {"a": 40, "b": 2}
    await harness.updates.loras.remove("a")
    assert served(harness) == {"b": 6}
    harness.check_serves(41, all=0)
    assert [(record.source, record.lora, record.rule) for record in harness.records] == [
        ("push", "a", "finish"),
        ("push", "b", "keep"),
        ("push", "a", "finish"),
        ("delete", "a", "finish"),
    ]


async def test_a_folder_is_copied_before_it_is_served(harness: Harness) -> None:
    folder = save_to(harness.root / "step-1", 5)
    await harness.updates.loras.load("a", "step-1")
    (folder / "adapter_model.safetensors").unlink()
    assert served(harness) == {"a": 5}
    with pytest.raises(InvalidRequest, match=r"adapter_model.safetensors: No such file") as caught:
        await harness.updates.loras.load("a", str(folder))
    assert caught.value.field == "path"
    assert served(harness) == {"a": 5}


async def test_bad_requests_change_nothing(harness: Harness) -> None:
    await push(harness, 5)
    config = harness.root / "big" / "adapter_config.json"
    save_to(harness.root / "big", 6)
    config.write_text(" " * 100_000)
    save_to(harness.root / "none", 6).joinpath("adapter_config.json").unlink()
    os.truncate(save_to(harness.root / "huge", 6) / "adapter_model.safetensors", 200_000_000)  # sparse
    for words, act in (
        ("not a whole safetensors file", push(harness, bytes_of(6)[:-1])),
        ("layers.2.lora_A.weight is of no layer", push(harness, bytes_of(6, "layers.2"))),
        ("is no JSON", push(harness, 6, config="?")),
        ("is 1, which is served already", push(harness, 6, version=1)),
        ("is the model itself", push(harness, 6, "model")),
        ("has more than 65536 bytes", harness.updates.loras.load("a", "big")),
        ("the most for a LoRA adapter", harness.updates.loras.load("a", "huge")),
        ("adapter_config.json: No such file", harness.updates.loras.load("a", "none")),
        ("is outside", harness.updates.loras.load("a", "/etc")),
    ):
        with pytest.raises(InvalidRequest, match=words):
            await act
        assert served(harness) == {"a": 5}
    with pytest.raises(NotFound):
        await harness.updates.loras.remove("b")
    harness.check_serves(1, all=0)


@pytest.mark.parametrize("step", ["pause", "load_lora", "set_version"])
@pytest.mark.parametrize("before", [True, False])
async def test_a_failed_push_serves_the_previous_adapter(harness: Harness, step: str, before: bool) -> None:
    if before:
        await push(harness, 5)
    harness.model.fail[step] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed, match="broken"):
        await push(harness, 6)
    assert served(harness) == ({"a": 5} if before else {})
    harness.check_serves(int(before), all=0)
    await push(harness, 7)
    assert served(harness) == {"a": 7}


async def test_a_failed_removal_keeps_the_adapter(harness: Harness) -> None:
    await push(harness, 5)
    harness.model.fail["unload_lora"] = [UpdateFailed("broken")]
    with pytest.raises(UpdateFailed, match="broken"):
        await harness.updates.loras.remove("a")
    assert served(harness) == {"a": 5}
    harness.check_serves(1, all=0)


async def test_an_adapter_that_cannot_be_restored_loses_the_weights(harness: Harness) -> None:
    await push(harness, 5)
    harness.model.fail["load_lora"] = [UpdateFailed("one"), UpdateFailed("two")]
    with pytest.raises(WeightsLost, match=r"failed \(one\).*\(two\)"):
        await push(harness, 6)
    assert harness.updates.coordinator.state is State.LOST
    assert harness.records[-1].outcome is UpdateOutcome.LOST


async def test_a_server_without_lora_names_the_flag(tmp_path: Path) -> None:
    model = FakeModel(tmp_path)
    model.loras = None
    with Staging(tmp_path) as staging:
        updates = Updates(model, Gate(), staging, tmp_path)
        for act in (updates.loras.load("a", "x"), updates.loras.remove("a")):
            with pytest.raises(Forbidden, match="--enable-lora"):
                await act


async def test_a_lora_adapter_that_is_not_finite_is_refused_unless_the_caller_says_so(harness: Harness) -> None:
    await push(harness, 5)
    save_to(harness.root / "bad", math.nan)
    with pytest.raises(InvalidRequest, match=r"body: tensor base_model\.model\.layers\.0\.lora_A\.weight has NaN"):
        await push(harness, math.nan)
    with pytest.raises(InvalidRequest, match=r"path: tensor .* has NaN or infinity"):
        await harness.updates.loras.load("a", "bad")
    assert served(harness) == {"a": 5}
    await push(harness, math.inf, check_finite=False)
    assert served(harness) == {"a": math.inf}
    await harness.updates.loras.load("b", "bad", check_finite=False)
    assert math.isnan(served(harness)["b"])
