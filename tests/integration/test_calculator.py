"""The agent with a calculator on a real server: a step with session groups, and a step without."""

from pathlib import Path

import pytest

from darts_server.offline.demo.server import DARTS
from examples.calculator import compare
from examples.calculator.train import MODEL, Recipe
from examples.tiny_rl.grpo import TOLERANCE
from tests.integration.fork_server import Serve

pytestmark = [pytest.mark.nightly, pytest.mark.engine]


def test_groups_of_sessions_save_calls_and_train_on_as_many_trajectories(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(DARTS, tmp_path / "server.log") as server:
        compare.main(["--url", server.url, "--seeds", "0", "--steps", "1", "--out", str(tmp_path)])
    assert MODEL.is_dir()
    recipe = Recipe()
    sessions = recipe.prompts * recipe.group_size
    for name, extra in (("plain", 0), ("groups", 4)):
        before, after = compare.read(tmp_path / f"{name}-0.jsonl")
        assert before.held_out is not None
        assert 0.3 < before.held_out.right < 0.6
        figures = after.figures
        assert figures is not None
        assert figures.sessions == sessions + recipe.prompts * extra
        assert bool(extra) <= figures.stopped <= recipe.prompts * extra
        assert bool(figures.saved_calls) == bool(extra)
        assert figures.logprob_gap < TOLERANCE
        assert figures.decode_steps > 0
        assert 0 < figures.right < 1
    assert "| tool calls saved |" in capsys.readouterr().out
