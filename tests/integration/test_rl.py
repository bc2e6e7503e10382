"""The comparison's runs on a real server: they continue where they were, and controls reach the engine."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.rl import Run
from darts_client import Client
from darts_server.demo.server import DARTS, MODEL
from darts_server.policy.auto.options import RULES
from darts_server.store.archive import LIMIT_BYTES, unpack
from examples.tiny_rl.grpo import TOLERANCE
from examples.tiny_rl.method import Method
from examples.tiny_rl.remote import samples
from examples.tiny_rl.train import HELD_OUT_SEED, Recipe, problems
from examples.tiny_rl.train_log import read_log
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
RECIPE = Recipe(steps=3, prompts=4, group_size=4, pool=12, held_out_prompts=12, held_out_samples=2, held_out_every=3)
TAIL_BATCHING = Method("off", started=1.5)
ALL_RULES = Method({"name": "auto", "auto_allow": ",".join(RULES)})


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


@pytest.mark.nightly
def test_what_is_resumed_is_trained_on_with_the_share_of_tokens_of_older_weights(serve: Serve, tmp_path: Path) -> None:
    method, log = Method("off", started=1.5, carry="resume"), tmp_path / "resume.jsonl"
    with serve(DARTS, tmp_path / "log") as server, Client(server.url) as client:  # no other test replaces its weights
        resuming = Run(client, method, RECIPE, 0, MODEL, log)
        for step in (0, 1, 3):
            resuming.advance(step)
    steps = [entry.training for entry in read_log(log) if entry.training is not None]
    assert steps[0].off_policy == 0.0
    assert all(0.0 <= step.off_policy < 1.0 for step in steps[1:])
    # A step may be of new groups alone: those that are complete first are returned.
    assert any(step.off_policy > 0.0 for step in steps[1:])
    assert all(step.logprob_gap < TOLERANCE for step in steps)
    oldest = [step.weight_version for step in steps]
    ages = [oldest[0] + number - version for number, version in enumerate(oldest)]
    assert ages == [int(step.off_policy > 0.0) for step in steps], "the oldest tokens are one update old"


@pytest.mark.nightly
def test_one_step_off_training_keeps_a_batch_while_other_runs_take_their_turns(client: Client, tmp_path: Path) -> None:
    both = (Method("off", staleness=1), Method("off"))
    runs = [Run(client, method, RECIPE, 0, MODEL, tmp_path / str(n)) for n, method in enumerate(both)]
    assert runs[0].begin() == runs[1].begin(runs[0].evaluation()) == 1
    for step in (1, 3):
        for run in runs:
            run.advance(step)
    entries = [read_log(tmp_path / str(n)) for n in range(2)]
    assert entries[0][0] == entries[1][0], "the evaluation before training is done once"
    assert [entry.step for entry in entries[1]] == [0, 1, 2, 3]
    ahead, usual = ([e.training for e in each if e.training is not None] for each in entries)
    assert [step.off_policy for step in ahead] == [0.0, 1.0, 1.0]
    assert [step.off_policy for step in usual] == [0.0, 0.0, 0.0]
    assert all(step.logprob_gap < TOLERANCE for step in [*ahead, *usual])


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


def test_every_sample_of_an_evaluation_has_its_own_random_numbers(client: Client) -> None:
    [problem] = problems(HELD_OUT_SEED, 1, ("hard",))
    answers = samples(client, [problem.prompt] * 3, 3, seed=5)
    assert len({trajectory.token_ids for group in answers for trajectory in group}) > 4


@pytest.mark.nightly
def test_auto_learns_how_long_training_takes_within_its_turns_alone(client: Client, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=4, prompts=8, group_size=2, pool=16)
    run = Run(client, ALL_RULES, recipe, 0, MODEL, tmp_path / "auto")
    other = Run(client, Method("off"), recipe, 0, MODEL, tmp_path / "off")
    turns = []
    for step in (0, 2, 4):
        began = time.perf_counter()
        run.advance(step)
        turns.append(time.perf_counter() - began)
        other.advance(step)
    rows = unpack((tmp_path / "auto.state").read_bytes(), LIMIT_BYTES)
    [learned] = [json.loads(json.loads(text)["value"]) for kind, _, text in rows if kind == "auto"]
    assert learned["batches"] == 4
    trained = [entry.training.seconds for entry in read_log(tmp_path / "auto") if entry.training is not None]
    assert len(learned["training"]) == 2, "between the two steps of each of two turns"
    for (_, seconds), before, turn in zip(learned["training"], trained[::2], turns[1:], strict=True):
        assert before.train + before.push <= seconds < turn
