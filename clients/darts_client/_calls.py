"""Requests that have one answer: what is sent, and what is made of it."""

from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import RootModel

from ._knowledge import GroupRecord, PromptRecord, WeightsRecord
from ._models import Group
from ._requests import CompletionRequest
from ._responses import parse_groups, parse_models
from ._rewards import Reward, RewardCounts, reward_body
from ._votes import Vote, parse_vote
from ._wire import Wire, WireT, parsed

API = "/darts/v1"
ROLLOUTS = f"{API}/rollouts"
Rule = Literal["finish", "keep", "restart"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and how its answer is read.

    `idempotent`: to send it twice does what it does once. `options` are httpx's.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    idempotent: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


class _Groups(Wire):
    groups: list[GroupRecord]


class _Restored(Wire):
    prompts: int


class _Cancelled(Wire):
    cancelled: bool


class _Object(RootModel[dict[str, Any]]):
    pass


def models() -> Call[list[str]]:
    return Call("GET", "/v1/models", parse_models)


def completions(request: CompletionRequest) -> Call[list[Group]]:
    options = {"json": request.body, "headers": request.headers}
    return Call("POST", "/v1/completions", lambda answer: parse_groups(request, answer), False, options)


def cancel(batch_id: str) -> Call[bool]:
    return Call("DELETE", batch_path(batch_id), lambda answer: _read(_Cancelled, answer).cancelled)


def group(group_id: str) -> Call[list[GroupRecord]]:
    return Call("GET", f"{API}/groups/{_escaped(group_id)}", lambda answer: _read(_Groups, answer).groups)


def prompt(key: str) -> Call[PromptRecord]:
    return Call("GET", f"{API}/prompts/{_escaped(key)}", lambda answer: _read(PromptRecord, answer))


def rewards(some: Sequence[Reward]) -> Call[RewardCounts]:
    # A reward that is told twice counts once, so this may be sent again.
    options = {"json": reward_body(some)}
    return Call("POST", f"{API}/rewards", lambda answer: _read(RewardCounts, answer), True, options)


def vote(body: dict[str, Any]) -> Call[Vote]:
    return Call("POST", f"{API}/vote", lambda answer: parse_vote(body, answer), False, {"json": body})


def policy() -> Call[dict[str, Any]]:
    return Call("GET", f"{API}/policy", _settings)


def change_policy(settings: Mapping[str, Any]) -> Call[dict[str, Any]]:
    return Call("PATCH", f"{API}/policy", _settings, True, {"json": dict(settings)})


def save_state() -> Call[bytes]:
    return Call("GET", f"{API}/state", lambda answer: answer.content)


def load_state(data: bytes) -> Call[int]:
    return Call("PUT", f"{API}/state", lambda answer: _read(_Restored, answer).prompts, True, {"content": data})


def weights() -> Call[WeightsRecord]:
    return Call("GET", f"{API}/weights", _weights)


def push_weights(
    content: Iterable[bytes] | AsyncIterable[bytes], size: int, rule: Rule | None, version: int | None, partial: bool
) -> Call[WeightsRecord]:
    # The size is told so that the server can refuse what is too large before it comes.
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    options = {"content": content, "headers": headers, "params": _update(rule, version, partial)}
    return Call("PUT", f"{API}/weights", _weights, False, options)


def push_lora(
    name: str,
    config: str,
    content: Iterable[bytes] | AsyncIterable[bytes],
    size: int,
    rule: Rule | None,
    version: int | None,
) -> Call[WeightsRecord]:
    headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
    params = {"config": config} | _update(rule, version)
    options = {"content": content, "headers": headers, "params": params}
    return Call("PUT", _lora_path(name), _weights, False, options)


def load_lora(name: str, path: str, rule: Rule | None, version: int | None) -> Call[WeightsRecord]:
    options = {"json": {"path": path} | _update(rule, version)}
    return Call("POST", _lora_path(name), _weights, False, options)


def remove_lora(name: str) -> Call[WeightsRecord]:
    return Call("DELETE", _lora_path(name), _weights, False)


def load_weights(
    where: Literal["path", "url"], name: str, rule: Rule | None, version: int | None, partial: bool
) -> Call[WeightsRecord]:
    options = {"json": {where: name} | _update(rule, version, partial)}
    return Call("POST", f"{API}/weights", _weights, False, options)


def batch_path(batch_id: str) -> str:
    return f"{ROLLOUTS}/{_escaped(batch_id)}"


def _lora_path(name: str) -> str:
    return f"{API}/weights/lora/{_escaped(name)}"


def _settings(answer: httpx.Response) -> dict[str, Any]:
    return _read(_Object, answer).root


def _weights(answer: httpx.Response) -> WeightsRecord:
    return _read(WeightsRecord, answer)


def _update(rule: Rule | None, version: int | None, partial: bool | None = None) -> dict[str, Any]:
    wish = {"rule": rule, "version": version, "partial": partial}
    return {name: value for name, value in wish.items() if value is not None}


def _read(kind: type[WireT], answer: httpx.Response) -> WireT:
    return parsed(kind, answer.content, answer.url.path)


def _escaped(name: str) -> str:
    """One segment of a path; dots too, since `..` would climb out of it.

    >>> _escaped("../a b")
    '%2E%2E%2Fa%20b'
    """
    return quote(name, safe="").replace(".", "%2E")
