"""OpenRLHF's agent executor over two turns, with the engine of our module."""

import asyncio
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from transformers import AutoTokenizer
from vllm import SamplingParams

from darts_client.integrations.openrlhf import served
from darts_server.offline.demo.server import MODEL
from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main


class TwoTurns(AgentInstanceBase):
    def __init__(self, *args: Any, **named: Any) -> None:
        self._turns = 0

    async def step(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        self._turns += 1
        reward = torch.tensor(float(len(state_dict["action_text"])))
        return {"rewards": reward, "environment_feedback": "5a", "done": self._turns == 2}


class Agent(MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(TwoTurns)


class OpenRlhf(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._executor = served(Agent, url)()
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)

    async def rollout(self, step: int) -> None:
        done = await asyncio.gather(*(self._execute(text, 1.0) for text in TEXTS[step] for _ in range(SIZE)))
        turns = [len(each["action_ranges"]) for each in done]
        assert set(turns) <= {1, 2}, turns  # a first answer may leave no room for another turn
        assert 2 in turns
        assert all(len(each["rollout_log_probs"]) == len(each["observation_tokens"]) for each in done)

    async def evaluate(self) -> None:
        await asyncio.gather(*(self._execute(text, 0.0) for text in TEXTS[0]))

    async def _execute(self, text: str, temperature: float) -> dict[str, Any]:
        # OpenRLHF's first limit is what the prompt leaves of `max_length`.
        sampling = SamplingParams(temperature=temperature, max_tokens=24, logprobs=1)
        done: dict[str, Any] = await self._executor.execute(
            prompt=text,
            label="",
            sampling_params=sampling,
            max_length=200,
            hf_tokenizer=self._tokenizer,
            llm_engine=None,
        )
        return done


if __name__ == "__main__":
    main(OpenRlhf)
