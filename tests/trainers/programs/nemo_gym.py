"""NeMo-Gym's model server, which its agents' turns go through, over two turns of the Responses API."""

import asyncio
from typing import Any

from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import GlobalAIOHTTPAsyncClientConfig, ServerClient, set_global_aiohttp_client
from responses_api_models.openai_model.app import SimpleModelServer, SimpleModelServerConfig

from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main


class NemoGym(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        # Its servers do this when they start.
        self._session = set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
        self._servers = {name: self._server(name) for name in ("tiny", "tiny:raw")}

    def _server(self, name: str) -> SimpleModelServer:
        config = SimpleModelServerConfig(
            host="127.0.0.1",
            port=0,
            entrypoint="",
            name="policy",
            openai_base_url=f"{self.url}/v1",
            openai_api_key="none",
            openai_model=name,
        )
        return SimpleModelServer(config=config, server_client=ServerClient.model_construct())

    async def rollout(self, step: int) -> None:
        await asyncio.gather(*(self._trajectory("tiny", text) for text in TEXTS[step] for _ in range(SIZE)))

    async def evaluate(self) -> None:
        await asyncio.gather(*(self._trajectory("tiny:raw", text) for text in TEXTS[0] for _ in range(SIZE)))

    async def _trajectory(self, name: str, text: str) -> None:
        items: list[Any] = []
        for content in (text, f"{text[0]}a+1b>"):
            items.append({"role": "user", "content": content})
            body = NeMoGymResponseCreateParamsNonStreaming(input=items, max_output_tokens=24, temperature=1.0)
            answer = await self._servers[name].responses(body)
            items += [item.model_dump() for item in answer.output]

    async def close(self) -> None:
        await self._session.close()


if __name__ == "__main__":
    main(NemoGym)
