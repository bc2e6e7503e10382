"""Server-sent events of a batch, and what they come to."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx

Told = list[tuple[int, str, dict[str, Any]]]


def told_by(answer: httpx.Response) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Number, name and data of each event, as they come."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def put_together(told: Told) -> list[dict[str, Any]]:
    """The groups, in the order of their prompts, with what the deltas said of each trajectory's tokens.

    Checks on the way that nothing is missing, repeated or told after a candidate's end.
    """
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float] | None] = {}
    ends: dict[str, dict[str, Any]] = {}
    groups = []
    for _, name, data in told:
        if name in ("delta", "trajectory", "discard"):
            assert data["trajectory_id"] not in ends
        if name == "delta":
            ours = tokens.setdefault(data["trajectory_id"], [])
            assert data["start"] == len(ours)
            ours += data["token_ids"]
            before = logprobs.setdefault(data["trajectory_id"], None if data["logprobs"] is None else [])
            if before is not None:
                before += data["logprobs"]
        elif name in ("trajectory", "discard"):
            ends[data["trajectory_id"]] = data
        elif name == "group":
            if data["candidates"]:  # of a shadow that still watches they are not told yet
                assert data["candidates"] == sum(end["number"] == data["number"] for end in ends.values())
            for discarded in data["discarded"]:
                assert ends[discarded["trajectory_id"]]["reason"] == discarded["reason"]
                assert ends[discarded["trajectory_id"]]["length"] == discarded["length"]
            group = deepcopy(data)
            for trajectory in group["trajectories"]:
                assert "token_ids" not in trajectory
                assert "logprobs" not in trajectory
                length, end = trajectory["length"], ends[trajectory["trajectory_id"]]
                assert {name: trajectory[name] for name in end if name != "number"} == {
                    name: value for name, value in end.items() if name != "number"
                }
                known = logprobs[trajectory["trajectory_id"]]
                trajectory["token_ids"] = tokens[trajectory["trajectory_id"]][:length]
                trajectory["logprobs"] = None if known is None else known[:length]
            groups.append(group)
    return sorted(groups, key=lambda group: group["number"])
