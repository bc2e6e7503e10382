import json
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.problems import sample_problem
from darts_server.demo.rollouts import Method, Step, request_groups

PROBLEMS = [sample_problem(Random(seed)) for seed in (1, 2)]


def group(number: int, *texts: str) -> tuple[str, dict[str, Any]]:
    return "group", {"number": number, "trajectories": [{"text": text, "length": len(text) + 1} for text in texts]}


def answer(*events: tuple[str, dict[str, Any]], status: int = 200) -> httpx.Client:
    """A client of a server that answers every batch with these events."""
    numbered = enumerate(events, start=1)
    text = "".join(f"id: {i}\nevent: {name}\ndata: {json.dumps(data)}\n\n: wait\n\n" for i, (name, data) in numbered)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    return httpx.Client(base_url="http://test", transport=transport)


def request(client: httpx.Client) -> Step:
    with client:
        return request_groups(client, PROBLEMS, 2, Method("uniform"))


def test_groups_are_read_in_the_order_of_arrival_and_answers_are_verified() -> None:
    right = f"#{PROBLEMS[1].answer}"
    usage = {"generated": 20, "returned": 12}
    events = ("batch", {"id": "b"}), group(1, right, "#?"), group(0, "", "12345"), ("done", {"usage": usage})
    with pytest.raises(RuntimeError, match="13 tokens arrived, the server counted 12"):
        request(answer(*events))
    usage["returned"] = 13
    step = request(answer(*events))
    assert step.lengths == [[3, 3], [1, 6]]
    assert (step.right, step.generated) == (1, 20)
    assert 0 < step.arrivals[0] <= step.arrivals[1] <= step.seconds


def test_a_failed_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the server answered: no room"):
        request(answer(("group", {"number": 0, "error": {"message": "no room"}, "trajectories": []})))


def test_a_refused_batch_is_an_error_with_the_servers_message() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)answered 400.*no such policy"):
        request(answer(("error", {"error": {"message": "no such policy"}}), status=400))
