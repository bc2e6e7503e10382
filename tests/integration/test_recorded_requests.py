"""The requests of each trainer, as recorded in `tests/trainers/requests.json`."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.offline.demo.server import Server

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 4
GROUP = {"X-Darts-Group": f"size={SIZE}"}
RAW = {"X-Darts-Policy": "off"}
GROUP_ID = "X-Darts-Group-Id"
RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "trainers" / "requests.json").read_text(encoding="utf-8")
)
MESSAGES = {
    "trainer": "messages",
    "path": "/v1/messages",
    "prompt": "messages",
    "raw": "model",
    "headers": {},
    "body": {"model": "MODEL", "max_tokens": 24},
}
STREAMED = list({each["path"]: each for each in (*RECORDED, MESSAGES)}.values())
CASES = [*((each, False) for each in (*RECORDED, MESSAGES)), *((each, True) for each in STREAMED)]
VARIABLE = ("top_logprobs", "bytes", "incomplete_details")
"""Named by tokens, or there only where an answer ends by its limit."""


@dataclass(frozen=True)
class Trajectory:
    """A trajectory of one trainer, of the group ``uid``, whose prompt is made from ``seed``."""

    recorded: Mapping[str, Any]
    uid: str
    rep: int
    seed: int

    def request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Return path, body and headers."""
        random = Random(self.seed)
        tokens = [random.randint(3, 12) for _ in range(12)]
        messages = [{"role": "user", "content": f"{self.seed % 10}a-{'b+'.join(map(str, tokens))}>"}]
        names: dict[str, Any] = {"MODEL": "tiny", "SEED": Random(f"{self.uid}{self.rep}").getrandbits(62)}
        names |= {"UID_REP": f"{self.uid}_{self.rep}", "SESSION": f"session-{self.uid}-{self.rep}"}
        body, headers = (
            {name: names.get(value, value) if isinstance(value, str) else value for name, value in filled.items()}
            for filled in (self.recorded["body"], self.recorded["headers"])
        )
        match self.recorded["prompt"]:
            case "tokens":
                body["prompt"] = tokens
            case "token_ids":
                body["token_ids"] = tokens
            case field:
                body[field] = messages
        return self.recorded["path"], body, headers


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


async def send(
    client: httpx.AsyncClient, trajectory: Trajectory, more: Mapping[str, str], **changes: Any
) -> httpx.Response:
    path, body, headers = trajectory.request()
    answer = await client.post(path, json=body | changes, headers=headers | dict(more))
    assert answer.status_code == 200, (trajectory.recorded["trainer"], answer.text)
    return answer


@pytest.mark.parametrize(
    ("recorded", "stream"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * case[1]) for case in CASES],
    ids=[f"{each['trainer']}{', streamed' * stream}" for each, stream in CASES],
)
async def test_requests_make_a_group_evaluations_are_raw_and_all_answers_have_the_same_fields(
    server: Server, recorded: Mapping[str, Any], stream: bool
) -> None:
    seed = 5000 + CASES.index((dict(recorded), stream))
    streamed = {"stream": True} if stream else {}
    one = Trajectory(recorded, f"e{seed}", 0, seed)
    _, body, _ = one.request()
    sampling = body.get("sampling_params")
    if recorded["raw"] == "model":
        evaluation: dict[str, Any] = {"model": "tiny:raw"}
    elif sampling is None:
        evaluation = {"temperature": 0.0}
    else:
        evaluation = {"sampling_params": sampling | {"temperature": 0.0}}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        before = server.metric("darts_groups_total")
        answer = await send(client, one, GROUP, **evaluation, **streamed)
        assert GROUP_ID not in answer.headers
        assert server.metric("darts_groups_total") == before
        raw = read_fields(answer)

        single = [Trajectory(recorded, f"f{seed}", rep, seed) for rep in range(SIZE)]
        answers = await asyncio.gather(*(send(client, each, GROUP, **streamed) for each in single))
        assert [read_fields(each) for each in answers] == [raw] * SIZE
        assert server.metric("darts_groups_total") == before + 1
        if recorded["path"] not in ("/v1/responses", "/v1/messages"):  # they have no n
            whole = {"n": SIZE} if sampling is None else {"sampling_params": sampling | {"n": SIZE}}
            answer = await send(client, Trajectory(recorded, f"w{seed}", 0, seed + 100), {}, **whole, **streamed)
            assert answer.headers.get(GROUP_ID)
            assert read_fields(answer) == raw
            off = await send(client, Trajectory(recorded, f"o{seed}", 0, seed + 200), RAW, **whole, **streamed)
            assert GROUP_ID not in off.headers
            assert read_fields(off) == raw
