"""Verifiers behind a URL, by the protocols of three trainers.

* OpenRLHF (``--reward.remote_url``): ``{"query", "prompts", "labels"}``, lists of the same length, is answered by
  ``{"rewards"}``. A query is the prompt with the answer.
* NeMo-Gym (``/verify`` of a resources server): a row of the data set with ``response``, a response of OpenAI's
  Responses API, is answered by ``{"reward"}``.
* slime (``--rm-url``): ``{"prompt", "response", "label"}`` is answered by a number, or a dictionary with a number.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from darts_server.types import VerifierResult
from darts_server.verify.batcher import BatchLimits, Runner
from darts_server.verify.calls import Call, decode_columns, interpret_returned
from darts_server.verify.specs import Kind
from darts_server.verify.types import Answer

OPENRLHF_ANSWERS = 64
RETRY_SECONDS = (0.2, 1.0, 3.0)
"""Pauses before a request is sent again."""
RETRIED = frozenset({429, 500, 502, 503, 504})
"""Statuses of servers that are busy, or that fail for a moment."""
MAX_BYTES = 1 << 24
"""Largest accepted answer of a server: a quarter of a megabyte for each of 64 rewards."""
SHOWN_BYTES = 200
HEADERS = {"Content-Type": "application/json"}


class Refused(Exception):
    """The server answered with an error, or with nonsense."""


class Connection(Runner):
    """A runner that sends one request at a time. ``timeout``: seconds of a request with its repetitions."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        kind: Kind,
        url: str,
        timeout: float,
    ) -> None:
        if kind is Kind.OPENRLHF:
            self.limits = BatchLimits(OPENRLHF_ANSWERS, timeout / 2, shared=False)
        self._client = client
        self._kind = kind
        self._url = url
        self._timeout = timeout

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, answers: Sequence[Answer]) -> Sequence[Call | None]:
        try:
            async with asyncio.timeout(self._timeout):
                returned = await self._post(answers)
        except TimeoutError:
            failure = Call(VerifierResult.TIMEOUT, detail=f"took longer than {self._timeout:g} seconds")
        except httpx.HTTPError as error:
            failure = Call(VerifierResult.UNREACHABLE, detail=f"cannot be reached: {type(error).__name__} {error}")
            return [failure] * len(answers)
        except Refused as error:
            failure = Call(VerifierResult.ERROR, detail=str(error))
        else:
            rewards = [returned]
            if self._kind is Kind.OPENRLHF:
                rewards = _find_rewards(returned)
            if len(rewards) == len(answers):
                return list(map(interpret_returned, rewards))
            detail = f"returned {len(rewards)} rewards for {len(answers)} answers"
            failure = Call(VerifierResult.INVALID, detail=detail)
        # An answer that the server cannot bear must not cost the other answers their rewards.
        return [failure] if len(answers) == 1 else [None] * len(answers)

    async def _post(self, answers: Sequence[Answer]) -> Any:
        """Send a request, with retries, and return the decoded answer.

        Raises:
            Refused, httpx.HTTPError
        """
        try:
            # Long texts would delay the event loop.
            body = await asyncio.to_thread(_encode_request, self._kind, answers)
        except (UnicodeEncodeError, RecursionError) as error:
            raise Refused(f"cannot get the answer: {error}") from error
        # None stands for the last attempt.
        for pause in (*RETRY_SECONDS, None):
            try:
                async with self._client.stream(
                    "POST",
                    self._url,
                    content=body,
                    headers=HEADERS,
                ) as response:
                    content = await _read_limited(response)
                if response.status_code not in RETRIED or pause is None:
                    break
            except httpx.HTTPError:
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        shown = content[:SHOWN_BYTES].decode(errors="replace")
        if not response.is_success:
            raise Refused(f"answered with status {response.status_code}: {shown}")
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(f"did not answer with JSON: {shown}") from error


async def _read_limited(response: httpx.Response) -> bytes:
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_BYTES:
            raise Refused(f"answered with more than {MAX_BYTES} bytes")
    return bytes(content)


def _find_rewards(returned: Any) -> list[object]:
    rewards = returned.get("rewards") if isinstance(returned, Mapping) else None
    return rewards if isinstance(rewards, list) else []


def _encode_request(kind: Kind, answers: Sequence[Answer]) -> bytes:
    rows = [decode_columns(answer.prompt.metadata) for answer in answers]
    labels = [_find_label(row) for row in rows]
    if kind is Kind.OPENRLHF:
        prompts = [_prompt_text(answer, row) for answer, row in zip(answers, rows, strict=True)]
        queries = [prompt + answer.text for prompt, answer in zip(prompts, answers, strict=True)]
        return msgspec.json.encode({"query": queries, "prompts": prompts, "labels": labels})

    # Only OpenRLHF's requests have several answers.
    [answer] = answers
    prompt = _decode_messages(answer) or _prompt_text(answer, rows[0])
    if kind is Kind.SLIME:
        return msgspec.json.encode({"prompt": prompt, "response": answer.text, "label": labels[0]})
    nemo_gym_row = {"responses_create_params": {"input": prompt}, **rows[0]}
    return msgspec.json.encode({**nemo_gym_row, "response": _build_openai_response(answer)})


def _build_openai_response(answer: Answer) -> dict[str, object]:
    content = {"type": "output_text", "text": answer.text, "annotations": []}
    message = {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [content]}
    return {
        "id": "resp",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def _find_label(columns: Mapping[str, Any]) -> object:
    return next((columns[name] for name in ("label", "answer", "ground_truth") if name in columns), None)


def _decode_messages(answer: Answer) -> Any:
    return None if answer.prompt.messages is None else msgspec.json.decode(answer.prompt.messages)


def _prompt_text(answer: Answer, columns: Mapping[str, Any]) -> str:
    messages = _decode_messages(answer)
    if messages is None:
        # A prompt of token ids may have its text in a column.
        return answer.prompt.text or str(columns.get("prompt", ""))
    contents = [message.get("content") for message in messages]
    return "\n".join(content for content in contents if isinstance(content, str))
