import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.problems import sample_problem
from darts_server.demo.runs import Method, Run, Step, request_groups, table, verdict

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


# --- comparing runs ---------------------------------------------------------

RAW = Run("raw", [Step([1.0, 3.0], [(3, 20, 22, 255), (10, 10, 10, 10)], right=4, generated=340, seconds=4.0)])


def shaped(seconds: float = 3.0) -> Run:
    lengths = [(3, 20, 22, 35), (10, 10, 10, 10)]
    return Run("uniform", [Step([0.5, 2.0], lengths, right=6, generated=170, seconds=seconds)])


def cells(raw: Run, others: Sequence[Run]) -> dict[str, list[str]]:
    """The table's cells, by the name of the row."""
    rows = [line.split("  ", 1) for line in table(raw, others).splitlines()[2:] if not line.startswith("-")]
    return {name.strip(): rest.split() for name, rest in rows}


def test_table_has_raw_each_policy_and_its_ratio_to_raw() -> None:
    assert cells(RAW, [shaped()]) == {
        "wall time, all steps (s)": ["4.00", "3.00", "0.75"],
        "wall time, median step (s)": ["4.00", "3.00", "0.75"],
        "tokens generated": ["340", "170", "0.50"],
        "tokens returned": ["340", "120", "0.35"],
        "tokens discarded": ["0", "50", "-"],
        "length, mean (tokens)": ["42.5", "15.0", "0.35"],
        "length, 95th percentile": ["173", "30", "0.18"],
        "length, longest": ["255", "35", "0.14"],
        "length, std within a group": ["52.1", "5.7", "0.11"],
        "right answers": ["50.0%", "75.0%", "1.50"],
    }


@pytest.mark.parametrize(
    ("seconds", "pace"), [(3.0, "faster than raw"), (4.4, "about as fast as raw"), (5.0, "slower than raw")]
)
def test_verdict_calls_a_run_faster_only_if_the_difference_is_clear(seconds: float, pace: str) -> None:
    assert verdict(RAW, shaped(seconds)) == (
        "uniform: 0.50 x the generated tokens for the same 8 trajectories; "
        f"a step took {seconds / 4:.2f} x the time (median): {pace} here."
    )


def test_one_step_that_was_slowed_down_does_not_decide_the_verdict() -> None:
    [step] = RAW.steps
    slow_once = Run("raw", [step, step, replace(step, seconds=400.0)])
    assert "a step took 1.00 x the time" in verdict(slow_once, Run("darts", [step, step, step]))
