"""SkyRL's inference client: sessions `UID_REP`, two turns, and its pause around new weights."""

from typing import Any

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    PauseMode,
    RemoteInferenceClient,
)

from tests.trainers.programs.steps import PROMPTS, SIZE, Trainer, main

SAMPLING = {"max_tokens": 24, "temperature": 1.0, "logprobs": 1}


class SkyRl(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client = RemoteInferenceClient(url, [url], data_parallel_size=1, model_name="tiny")

    async def rollout(self, step: int) -> None:
        prompts = [prompt for prompt in PROMPTS[step] for _ in range(SIZE)]
        sessions = [f"{step}{uid}_{rep}" for uid in range(len(PROMPTS[step])) for rep in range(SIZE)]
        for _ in range(2):
            answers = await self._sample(prompts, SAMPLING, sessions)
            prompts = [[*p, *ids, 7, 8] for p, ids in zip(prompts, answers, strict=True)]
        for session in sessions:
            await self._client.finish_session(session)

    async def evaluate(self) -> None:
        prompts = PROMPTS[0]
        sessions = [f"evaluation{number}_0" for number in range(len(prompts))]
        await self._sample(prompts, SAMPLING | {"temperature": 0.0}, sessions)

    async def _sample(self, prompts: list[list[int]], sampling: dict[str, Any], sessions: list[str]) -> list[list[int]]:
        batch = {"prompt_token_ids": prompts, "sampling_params": sampling, "session_ids": sessions}
        answer = await self._client.generate(batch)
        pairs = zip(answer["response_ids"], answer["response_logprobs"], strict=True)
        assert all(len(ids) == len(logprobs) > 0 for ids, logprobs in pairs)
        ids: list[list[int]] = answer["response_ids"]
        return ids

    async def update(self, folder: str, version: int) -> None:
        await self._client.pause(mode=PauseMode.KEEP)
        await self._client.resume()
        await super().update(folder, version)

    async def close(self) -> None:
        await self._client.teardown()


if __name__ == "__main__":
    main(SkyRl)
