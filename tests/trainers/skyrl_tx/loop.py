"""A loop of reinforcement learning on the tiny task, with Tinker's own client: each step samples from a new adapter.

    python -m tests.trainers.skyrl_tx.loop URL MODEL STEPS HELD_OUT

runs in the trainer's environment, and prints a line of JSON for each step. HELD_OUT problems are sampled before the
first step and after the last, each by a request of its own, which is never shaped.
"""

import json
import sys
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

import tinker
from tinker.types import AdamParams, Datum, ModelInput, SamplingParams, TensorData

from darts_server.offline.demo.problems import Problem, reward, sample_problem
from tests.trainers.skyrl_tx.train import PROMPTS, RANK, SIZE

MAX_TOKENS = 128
LEARNING_RATE = 2e-3
HELD_OUT_SEED = 20_240
SECONDS = 600
"""For one answer. SkyRL may lose answers: it drops them if its connections to its database are busy for 30 s."""
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)


class Policy:
    """The model with its adapter, in Tinker's server."""

    def __init__(self, url: str, model: str) -> None:
        # Tinker's client accepts keys of this form only. SkyRL's server does not read the key.
        service = tinker.ServiceClient(base_url=url, api_key="tml-none")
        self._training = service.create_lora_training_client(base_model=model, rank=RANK, seed=0)
        self._tokenizer = self._training.get_tokenizer()
        self._sampler: Any = None

    def save(self) -> None:
        """Save the adapter for the sampler. The first answer brings it to the server that samples."""
        self._sampler = self._training.save_weights_and_get_sampling_client()
        # SkyRL unpacks an adapter when a request first names it. If several requests do so at the same time, some fail.
        self._sampler.sample(ModelInput.from_ints([3]), 1, SamplingParams(max_tokens=1)).result(SECONDS)

    def sample(self, problems: Sequence[Problem], size: int) -> list[list[Any]]:
        """Sample ``size`` answers to each problem, `PROMPTS` problems at the same time."""
        answers = []
        for start in range(0, len(problems), PROMPTS):
            prompts = [self._tokenizer.encode(problem.prompt) for problem in problems[start : start + PROMPTS]]
            futures = [self._sampler.sample(ModelInput.from_ints(prompt), size, SAMPLING) for prompt in prompts]
            answers += [future.result(SECONDS).sequences for future in futures]
        return answers

    def score(self, problem: Problem, answer: Any) -> float:
        return reward(problem, self._tokenizer.decode(answer.tokens, skip_special_tokens=True))

    def train(self, problems: Sequence[Problem], groups: Sequence[Sequence[Any]]) -> dict[str, float]:
        """Make one step on groups of answers; return what is known of the step."""
        data = []
        rewards = []
        for problem, group in zip(problems, groups, strict=True):
            prompt = self._tokenizer.encode(problem.prompt)
            scores = [self.score(problem, answer) for answer in group]
            data += [datum(prompt, answer, score - fmean(scores)) for answer, score in zip(group, scores, strict=True)]
            rewards += scores
        forward = self._training.forward_backward(data, "importance_sampling")
        update = self._training.optim_step(AdamParams(learning_rate=LEARNING_RATE))

        answers = [answer for group in groups for answer in group]
        gaps = []
        for answer, output in zip(answers, forward.result().loss_fn_outputs, strict=True):
            logprobs = output["logprobs"].tolist()[-len(answer.tokens) :]
            gaps += [abs(ours - theirs) for ours, theirs in zip(answer.logprobs, logprobs, strict=True)]
        return {
            "reward": fmean(rewards),
            "length": fmean(len(answer.tokens) for answer in answers),
            "gap": max(gaps),
            "gradient": update.result().metrics["skyrl.ai/grad_norm"],
        }


def datum(prompt: list[int], answer: Any, advantage: float) -> Datum:
    """Return a trajectory to train on. Tokens of the prompt have no advantage."""
    tokens = [*prompt, *answer.tokens]
    before = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(tokens[1:], "int64"),
            "logprobs": TensorData([*before, *answer.logprobs], "float32"),
            "advantages": TensorData([*before, *[advantage] * len(answer.tokens)], "float32"),
        },
    )


def main(url: str, model: str, steps: int, held_out: int) -> None:
    policy = Policy(url, model)
    random = Random(HELD_OUT_SEED)
    unseen = [sample_problem(random) for _ in range(held_out)]

    def report(step: int, **values: float) -> None:
        print(json.dumps({"step": step, **values}), flush=True)

    def evaluate(step: int) -> None:
        policy.save()
        answers = policy.sample(unseen, 1)
        right = [policy.score(problem, answer) for problem, [answer] in zip(unseen, answers, strict=True)]
        report(step, held_out=fmean(right))

    evaluate(0)
    random = Random(0)
    for step in range(1, steps + 1):
        policy.save()
        problems = [sample_problem(random) for _ in range(PROMPTS)]
        report(step, **policy.train(problems, policy.sample(problems, SIZE)))
    evaluate(steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
