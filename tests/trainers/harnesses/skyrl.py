"""SkyRL's gym loop, with a client that sends the session's id in place of SkyRL's own name of the trajectory."""

import asyncio
from typing import Any

import skyrl_gym
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer

from darts_server.offline.demo.server import MODEL
from tests.trainers.harnesses.group import MAX_TOKENS, PROMPT, Session, calculate, parse_args, run

SAMPLING = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "logprobs": 1}


class Calculator(BaseTextEnv):
    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.max_turns = extras["turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        result = [{"role": "user", "content": calculate(action)}]
        return BaseTextEnvStepOutput(
            observations=result,
            reward=1.0,
            done=self.turns >= self.max_turns,
            metadata={},
            postprocessed_action=None,
        )


class SessionClient(RemoteInferenceClient):
    sessions: dict[str, str]
    """Id of the server's session, by SkyRL's name of the trajectory."""

    async def _generate_single(self, **request: Any) -> dict[str, Any]:
        request["session_id"] = self.sessions[request["session_id"]]
        answer: dict[str, Any] = await super()._generate_single(**request)
        return answer


async def main() -> None:
    args = parse_args()
    skyrl_gym.register("calculator", entry_point=Calculator)
    client = SessionClient(args.url, [args.url], data_parallel_size=1, model_name="tiny")
    client.sessions = {}
    config = GeneratorConfig(batched=False, use_conversation_multi_turn=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=8), client, tokenizer)

    async def run_loop(session: Session, turns: int) -> None:
        trajectory = TrajectoryID(instance_id="calculator", repetition_id=session["index"])
        client.sessions[f"calculator_{session['index']}"] = session["id"]
        prompt = [{"role": "user", "content": PROMPT}]
        extras = {"turns": turns}
        await generator.agent_loop(prompt, "calculator", extras, MAX_TOKENS, 300, SAMPLING, trajectory_id=trajectory)

    await run(run_loop, args)
    await client.teardown()


if __name__ == "__main__":
    asyncio.run(main())
