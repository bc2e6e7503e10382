"""The fields of answers, whatever their values."""

import json
from collections.abc import Iterator

import httpx

VARIABLE = ("top_logprobs", "bytes", "incomplete_details")
"""Named by tokens, or there only where an answer ends by its limit."""


def fields_of(value: object, name: str = "") -> Iterator[str]:
    """Yield the paths of all fields. All items of a list must have the same ones."""
    yield name
    if name.rpartition(".")[2] in VARIABLE:
        return
    if isinstance(value, dict):
        for field, each in value.items():
            yield from fields_of(each, f"{name}.{field}")
    elif isinstance(value, list):
        items = [frozenset(fields_of(item, f"{name}[]")) for item in value]
        assert len(set(items)) <= 1, items
        yield from items[0] if items else ()


def read_fields(answer: httpx.Response) -> frozenset[str]:
    """Fields of an answer, or of each kind of a stream's events: all that any event of it has."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return frozenset(fields_of(answer.json()))
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events
    return frozenset(field for event in events for field in fields_of(event, str(event.get("type", ""))))
