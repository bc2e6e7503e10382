"""veRL's single-turn agent loop, with the client of our module."""

import asyncio
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop import AgentLoopManager
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from darts_client.integrations.verl import served
from darts_server.offline.demo.server import MODEL
from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main

CONFIG = {
    "actor_rollout_ref": {
        "rollout": {"prompt_length": 64, "response_length": 24, "full_determinism": False},
        "model": {"path": str(MODEL)},
    },
    "data": {},
}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


class Verl(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        config = OmegaConf.create(CONFIG)
        manager = served(AgentLoopManager, url)(config, None)
        self._wrapped, self._client = DictConfigWrap(config), manager.llm_client
        self._data = DictConfigWrap(config.data)
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)

    async def rollout(self, step: int) -> None:
        outputs = await asyncio.gather(*(self._run(text, SAMPLING) for text in TEXTS[step] for _ in range(SIZE)))
        assert all(len(each.response_logprobs) == len(each.response_ids) > 0 for each in outputs)

    async def evaluate(self) -> None:
        await asyncio.gather(*(self._run(text, SAMPLING | {"temperature": 0}) for text in TEXTS[0]))

    async def _run(self, text: str, sampling: dict[str, Any]) -> Any:
        loop = SingleTurnAgentLoop(
            trainer_config=self._wrapped,
            server_manager=self._client,
            tokenizer=self._tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=self._data,
        )
        return await loop.run(dict(sampling), raw_prompt=[{"role": "user", "content": text}])


if __name__ == "__main__":
    main(Verl)
