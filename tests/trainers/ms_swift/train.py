"""ms-swift's own GRPO of the tiny model on a CPU, with the rollouts of a darts-server.

    python -m tests.trainers.ms_swift.train URL FOLDER STEPS [ARGUMENT...]

runs in the trainer's environment. ARGUMENT: of `swift rlhf`. FOLDER/out/logging.jsonl gets the metrics,
a line for each step.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import swift.rlhf_trainers
from swift.pipelines import rlhf_main
from swift.rewards import ORM, orms

from darts_server.offline.demo.problems import reward, sample_problem
from darts_server.offline.demo.server import MODEL
from tests.trainers.ms_swift.client import DartsClient

PROMPTS = 8
"""Prompts of a step."""
SIZE = 8
"""Trajectories of a prompt."""
_rng = Random(0)
PROBLEMS = [sample_problem(_rng) for _ in range(512)]


class Right(ORM):
    """The reward of the tiny task. ``number``: a column of the data, the problem."""

    def __call__(self, completions: Sequence[str], number: Sequence[int], **columns: Any) -> list[float]:
        del columns
        return [reward(PROBLEMS[each], text) for each, text in zip(number, completions, strict=True)]


def arguments(url: str, folder: Path, steps: int) -> list[str]:
    rows = [
        {"messages": [{"role": "user", "content": problem.prompt}], "number": number}
        for number, problem in enumerate(PROBLEMS)
    ]
    data = folder / "problems.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {
        "rlhf_type": "grpo",
        "model": MODEL,
        "model_type": "qwen3",
        # Text without the tokens of a chat.
        "template": "dummy",
        "dataset": data,
        "reward_funcs": "right",
        "use_hf": "true",
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        # Tensors are sent by name, so `DartsClient` needs nothing for buckets of them.
        "enable_flattened_weight_sync": "false",
        # Metrics then have the difference between the log-probs of the server and of the trainer.
        "rollout_importance_sampling_mode": "token_truncate",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": "false",
        "attn_impl": "eager",
        "temperature": "1.0",
        "top_p": "1.0",
        "top_k": "-1",
        "max_completion_length": "128",
        "max_length": "64",
        "per_device_train_batch_size": PROMPTS * SIZE,
        "num_generations": SIZE,
        "beta": "0.0",
        "learning_rate": "2e-4",
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "logging_steps": "1",
        "save_strategy": "no",
        "report_to": "none",
        "dataloader_num_workers": "0",
        "add_version": "false",
        "output_dir": folder / "out",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


if __name__ == "__main__":
    url, folder, steps, *more = sys.argv[1:]
    orms["right"] = Right
    # ms-swift connects before it imports `--external_plugins`, so a plugin would replace its client too late.
    swift.rlhf_trainers.VLLMClient = DartsClient
    rlhf_main([*arguments(url, Path(folder), int(steps)), *more])
