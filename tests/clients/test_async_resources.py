import json
from pathlib import Path

import httpx
import pytest

from darts_client import Client, NotFound
from darts_client._io import write_atomically

from .transcripts import FakeServer
from .vllm_answers import URL


@pytest.mark.parametrize("key", ["key", "gsm8k/7", "../state", "a b?c#d%", ".", "é"])
def test_a_prompt_key_is_escaped_in_the_path(key: str) -> None:
    server = FakeServer(httpx.Response(404))
    with Client(URL, transport=server.transport) as client, pytest.raises(NotFound):
        client.prompts.get(key)
    assert server.requests[0].url.path == f"/darts/v1/prompts/{key}"


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        write_atomically(tmp_path, b"new")
    assert list(tmp_path.parent.glob(f"*{tmp_path.name}*")) == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_many_rewards_are_split_into_requests_and_counted_together() -> None:
    counts = {"matched": 1, "repeated": 0, "unknown": 1, "unknown_indices": [3]}
    server = FakeServer(counts, counts)
    with Client(URL, transport=server.transport) as client:
        total = client.rewards({f"g:{i}": 1.0 for i in range(10_004)})
        assert client.rewards([]).matched == 0, "without a request"
    assert [len(json.loads(request.content)["rewards"]) for request in server.requests] == [10_000, 4]
    assert (total.matched, total.unknown, total.unknown_indices) == (2, 2, (3, 10_003))
