"""What is carried over for callers whose API keys are not valid any more, on the scripted engine."""

from pathlib import Path

import pytest

from darts_server.engine.scripted import Script
from darts_server.rollout.batches.carried import CarriedPrompt, CarriedPrompts, Carry, SavedPrompts
from darts_server.serving.admission import Caller, caller
from darts_server.store.transactions import CarriedFile
from darts_server.types import PromptSpec
from tests.rollout.batches.streams import new_registry
from tests.rollout.batches.test_aborted import begin, finish, request
from tests.rollout.helpers import Harness

pytestmark = pytest.mark.anyio


def kept(*names: str) -> list[CarriedPrompt]:
    return [CarriedPrompt(PromptSpec(text=name), (name, name)) for name in names]


def test_prompts_of_callers_that_cannot_take_them_any_more_are_dropped_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    valid: set[str | None] = {"one", "two", "three", None}
    prompts = CarriedPrompts(may_call=lambda name: name in valid)
    for owner, names in {"one": "ab", "two": "c", "three": "d", None: "e"}.items():
        prompts.put(owner, kept(*names))
    prompts.drop_without_caller()
    assert (len(list(prompts)), caplog.messages) == (5, [])
    valid -= {"one", "three"}
    prompts.drop_without_caller()
    assert [(owner, prompt.prompt.text) for owner, prompt in prompts] == [("two", "c"), (None, "e")]
    [message] = caplog.messages
    assert message.startswith("3 prompts that were carried over are dropped: their API key")


async def test_a_batch_that_runs_when_its_key_is_removed_ends_and_keeps_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness, valid = Harness(lambda text, index: Script(int(text) + index)), {"one"}
    registry = new_registry(harness, "shortest", may_call=lambda name: name in valid)
    token = caller.set(Caller("one"))
    batch = await begin(harness, registry, request("30", "10", carry=Carry.RESUME, num_groups=1), 5)
    caller.reset(token)
    valid.clear()
    registry.keys_changed()
    done = await finish(harness, batch)
    assert (len(done.results), done.carried, list(registry._carried)) == (1, 0, [])
    assert "1 prompts that were carried over are dropped" in caplog.text


async def test_a_server_that_starts_with_other_keys_drops_what_it_cannot_give_to_anyone(tmp_path: Path) -> None:
    with CarriedFile(tmp_path) as store:
        saved = SavedPrompts(store, "model")
        saved.save([("one", prompt) for prompt in kept("a", "b")] + [("two", prompt) for prompt in kept("c")])
        harness = Harness(lambda *_: Script(1))
        registry = new_registry(harness, "shortest", saved=saved, may_call=lambda name: name == "two")
        registry.restore()
        assert [owner for owner, _ in registry._carried] == ["two"]
