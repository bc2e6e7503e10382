"""veRL's own training, `main_ppo`, of the tiny model on a CPU with the backend `darts`.

python -m tests.trainers.verl.train FOLDER STEPS [OVERRIDE...]
"""

import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from verl.trainer.main_ppo import main

from tests.trainers.verl.cluster import OBJECT_STORE_BYTES, SIZE, overrides

PROBLEMS = [(left, right) for left in range(2, 10) for right in range(2, 10)]
BATCH = 4
"""Prompts of a step."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Reward short answers. The tiny model learns that within a few steps."""
    return 1 / (1 + len(solution_str))


def write_data(folder: Path) -> Path:
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"{left}a-{right}b*4>"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, (left, right) in enumerate(PROBLEMS)
    ]
    path = folder / "problems.parquet"
    Dataset.from_list(rows).to_parquet(path)
    return path


def arguments(folder: Path, steps: int) -> list[str]:
    data = write_data(folder)
    rollout = {
        "checkpoint_engine.backend": "naive",
        "log_prob_micro_batch_size_per_gpu": BATCH,
        "response_length": 48,
    }
    settings = {
        "data.train_files": data,
        "data.val_files": data,
        "data.val_max_samples": BATCH,
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 64,
        "data.max_response_length": 48,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": BATCH,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        # By default the forward pass is in bfloat16.
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
        "reward.custom_reward_function.path": Path(__file__),
        "reward.num_workers": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "console",
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": OBJECT_STORE_BYTES,
    }
    given = overrides(rollout, {"policy": "uniform"})
    return [*given, *(f"{name}={value}" for name, value in settings.items())]


if __name__ == "__main__":
    folder, steps, *more = sys.argv[1:]
    assert SIZE > 1, "GRPO compares the trajectories of a prompt"
    os.chdir(folder)
    sys.argv = [sys.argv[0], *arguments(Path(folder), int(steps)), *more]
    main()
