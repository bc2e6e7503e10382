import json
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.problems import sample_problem
from darts_server.offline.demo.runs import Batches, Method, Run, Step, compare, format_table

PROBLEMS = [sample_problem(Random(seed)) for seed in (1, 2)]


def group(number: int, *texts: str) -> tuple[str, dict[str, Any]]:
    trajectories = [{"text": text, "length": len(text) + 1, "finish_reason": "stop"} for text in texts]
    return "group", {"number": number, "metadata": {"number": number}, "trajectories": trajectories}


def stream(*events: tuple[str, dict[str, Any]]) -> str:
    numbered = enumerate(events, start=1)
    return "".join(f"id: {i}\nevent: {name}\ndata: {json.dumps(data)}\n\n: wait\n\n" for i, (name, data) in numbered)


def answer(*events: tuple[str, dict[str, Any]], status: int = 200) -> httpx.Client:
    """A client of a server that answers every batch with these events."""
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=stream(*events)))
    return httpx.Client(base_url="http://test", transport=transport)


def request(client: httpx.Client) -> Step:
    with client:
        return Batches(PROBLEMS, 2, 2, Method("uniform")).request(client)


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


def test_table_has_a_line_for_each_figure_and_a_column_for_each_run() -> None:
    rows = [line.split("  ", 1) for line in format_table(RAW, [shaped()]).splitlines()]
    assert {name.strip(): rest[0].split() for name, *rest in rows[2:]} == {
        "seconds, all steps": ["4.0", "3.0"],
        "right answers": ["50.0%", "75.0%"],
        "longest answer (tokens)": ["255", "35"],
        "tokens generated": ["340", "170"],
    }
    assert len(rows) <= 8


@pytest.mark.parametrize(("seconds", "pace"), [(3.0, "0.75 of the time"), (4.4, "about the same time")])
def test_verdict_compares_time_answers_and_lengths_of_each_run_with_raw(seconds: float, pace: str) -> None:
    # With so many steps, chance explains 14 points.
    def many(run: Run) -> Run:
        return Run(run.name, [*run.steps] * 12)

    assert compare(many(RAW), [many(shaped(seconds))]) == (
        f"Compared with raw: uniform takes {pace}, has 25.0 points more right answers and returns the shorter answers "
        "(longest answer 35 tokens, raw 255)."
    )
    [step] = RAW.steps
    cut = Run("raw, max 64", [replace(step, truncated=2, right=2)])
    same = Run("auto", [step])
    assert compare(many(RAW), [many(cut), many(same)]) == (
        "Compared with raw: raw, max 64 takes about the same time, has 25.0 points fewer right answers and cuts off "
        "25% of the answers (longest answer 255 tokens, raw 255); auto takes about the same time, has as many right "
        "answers (within the noise of ± 14 points) and discards nothing (longest answer 255 tokens, raw 255)."
    )


def test_the_last_step_waits_for_prompts_that_were_started_ahead() -> None:
    """Three steps need three problems each: 4, 3 and 2 are sent, and the last step waits for all of them."""
    bodies: list[dict[str, Any]] = []

    def handle(sent: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(sent.content))
        first = sum(len(body["prompts"]) for body in bodies[:-1]) - len(bodies) + 1
        left = [] if len(bodies) == 3 else [{"number": 3}]
        groups = [group(number, "#1") for number in range(first, first + 3)]
        usage = {"returned": 9, "generated": 9}
        return httpx.Response(200, text=stream(*groups, ("done", {"usage": usage, "unfinished": left})))

    problems = [sample_problem(Random(seed)) for seed in range(9)]
    batches = Batches(problems, 3, 1, Method("auto", ahead=0.34))
    with httpx.Client(base_url="http://test", transport=httpx.MockTransport(handle)) as client:
        steps = [batches.request(client) for _ in range(3)]
    assert [len(body["prompts"]) for body in bodies] == [4, 3, 2]
    assert [body["num_groups"] for body in bodies] == [3, 3, None]
    assert all((body["carry"], body["carried"]) == ("resume", True) for body in bodies)
    assert [step.waiting for step in steps] == [1, 1, 0]
