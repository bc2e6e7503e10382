"""ART's model and its gathering of trajectories, over two turns."""

from typing import Any

import art

from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main


class Art(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._models = {
            name: art.Model(
                name=name,
                project="tests",
                inference_base_url=f"{url}/v1",
                inference_api_key="none",
                inference_model_name=name,
            )
            for name in ("tiny", "tiny:raw")
        }

    async def rollout(self, step: int) -> None:
        await self._gather("tiny", TEXTS[step])

    async def evaluate(self) -> None:
        await self._gather("tiny:raw", TEXTS[0])

    async def _gather(self, name: str, texts: list[str]) -> None:
        groups = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(self._trajectory(name, text) for _ in range(SIZE)) for text in texts]
        )
        assert [len(group.trajectories) for group in groups] == [SIZE] * len(texts)

    async def _trajectory(self, name: str, text: str) -> Any:
        model = self._models[name]
        client, trajectory = model.openai_client(), art.Trajectory(messages_and_choices=[], reward=0.0)
        for content in (text, f"{text[0]}a+1b>"):
            trajectory.messages_and_choices.append({"role": "user", "content": content})
            answer = await client.chat.completions.create(
                model=model.get_inference_name(),
                messages=trajectory.messages(),
                max_completion_tokens=24,
                logprobs=True,
            )
            trajectory.messages_and_choices.append(answer.choices[0])
        return trajectory


if __name__ == "__main__":
    main(Art)
