import sys

import pytest

from darts_client import Client

from .transcripts import GROUPS, Body, FakeServer, done, encode, group, started
from .vllm_answers import URL


def test_rollouts_show_a_bar_on_request_which_is_full_after_num_groups(capsys: pytest.CaptureFixture[str]) -> None:
    stream = encode(started(), ("group", group(1)), done(0))
    for events, num_groups, shown in ((GROUPS, None, "2/2"), (stream, 1, "1/1")):
        with Client(URL, transport=FakeServer(Body(*events)).transport) as client:
            list(client.rollouts(["a", "b"], group_size=2, max_tokens=16, num_groups=num_groups, progress=True))
        text = capsys.readouterr().out
        assert shown in text
        assert "tokens/s" in text


def test_without_rich_the_error_names_the_extra_before_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    server = FakeServer()
    with (
        Client(URL, transport=server.transport) as client,
        pytest.raises(ImportError, match=r"darts-client\[progress\]"),
    ):
        client.rollouts("a", group_size=2, max_tokens=16, progress=True)
    assert server.requests == []
