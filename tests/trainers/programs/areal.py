"""AReaL's client of vLLM servers: two turns of each trajectory, and weights from disk."""

import asyncio
import tempfile
import time
from typing import Any

from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names

from tests.trainers.programs.steps import PROMPTS, SIZE, Trainer, main


class Areal(Trainer):
    def __init__(self, url: str) -> None:
        name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=tempfile.mkdtemp()))
        config = InferenceEngineConfig(
            experiment_name="tests", trial_name="areal", backend="vllm:d1", max_concurrent_rollouts=64
        )
        self._engine = RemotevLLMEngine(config)
        self._engine.initialize(addr=url.removeprefix("http://"), train_data_parallel_size=1)

    async def rollout(self, step: int) -> None:
        await asyncio.gather(*(self._trajectory(prompt) for prompt in PROMPTS[step] for _ in range(SIZE)))

    async def evaluate(self) -> None:
        await asyncio.gather(*(self._sample(prompt, greedy=True) for prompt in PROMPTS[0]))

    async def _trajectory(self, prompt: list[int]) -> None:
        first = await self._sample(prompt)
        await self._sample([*prompt, *first.output_tokens, 7, 8])

    async def _sample(self, prompt: list[int], greedy: bool = False) -> Any:
        gconfig = GenerationHyperparameters(max_new_tokens=24, temperature=1.0, greedy=greedy)
        answer = await self._engine.agenerate(ModelRequest(input_ids=prompt, gconfig=gconfig))
        assert len(answer.output_tokens) == len(answer.output_logprobs) > 0
        return answer

    async def update(self, folder: str, version: int) -> None:
        # What AReaL's trainer announces once it has saved a checkpoint.
        saved = names.update_weights_from_disk("tests", "areal", self._engine.get_version())
        name_resolve.add(saved, str(time.time()), keepalive_ttl=120)
        meta = WeightUpdateMeta(type="disk", path=folder, clear_checkpoint_after_load=False, version=version)
        await asyncio.to_thread(self._engine.update_weights_from_disk(meta).result)
        self._engine.set_version(version)

    async def close(self) -> None:
        self._engine.destroy()


if __name__ == "__main__":
    main(Areal)
