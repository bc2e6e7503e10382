"""Read the server-sent events of a batch and assemble its groups from them."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx

Events = list[tuple[int, str, dict[str, Any]]]
"""Number, name and data of each event."""


def read_events(answer: httpx.Response) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield number, name and data of each event as it arrives."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def assemble_groups(events: Events) -> list[dict[str, Any]]:
    """Return the groups in the order of their prompts, with the tokens that the deltas brought.

    Checks that nothing is missing, repeated, or sent after the last event of a candidate.
    """
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[float] | None] = {}
    ends: dict[str, dict[str, Any]] = {}
    groups = []
    for _, name, data in events:
        if name in ("delta", "trajectory", "discard"):
            assert data["trajectory_id"] not in ends
        if name == "delta":
            received = tokens.setdefault(data["trajectory_id"], [])
            assert data["start"] == len(received)
            received += data["token_ids"]
            before = logprobs.setdefault(data["trajectory_id"], None if data["logprobs"] is None else [])
            if before is not None:
                before += data["logprobs"]
        elif name in ("trajectory", "discard"):
            ends[data["trajectory_id"]] = data
        elif name == "group":
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
                sent = logprobs[trajectory["trajectory_id"]]
                trajectory["token_ids"] = tokens[trajectory["trajectory_id"]][:length]
                trajectory["logprobs"] = None if sent is None else sent[:length]
            groups.append(group)
    return sorted(groups, key=lambda group: group["number"])
