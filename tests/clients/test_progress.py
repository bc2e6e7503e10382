import sys

import pytest

from darts_client import Client, Group, GroupEvent, Trajectory
from darts_client._models import Discarded
from darts_client._progress import Bar, bar

from .answers import URL
from .transcripts import GROUPS, Body, Listed, began, done, group, written


def decided(length: int) -> GroupEvent:
    lost = Discarded(trajectory_id="g:1", length=5, reason="middle")
    trajectory = Trajectory(0, "", tuple(range(length)), None, "stop")
    return GroupEvent(Group("g", None, (trajectory,), discarded=(lost,)))


def test_a_bar_counts_groups_and_their_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(3) as shown:
        shown.see(decided(10))
        shown.see(decided(20))
    text = capsys.readouterr().out
    assert "2/3" in text
    assert "tokens/s" in text


def test_without_a_bar_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with bar(False, 3) as shown:
        shown.see(decided(10))
    assert capsys.readouterr().out == ""


def test_rollouts_show_a_bar_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with Client(URL, transport=Listed(Body(*GROUPS)).transport) as client:
        assert len(list(client.rollouts(["a", "b"], group_size=2, max_tokens=16, progress=True))) == 2
    assert "2/2" in capsys.readouterr().out


def test_a_bar_is_full_with_the_groups_that_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    told = written(began(), ("group", group(1)), done(0))
    with Client(URL, transport=Listed(Body(*told)).transport) as client:
        list(client.rollouts(["a", "b"], group_size=2, max_tokens=16, num_groups=1, progress=True))
    assert "1/1" in capsys.readouterr().out


def test_a_missing_library_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    server = Listed()
    with (
        Client(URL, transport=server.transport) as client,
        pytest.raises(ImportError, match=r"darts-client\[progress\]"),
    ):
        client.rollouts("a", group_size=2, max_tokens=16, progress=True)
    assert server.requests == []
