"""The example `skyrl_sessions`: SkyRL's generator runs a group by itself, and returns the selected trajectories."""

import asyncio
import json
import random

import skyrl_gym
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from transformers import AutoTokenizer

from darts_server.offline.demo.server import MODEL
from examples import skyrl_sessions
from tests.trainers.harnesses.group import FINAL_SHARE, MAX_TOKENS, PROMPT, SIZE, TURNS, parse_args
from tests.trainers.harnesses.skyrl import SAMPLING, Calculator


class Guess(Calculator):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        output = super().step(action)
        if random.random() < FINAL_SHARE:
            output["done"] = True
        return output


async def main() -> None:
    url = parse_args().url
    skyrl_gym.register("calculator", entry_point=Guess)
    skyrl_sessions.EXTRA = len(TURNS) - SIZE
    client = skyrl_sessions.SessionClient(url, [url], data_parallel_size=1, model_name="tiny")
    config = GeneratorConfig(batched=False, use_conversation_multi_turn=True, max_input_length=300)
    config.sampling_params.max_generate_length = MAX_TOKENS
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    generator = skyrl_sessions.SessionGenerator(config, SkyRLGymConfig(max_env_workers=8), client, tokenizer)
    batch = {
        "prompts": [[{"role": "user", "content": PROMPT}]] * SIZE,
        "env_classes": ["calculator"] * SIZE,
        "env_extras": [{"turns": max(TURNS)}] * SIZE,
        "sampling_params": SAMPLING,
        "trajectory_ids": [TrajectoryID("a problem", number) for number in range(SIZE)],
    }
    output = await generator.generate(batch)
    masks = output["loss_masks"]
    assert len(output["rewards"]) == len(output["response_ids"]) == len(masks)
    print(json.dumps({"trajectories": len(masks), "trained": [sum(mask) for mask in masks]}))
    await client.teardown()


if __name__ == "__main__":
    asyncio.run(main())
