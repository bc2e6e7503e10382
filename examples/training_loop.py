r"""A GRPO loop of your own that does not wait for the slowest answers: chats, metadata, rewards, and a push of weights.

    export VLLM_CPU_KVCACHE_SPACE=1  # GiB; by default the CPU build takes most of the memory
    darts-server serve darts_server/offline/demo/model --served-model-name tiny --dtype float32 --enforce-eager \
        --max-model-len 320
    python -m examples.training_loop --url http://127.0.0.1:8000

Each step needs 16 groups. The server runs 24 prompts, returns the first 16 groups that finish, and resumes the other 8
prompts in the next step. The loop needs the client with the extra ``torch``, and transformers.
"""

import argparse
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from darts_client import Client, Group, PromptSpec
from darts_client.tensors import to_tensors
from darts_server.offline.demo.problems import sample_problem

MODEL = "darts_server/offline/demo/model"
NEEDED = 16
"""Groups that a training step uses."""
STARTED = 24
"""Prompts that run at the same time: half as many more."""
GROUP_SIZE = 8
MAX_TOKENS = 256
CLIP = 2.0
"""Maximum of a token's importance ratio. Some tokens were sampled by the weights of earlier steps."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_arguments(argv)
    client = Client(options.url, api_key=options.api_key)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    rng = Random(options.seed)

    waiting = 0
    for step in range(options.steps):
        # Send new prompts beside the prompts that the server resumes. The last step waits for all of its groups.
        if step == options.steps - 1:
            started = NEEDED
            needed = None
        else:
            started = STARTED
            needed = NEEDED
        new = [draw_prompt(rng) for _ in range(started - waiting)]
        batch = client.rollouts(
            new,
            group_size=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            num_groups=needed,
            carry="resume",
            carried=True,
            logprobs=True,
        )
        groups = list(batch)
        waiting = len(batch.unfinished)

        # Score the answers, and report the rewards: the server's statistics and some policies use them.
        rewards = [[score(group, trajectory.text) for trajectory in group.trajectories] for group in groups]
        client.rewards(groups, rewards)

        loss = policy_loss(model, tokenizer, groups, rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # The next step samples with these weights: `push` returns when they are served.
        weights = save({name: tensor.contiguous() for name, tensor in model.named_parameters()})
        version = client.weights.push(weights).version
        right = sum(map(sum, rewards)) / sum(map(len, rewards))
        print(f"step {step}: {len(groups)} groups, {waiting} prompts wait, {right:.0%} right, weights {version}")


def draw_prompt(rng: Random) -> PromptSpec:
    """Return a chat with one problem. The server returns the metadata with the prompt's group, in whatever step."""
    problem = sample_problem(rng)
    chat = [{"role": "user", "content": problem.prompt}]
    return PromptSpec(chat, metadata={"problem": problem.prompt, "answer": problem.answer})


def score(group: Group, text: str) -> float:
    """Return 1 if the text ends with the right answer, and 0 otherwise, also for a truncated answer."""
    assert group.metadata is not None
    return float(text.endswith(f"#{group.metadata['answer']}"))


def policy_loss(
    model: torch.nn.Module,
    tokenizer: Any,
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]],
) -> Tensor:
    """Return GRPO's loss with a truncated importance ratio, which corrects for tokens of older weights."""
    batch = to_tensors(groups, rewards, pad_id=tokenizer.pad_token_id)
    assert batch.logprobs is not None
    assert batch.advantages is not None
    problems = [(group.metadata or {})["problem"] for group in groups for _ in group.trajectories]
    prompts = tokenizer(problems, return_tensors="pt", padding=True, padding_side="left")
    ids = torch.cat([prompts["input_ids"], batch.completion_ids], dim=1)
    mask = torch.cat([prompts["attention_mask"], batch.completion_mask.long()], dim=1)
    logits = model(ids, attention_mask=mask).logits[:, prompts["input_ids"].shape[1] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    # Truncated importance sampling: the ratio is a weight, through which no gradient flows.
    ratio = (logprobs.detach() - batch.logprobs).exp().clamp(max=CLIP)
    loss: Tensor = -(ratio * batch.advantages[:, None] * logprobs)[batch.completion_mask].mean()
    return loss


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny model against a darts-server, with carry-over.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
