"""The example of a training loop, against a server of its own, whose weights it changes."""

import re
from pathlib import Path

import pytest

from darts_server.offline.demo.server import DARTS
from examples import training_loop
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine


def test_the_loop_gets_sixteen_groups_a_step_and_leaves_no_prompt_behind(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(DARTS, tmp_path / "server.log") as server:
        training_loop.main(["--url", server.url, "--steps", "3"])
    steps = re.findall(r"step (\d): 16 groups, (\d+) prompts wait, \d+% right, weights (\d)", capsys.readouterr().out)
    assert steps == [("0", "8", "1"), ("1", "8", "2"), ("2", "0", "3")]
