"""The training example, end to end: weights are updated, training is shaped, evaluation is not."""

from itertools import pairwise
from pathlib import Path

import pytest

from darts_server.demo.server import DARTS
from examples.tiny_rl import train
from examples.tiny_rl.grpo import TOLERANCE
from examples.tiny_rl.train_log import read_log
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
STEPS = 2


def test_each_step_samples_with_the_weights_of_the_step_before(serve: Serve, tmp_path: Path) -> None:
    recipe = train.Recipe()
    with serve(DARTS, tmp_path / "server.log") as server:  # its own: the shared one keeps its weights
        out = ["--url", server.url, "--out", str(tmp_path)]
        train.main(["--policy", "darts_cut", "--steps", str(STEPS), *out])
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
