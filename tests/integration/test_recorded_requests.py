"""The requests of each trainer, as recorded in `tests/trainers/requests.json`, over two steps and two turns."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from darts_server.demo.server import Server
from tests.integration.weights import ORIGINAL, put, status

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
SIZE = 4
GROUP = {"X-Darts-Group": f"size={SIZE}"}
RAW = {"X-Darts-Policy": "off"}
GROUP_ID = "X-Darts-Group-Id"
RECORDED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "trainers" / "requests.json").read_text(encoding="utf-8")
)
TRAINERS = [each["trainer"] for each in RECORDED]
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


@dataclass
class Trajectory:
    """A trajectory of one trainer, of the group ``uid``, whose prompt is made from ``seed``."""

    recorded: Mapping[str, Any]
    uid: str
    rep: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = Random(self.seed)
        self.tokens = [random.randint(3, 12) for _ in range(12)]
        self.messages = [{"role": "user", "content": f"{self.seed % 10}a-{'b+'.join(map(str, self.tokens))}>"}]

    def request(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        names = {"MODEL": "tiny", "SEED": Random(f"{self.uid}{self.rep}").getrandbits(62)}
        names |= {"UID_REP": f"{self.uid}_{self.rep}", "SESSION": f"session-{self.uid}-{self.rep}"}
        body = {name: _filled(value, names) for name, value in self.recorded["body"].items()}
        headers = {name: _filled(value, names) for name, value in self.recorded["headers"].items()}
        prompt = self.recorded["prompt"]
        if prompt in ("messages", "input"):
            return self.recorded["path"], body | {prompt: self.messages}, headers
        return self.recorded["path"], body | {"prompt" if prompt == "tokens" else prompt: self.tokens}, headers

    def extend(self, answer: Mapping[str, Any]) -> None:
        """Add an answer and what the environment says to it."""
        number = f"{len(self.messages)}a+{self.rep}b>"
        self.messages += [{"role": "assistant", "content": _text(answer)}, {"role": "user", "content": number}]
        self.tokens = [*self.tokens, *_tokens(answer), 5, 6 + self.rep]


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    return names.get(value, value) if isinstance(value, str) else value


def _text(answer: Mapping[str, Any]) -> str:
    if "output" in answer:  # the Responses API
        return "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())
    [choice] = answer["choices"]
    return str((choice.get("message") or {}).get("content") or "")


def _tokens(answer: Mapping[str, Any]) -> list[int]:
    [choice] = answer.get("choices") or [{}]
    if (tokens := choice.get("token_ids")) is not None:
        return list(tokens)
    names = (choice.get("logprobs") or {}).get("tokens") or ()
    return [int(name.removeprefix("token_id:")) for name in names]


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


async def two_turns(client: httpx.AsyncClient, recorded: Mapping[str, Any], step: int) -> str:
    """Send a group's trajectories; return the group's id."""
    number = TRAINERS.index(recorded["trainer"])
    trajectories = [Trajectory(recorded, f"r{number}s{step}", rep, 1000 * step + number) for rep in range(SIZE)]
    first = await asyncio.gather(*(send(client, each, GROUP) for each in trajectories))
    ids = {answer.headers.get(GROUP_ID) for answer in first}
    assert len(ids) == 1, (recorded["trainer"], ids)
    assert None not in ids, recorded["trainer"]
    for trajectory, answer in zip(trajectories, first, strict=True):
        trajectory.extend(answer.json())
    later = await asyncio.gather(*(send(client, each, GROUP) for each in trajectories))
    assert {answer.headers.get(GROUP_ID) for answer in later} == {None}, recorded["trainer"]
    return str(ids.pop())


@pytest.mark.nightly
async def test_two_steps_of_every_trainer_have_its_groups_under_the_weights_of_their_step(server: Server) -> None:
    versions, groups = list[int](), list[list[str]]()
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        for step in range(2):
            if step:
                answer = await asyncio.to_thread(put, server, ORIGINAL)  # the same: other tests sample too
                assert answer.status_code == 200, answer.text
            versions.append(status(server)["version"])
            before = server.metric("darts_groups_total")
            groups.append(await asyncio.gather(*(two_turns(client, each, step) for each in RECORDED)))
            assert server.metric("darts_groups_total") == before + len(RECORDED)
        assert versions[1] == versions[0] + 1
        for version, ids in zip(versions, groups, strict=True):
            for group_id in ids:
                [group] = (await client.get(f"/darts/v1/groups/{group_id}")).json()["groups"]
                selected = [each for each in group["candidates"] if each["selected_as"]]
                assert (group["group_size"], len(selected)) == (SIZE, SIZE)
                seen = {each[name] for each in selected for name in ("weight_version_start", "weight_version_end")}
                assert seen == {version}


@pytest.mark.parametrize(
    ("recorded", "stream"),
    [pytest.param(*case, marks=[pytest.mark.nightly] * case[1]) for case in CASES],
    ids=[f"{each['trainer']}{', streamed' * stream}" for each, stream in CASES],
)
async def test_a_trainers_evaluation_is_raw_and_its_answers_have_the_same_fields(
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
        if recorded["path"] not in ("/v1/responses", "/v1/messages"):  # they have no n
            whole = {"n": SIZE} if sampling is None else {"sampling_params": sampling | {"n": SIZE}}
            answer = await send(client, Trajectory(recorded, f"w{seed}", 0, seed + 100), {}, **whole, **streamed)
            assert answer.headers.get(GROUP_ID)
            assert read_fields(answer) == raw
            off = await send(client, Trajectory(recorded, f"o{seed}", 0, seed + 200), RAW, **whole, **streamed)
            assert GROUP_ID not in off.headers
            assert read_fields(off) == raw
