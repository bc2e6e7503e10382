"""The training loop on a scripted server: the prompts of each step, and the state between steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from darts_client import Client
from darts_server.engine.scripted import Script
from examples.tiny_rl import train
from examples.tiny_rl.grpo import Learner, Trained, Update
from examples.tiny_rl.method import Method
from examples.tiny_rl.train import Progress, Recipe
from examples.tiny_rl.train_log import Entry
from tests.clients.servers import RunningServer, serving

RECIPE = Recipe(steps=6, prompts=4, group_size=2, pool=12, held_out_prompts=4, held_out_samples=2, held_out_every=99)
STARTED = 1.5


def lengths(prompt: str, index: int) -> Script:
    """One prompt in three is long."""
    return Script(60 if sum(map(int, prompt.split())) % 3 == 0 else 4 + index)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(lengths) as served:
        yield served


class Weights:
    """The weights of a scripted engine, which are only a version."""

    def __init__(self, server: RunningServer) -> None:
        self._engine = server.engine

    def push(self, _: bytes) -> Any:
        self._engine.weight_version += 1
        return self.get()

    def get(self) -> Any:
        return SimpleNamespace(version=self._engine.weight_version)


class FakeLearner:
    """Records its training batches, and the server's version at that time."""

    def __init__(self, server: RunningServer) -> None:
        self._engine = server.engine
        self.batches: list[Sequence[Trained]] = []
        self.served: list[int] = []

    def weights(self) -> bytes:
        return b""

    def update(self, batch: Sequence[Trained]) -> Update:
        self.batches.append(batch)
        self.served.append(self._engine.weight_version)
        return Update(0.0, 0.0, 0.0)

    def prompts(self) -> list[Counter[tuple[int, ...]]]:
        """Number of groups of each prompt in each step."""
        steps = [Counter(tuple(each.tokens[: each.prompt_length]) for each in batch) for batch in self.batches]
        return [Counter({prompt: count // RECIPE.group_size for prompt, count in step.items()}) for step in steps]


def run(server: RunningServer, method: Method, progress: Progress | None = None, steps: int | None = None) -> Any:
    learner = FakeLearner(server)
    entries: list[Entry] = []
    with Client(server.url, retries=0) as client:
        client.weights = cast(Any, Weights(server))
        client.metrics = lambda: ""  # type: ignore[method-assign]  # without a server
        training = train.train(client, method, cast(Learner, learner), RECIPE, 0, progress, "run")
        for entry in training:
            entries.append(entry)
            if entry.step == steps:
                break
    return learner, entries


@pytest.fixture(autouse=True)
def _no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "evaluate", lambda *_: None)


@pytest.mark.parametrize("carry", [None, "restart", "resume"])
def test_each_prompt_that_was_drawn_is_trained_on_once_or_still_left(server: RunningServer, carry: Any) -> None:
    progress = Progress()
    learner, entries = run(server, Method("off", started=STARTED, carry=carry), progress)
    steps = learner.prompts()
    sizes = [sum(step.values()) for step in steps]
    assert set(sizes) == {4}
    trained = sum(steps, Counter[tuple[int, ...]]())
    assert progress.drawn == sum(sizes) + len(progress.carried) == 6 + sum(sizes[:-1])
    epochs = progress.drawn // RECIPE.pool
    drawn_at_least = Counter(dict.fromkeys(trained, epochs))
    assert sum((drawn_at_least - trained).values()) <= len(progress.carried)
    assert max(trained.values()) <= epochs + 1
    shares = [entry.training.off_policy for entry in entries if entry.training is not None]
    assert any(shares) == (carry == "resume")


def test_a_long_round_trains_on_the_unfinished_prompts_and_no_other_batch_has_them(
    server: RunningServer,
) -> None:
    progress = Progress()
    learner, _ = run(server, Method("off", started=STARTED, long_rounds=True), progress)
    # Each batch of six new prompts leaves two unfinished, so each third batch has the prompts of the two before.
    steps = learner.prompts()
    assert [sum(step.values()) for step in steps] == [4] * 6
    assert progress.drawn == 4 * 6
    assert progress.carried == []
    for first in (0, 3):
        assert steps[first].keys().isdisjoint(steps[first + 2])
        assert steps[first + 1].keys().isdisjoint(steps[first + 2])
    epochs, rest = divmod(progress.drawn, RECIPE.pool)
    trained = sum(steps, Counter[tuple[int, ...]]())
    assert sorted(trained.values()) == sorted([epochs] * (RECIPE.pool - rest) + [epochs + 1] * rest)


def test_resumed_tokens_are_trained_on_as_stale_tokens_with_the_logprobs_that_sampled_them(
    server: RunningServer,
) -> None:
    learner, _ = run(server, Method("off", started=STARTED, carry="resume"))
    resumed = [each for batch in learner.batches for each in batch if each.stale]
    assert resumed
    for each in resumed:
        assert each.stale <= len(each.logprobs)
        assert list(each.logprobs) == [-token / 8 for token in range(len(each.logprobs))]
    assert any(each.stale < len(each.logprobs) for each in resumed), "its trajectory went on under newer weights"


def test_staleness_1_trains_on_every_prompt_in_order_one_update_late(server: RunningServer) -> None:
    learner, entries = run(server, Method("off", staleness=1))
    usual, _ = run(server, Method("off"))
    assert learner.prompts() == usual.prompts()
    versions = [entry.training.weight_version for entry in entries if entry.training is not None]
    lags = [served - version for served, version in zip(learner.served, versions, strict=True)]
    assert lags == [0, 1, 1, 1, 1, 1]
    shares = [entry.training.off_policy for entry in entries if entry.training is not None]
    assert shares == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_an_interrupted_run_with_staleness_continues_with_the_untrained_prompts(
    server: RunningServer,
) -> None:
    progress, method = Progress(), Method("off", staleness=1)
    first, _ = run(server, method, progress, steps=2)
    assert (progress.step, progress.drawn) == (2, 8)
    continued, entries = run(server, method, progress)
    usual, _ = run(server, Method("off"))
    assert [*first.prompts(), *continued.prompts()] == usual.prompts()
    assert entries[0].training is not None
    assert entries[0].training.off_policy == 0.0
