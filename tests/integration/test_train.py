"""Training on a real server: the example, end to end, and the comparison's runs, which continue where they were."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.rl import Run
from darts_client import Client
from darts_server.offline.demo.server import DARTS, MODEL, Server
from examples.tiny_rl import train
from examples.tiny_rl.grpo import TOLERANCE
from examples.tiny_rl.method import Method
from examples.tiny_rl.train import Recipe
from examples.tiny_rl.train_log import read_log
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.nightly, pytest.mark.engine]
STEPS = 2
RECIPE = Recipe(steps=3, prompts=4, group_size=4, pool=12, held_out_prompts=12, held_out_samples=2, held_out_every=3)
TAIL_BATCHING = Method("off", started=1.5)


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: the shared one keeps its weights."""
    with serve(DARTS, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_each_step_samples_with_the_weights_of_the_step_before(server: Server, tmp_path: Path) -> None:
    """Must be the first test. Training is shaped, evaluation is not."""
    recipe = Recipe()
    argv = ["--policy", "darts_cut", "--prompts-ahead", "0", "--steps", str(STEPS), "--url", server.url]
    train.main([*argv, "--out", str(tmp_path)])
    started = server.metric("darts_candidates_started_total")
    cut = server.metric("darts_candidates_cut_total")
    before, *entries = read_log(tmp_path / "log.jsonl")
    steps = [entry.training for entry in entries if entry.training is not None]
    assert len(steps) == STEPS
    assert all(one.weight_version < other.weight_version for one, other in pairwise(steps))
    assert all(step.logprob_gap < TOLERANCE for step in steps)
    assert all(0 < step.right < 1 and 3 < step.length_mean < step.length_p95 for step in steps)
    assert all(step.trained < step.generated for step in steps)
    assert all(min(step.seconds.rollout, step.seconds.train, step.seconds.push) > 0 for step in steps)
    # The log has four digits.
    assert round(sum(step.truncated for step in steps) * recipe.prompts * recipe.group_size) >= cut

    # Only shaped candidates are counted: all of training, none of the evaluations.
    assert started == STEPS * recipe.prompts * recipe.group_size * 1.5
    last = entries[-1].held_out
    assert before.held_out is not None
    assert last is not None
    assert before.held_out.samples == last.samples == recipe.held_out_prompts * recipe.held_out_samples
    assert last.right > before.held_out.right - 2 * before.held_out.standard_error
    assert (tmp_path / "training.png").is_file()


@pytest.mark.nightly
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


@pytest.mark.nightly
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
