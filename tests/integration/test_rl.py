"""The comparison's runs on a real server: they continue where they were, and controls reach the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.rl import Run
from darts_client import Client
from darts_server.demo.server import DARTS, MODEL
from examples.tiny_rl.method import Method
from examples.tiny_rl.train import Recipe
from examples.tiny_rl.train_log import read_log
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
RECIPE = Recipe(steps=3, prompts=4, group_size=4, pool=12, held_out_prompts=12, held_out_samples=2, held_out_every=3)
TAIL_BATCHING = Method("off", started=1.5)


@pytest.fixture(scope="module")
def client(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serve(DARTS, tmp_path_factory.mktemp("server") / "log") as server, Client(server.url) as client:
        yield client


def test_an_interrupted_run_continues_after_its_last_whole_step(client: Client, tmp_path: Path) -> None:
    log = tmp_path / "start" / "off-0.jsonl"
    interrupted = Run(client, TAIL_BATCHING, RECIPE, 0, MODEL, log)
    assert [interrupted.advance(step) for step in (0, 2, 1)] == [1, 2, 0]
    entries = read_log(log)
    saved = torch.load(log.with_suffix(".pt"))
    with log.open("a") as unsaved:
        print(entries[-1].line(), file=unsaved)

    continued = Run(client, TAIL_BATCHING, RECIPE, 0, MODEL, log)
    assert (continued.logged, read_log(log)) == (3, entries)
    continued.advance(3)
    steps = [entry.step for entry in read_log(log)]
    assert steps == [0, 1, 2, 3]

    progress = torch.load(log.with_suffix(".pt"))["progress"]
    assert (saved["progress"]["step"], saved["progress"]["drawn"]) == (2, 6 + 4)
    assert (progress["step"], progress["drawn"], len(progress["carried"])) == (3, 6 + 4 + 4, 2)
    trained = [entry.training for entry in read_log(log) if entry.training is not None]
    # Four of six groups are trained on, and no candidate is longer than 256 tokens.
    assert all(step.trained < step.generated <= step.trained + 2 * 4 * 256 for step in trained), "stopped groups count"
    with pytest.raises(RuntimeError, match="other settings"):
        Run(client, Method("uniform"), RECIPE, 0, MODEL, log)


def test_runs_are_evaluated_with_the_same_random_numbers(client: Client, tmp_path: Path) -> None:
    capped = Method("off", max_tokens=24, overlong=12)
    runs = [
        Run(client, method, RECIPE, 0, MODEL, tmp_path / str(n)) for n, method in enumerate((capped, Method("off")))
    ]
    for run in runs:
        run.advance(0)
    first, second = (read_log(tmp_path / str(n))[0].held_out for n in range(2))
    assert first is not None
    assert second is not None
    pairs = [pair for name in first.rights for pair in zip(first.rights[name], second.rights[name], strict=True)]
    assert sum(one == other for one, other in pairs) >= len(pairs) - 1  # rounding differs with the batch

    runs[0].advance(1)
    training = read_log(tmp_path / "0")[1].training
    assert training is not None
    assert training.length_p95 <= 24
    assert training.truncated > 0
