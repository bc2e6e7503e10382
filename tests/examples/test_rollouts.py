from collections.abc import Iterator

import pytest

from darts_server.engine.scripted import Script
from examples import rollouts
from tests.clients.servers import RunningServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda _, index: Script(5 + index)) as served:
        yield served


def test_groups_are_printed_and_rewards_reported(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts.main(["--url", server.url, "--prompts", "3", "--group-size", "2", "--rewards"])
    lines = capsys.readouterr().out.splitlines()
    assert sum("lengths [5, " in line for line in lines) == 3
    assert sum("2 rewards matched" in line for line in lines) == 3
    assert lines[-1].startswith("0 unfinished; generated=")


def test_num_groups_prints_the_first_complete_groups(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts.main(["--url", server.url, "--prompts", "3", "--group-size", "2", "--num-groups", "1"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 unfinished;")
