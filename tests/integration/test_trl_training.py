"""TRL's GRPOTrainer trains against the server on a CPU, without NCCL."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from darts_client import Client
from darts_server.offline.demo.server import DARTS, Server
from examples.tiny_rl.tokenizer import build_tokenizer
from examples.tiny_rl.train import Recipe
from examples.tiny_rl.train_trl import make_trainer
from tests.integration.fork_server import Serve
from tests.trainers.runs import record

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]
ROOT = Path(__file__).parents[2]
# As many prompts in the pool as in a step: the rewards of two steps are of the same prompts, and differ by learning.
RECIPE = Recipe(steps=6, pool=16, held_out_prompts=8, held_out_samples=2, held_out_every=6)
PROMPT = "7a-5b*4>"
ENDS = 2
EVALUATIONS = 1
STARTED = "darts_candidates_started_total"
GROUPS, REWARDED = "darts_groups_total", "darts_rewarded_groups_total"
MATCHED, UNKNOWN = "darts_rewards_total matched", "darts_rewards_total unknown"
UPDATES = "darts_weight_updates_total"


@pytest.fixture(scope="module")
def own(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: the shared one keeps its weights."""
    with serve(DARTS, tmp_path_factory.mktemp("trl") / "log") as running:
        yield running


def counters(server: Server) -> dict[str, float]:
    return {
        STARTED: server.metric(STARTED),
        GROUPS: server.metric(GROUPS, outcome="completed"),
        REWARDED: server.metric(REWARDED),
        MATCHED: server.metric("darts_rewards_total", matched="true"),
        UNKNOWN: server.metric("darts_rewards_total", matched="false"),
        UPDATES: server.metric(UPDATES, outcome="completed"),
    }


@pytest.mark.nightly
def test_grpo_learns_with_weights_in_step_evaluates_unshaped_and_reports_all_rewards(
    own: Server, tmp_path: Path
) -> None:
    before = counters(own)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": RECIPE.steps}
    trainer = make_trainer(own.url, "darts_cut", RECIPE, seed=0, out=tmp_path, **saving)
    trainer.train()
    grew = {name: value - before[name] for name, value in counters(own).items()}

    history: list[dict[str, Any]] = trainer.state.log_history
    steps = [line for line in history if "loss" in line]
    evaluations = [line for line in history if "eval_loss" in line]
    assert (len(steps), len(evaluations)) == (RECIPE.steps, EVALUATIONS)
    first, last = (fmean(step["reward"] for step in part) for part in (steps[:ENDS], steps[-ENDS:]))
    assert last > first + 0.1

    gap = "sampling/sampling_logp_difference/max"
    assert max(step[gap] for step in steps) < 1e-3
    assert max(line[f"eval_{gap}"] for line in evaluations) < 1e-3
    # Once before each step, and once for the evaluation after the last.
    assert grew[UPDATES] == RECIPE.steps + EVALUATIONS

    # Only shaped groups and candidates are counted: all of training, none of the evaluation after the last log.
    groups, completions = RECIPE.steps * RECIPE.prompts, RECIPE.steps * RECIPE.prompts * RECIPE.group_size
    assert grew[GROUPS] == groups
    assert grew[STARTED] == sum(step["darts/candidates_started"] for step in steps) > completions

    # A reward counts for all trajectories with the same tokens, so equal completions are reported as repeated.
    (report,) = trainer.reward_reports
    assert report.matched + report.repeated == completions
    assert (report.unknown, report.unreported, grew[UNKNOWN]) == (0, 0, 0)
    assert grew[MATCHED] == report.matched
    assert grew[REWARDED] == groups

    returned = sum(step["completions/mean_length"] for step in steps) * RECIPE.prompts * RECIPE.group_size
    assert sum(step["darts/tokens_returned"] for step in steps) == round(returned)
    with Client(own.url) as client:
        assert client.state.load(tmp_path / f"checkpoint-{RECIPE.steps}" / "darts-state") >= RECIPE.pool
    record("trl_training", "trl", sys.executable, {"requests", "groups", "weights", "training"})


@pytest.mark.nightly
def test_an_adapter_is_trained_alone_and_served_merged(own: Server, tmp_path: Path) -> None:
    trainer = make_trainer(own.url, "uniform", replace(RECIPE, steps=2), seed=1, out=tmp_path, lora=8)
    model: Any = trainer.model
    base = {name: tensor.clone() for name, tensor in model.named_parameters() if "lora" not in name}
    trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    gaps = [step["sampling/sampling_logp_difference/max"] for step in steps]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3

    for name, tensor in model.named_parameters():  # merging for each push and unmerging rounds
        assert "lora" in name or torch.allclose(tensor, base[name], rtol=0, atol=1e-6), name
    # The server has the policy of the trained adapter, not that of the base model.
    with Client(own.url) as client:
        trainer.vllm_generation.sync_weights()
        (group,) = client.rollouts([PROMPT], group_size=2, max_tokens=40, policy="off")
    (trajectory, *_) = group.trajectories
    with_adapter = scored(model, trajectory.token_ids)
    with model.disable_adapter():
        without = scored(model, trajectory.token_ids)
    served = torch.tensor(trajectory.logprobs)
    assert (served - with_adapter).abs().max() < 1e-4 < (served - without).abs().max()


def scored(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return the log-probs of these tokens after `PROMPT`."""
    prompt = build_tokenizer()(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def test_the_pages_snippets_run(
    own: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = counters(own)
    (tmp_path / "darts_server").symlink_to(ROOT / "darts_server")  # the snippets use relative paths
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trl.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet.replace("http://localhost:8000", own.url), names)
    assert "RewardReport(" in capsys.readouterr().out
    assert (tmp_path / "out" / "trl" / "checkpoint-2" / "darts-state").is_file()
    assert counters(own)[GROUPS] - before[GROUPS] == 2 * 2  # steps and prompts; the evaluation is not shaped
