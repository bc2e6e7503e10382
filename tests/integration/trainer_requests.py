"""Requests as trainers send them for one turn of a trajectory: recorded forms, with prompts and limits of the tests.

Every trajectory is a request of its own with n = 1, and so is each of its turns.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from httpx import Response

TOKENS = 24
"""Of an answer, at most."""


@dataclass
class Trajectory:
    """A trajectory as its trainer keeps it, of the group ``uid``."""

    uid: str
    rep: int
    prompt: str
    token_ids: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.uid}_{self.rep}"


Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def text_chat(trajectory: Trajectory) -> Request:
    """Answers are kept as messages: verifiers without a session, ART 0.5.23, rLLM 0.3.0."""
    body = {
        "model": "tiny",
        "messages": trajectory.messages,
        "max_completion_tokens": TOKENS,
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
    }
    return "v1/chat/completions", body, {}


def parts_chat(trajectory: Trajectory) -> Request:
    """The same with contents as lists of parts: clients that also send images."""
    path, body, headers = text_chat(trajectory)
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in trajectory.messages]
    return path, body | {"messages": parts}, headers


def tokens_route(trajectory: Trajectory) -> Request:
    """SkyRL main, prime-rl: token ids to the token route."""
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    return "inference/v1/generate", {"token_ids": trajectory.token_ids, "sampling_params": sampling}, {}


def completions(trajectory: Trajectory) -> Request:
    """AReaL 1.0.4, TRL 1.16's asynchronous trainer: token ids to completions."""
    body = {
        "model": "tiny",
        "prompt": trajectory.token_ids,
        "n": 1,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }
    return "v1/completions", body, {}


def streamed_completions(trajectory: Trajectory) -> Request:
    path, body, headers = completions(trajectory)
    return path, body | {"stream": True}, headers


def own_session(trajectory: Trajectory) -> Request:
    """Our own option, for trainers whose sampling parameters pass through. The prompt is rewritten each turn."""
    path, body, headers = completions(trajectory)
    ids = trajectory.token_ids[-12:]
    return path, body | {"prompt": ids, "vllm_xargs": {"darts_session": trajectory.name}}, headers


FORMS: Mapping[str, Callable[[Trajectory], Request]] = {
    form.__name__: form for form in (parts_chat, streamed_completions, own_session)
}
"""Those that `tests/trainers/requests.json` has not."""


def read_answer(response: Response) -> tuple[list[int], str]:
    """Token ids and text of an answer's only choice; whichever the route returns."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        return [token for c in choices for token in c["token_ids"] or ()], "".join(c["text"] for c in choices)
    [choice] = response.json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice.get("text", "")
    return choice.get("token_ids") or [], text or ""
