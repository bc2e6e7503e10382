"""Request a batch of groups over HTTP and time what arrives."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from darts_server.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward

TIMEOUT_SECONDS = 300.0  # a batch of the tiny model takes a few seconds, on a busy machine some tens


@dataclass(frozen=True)
class Method:
    """How a run samples: ``policy``, a policy's name, and ``max_tokens`` of each trajectory."""

    policy: str
    max_tokens: int = MAX_RESPONSE_TOKENS


@dataclass(frozen=True)
class Step:
    """One batch, as a trainer requests one for each step. Lengths are in generated tokens, the end of sequence counted.

    Attributes:
        arrivals: seconds from the request to each group, in the order of arrival.
        lengths: of the returned trajectories, for each of these groups.
        right: returned trajectories with the right answer.
        generated: tokens of all candidates, returned or not.
        seconds: from the request to the end of the answer.
    """

    arrivals: Sequence[float]
    lengths: Sequence[Sequence[int]]
    right: int
    generated: int
    seconds: float


def request_groups(client: httpx.Client, problems: Sequence[Problem], group_size: int, method: Method) -> Step:
    """Request a group for each problem, all in one batch, and read them as they complete.

    Raises:
        RuntimeError: the server refused the batch, or a group failed.
    """
    body = {
        "prompts": [{"text": problem.prompt} for problem in problems],
        "group_size": group_size,
        "sampling": {"max_tokens": method.max_tokens, "temperature": 1.0},
        "policy": {"name": method.policy},
        "stream": "groups",
    }
    arrivals, lengths, right, usage = [], [], 0, {}
    start = time.perf_counter()
    with client.stream("POST", "/darts/v1/rollouts", json=body) as response:
        if response.is_error:
            raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
        for event, data in events(response.iter_lines()):
            if data.get("error"):
                raise RuntimeError(f"the server answered: {data['error']['message']}")
            if event == "group":
                arrivals.append(time.perf_counter() - start)
                lengths.append([trajectory["length"] for trajectory in data["trajectories"]])
                right += sum(reward(problems[data["number"]], each["text"]) == 1 for each in data["trajectories"])
            elif event == "done":
                usage = data["usage"]
    seconds, returned = time.perf_counter() - start, sum(map(sum, lengths))
    if usage.get("returned") != returned:
        raise RuntimeError(f"{returned} tokens arrived, the server counted {usage.get('returned')}")
    return Step(arrivals, lengths, right, usage["generated"], seconds)


def events(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parse server-sent events, as darts-server sends them: one line of JSON each."""
    name = ""
    for line in lines:
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            yield name, json.loads(value)
