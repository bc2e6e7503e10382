"""verifiers' clients: the one that relays chats, with a session for each trajectory."""

import asyncio
import uuid
from typing import Any

from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main


class Verifiers(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client = EvalClient(EvalClientConfig(base_url=f"{url}/v1", api_key_var="NONE"))
        raw = {"X-Darts-Policy": "off"}
        self._raw = EvalClient(EvalClientConfig(base_url=f"{url}/v1", api_key_var="NONE", headers=raw))

    async def rollout(self, step: int) -> None:
        await asyncio.gather(*(self._trajectory(self._client, text) for text in TEXTS[step] for _ in range(SIZE)))

    async def evaluate(self) -> None:
        await asyncio.gather(*(self._trajectory(self._raw, text) for text in TEXTS[0] for _ in range(SIZE)))

    async def _trajectory(self, client: EvalClient, text: str) -> None:
        session, messages = uuid.uuid4().hex, list[dict[str, Any]]()
        for content in (text, f"{text[0]}a+1b>"):
            messages.append({"role": "user", "content": content})
            body = {"model": "tiny", "messages": messages, "max_completion_tokens": 24, "temperature": 1.0}
            answer = await client.get_response(ChatDialect(), body, SamplingConfig(), session_id=session)
            messages.append({"role": "assistant", "content": answer.message.content})


if __name__ == "__main__":
    main(Verifiers)
