"""veRL's own training, `main_ppo`, of the tiny model and the tiny task on a CPU with the backend `darts`.

    python -m tests.trainers.verl.train FOLDER STEPS POLICY

`launch` runs it in the trainer's environment.
"""

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from datasets import Dataset
from verl.trainer.main_ppo import main

from darts_server.offline.demo.problems import Problem, reward, sample_problem
from tests.trainers.verl.cluster import OBJECT_STORE_BYTES, overrides

PROMPTS = 16
"""Prompts of a step."""
SIZE = 8
"""Trajectories of a prompt."""
MAX_TOKENS = 128
LEARNING_RATE = 2e-4
HELD_OUT = 256
"""Problems that are sampled once before the first step and once after the last, without shaping."""
HELD_OUT_SEED = 20_240


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return the reward of the tiny task. veRL reads this function from the file."""
    problem = Problem(prompt="", chain=(), answer=int(ground_truth), difficulty="easy")
    return reward(problem, solution_str)


def write_problems(path: Path, count: int, seed: int) -> Path:
    random = Random(seed)
    problems = [sample_problem(random) for _ in range(count)]
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(problems)
    ]
    Dataset.from_list(rows).to_parquet(path)
    return path


def arguments(folder: Path, steps: int, policy: str) -> list[str]:
    rollout = {
        "checkpoint_engine.backend": "naive",
        "log_prob_micro_batch_size_per_gpu": PROMPTS * SIZE,
        "n": SIZE,
        "response_length": MAX_TOKENS,
        "val_kwargs.do_sample": True,
        "val_kwargs.temperature": 1.0,
    }
    settings = {
        "data.train_files": write_problems(folder / "problems.parquet", steps * PROMPTS, 0),
        "data.val_files": write_problems(folder / "held_out.parquet", HELD_OUT, HELD_OUT_SEED),
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 64,
        "data.max_response_length": MAX_TOKENS,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": PROMPTS * SIZE,
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
    given = overrides(rollout, {"policy": policy})
    return [*given, *(f"{name}={value}" for name, value in settings.items())]


if __name__ == "__main__":
    home = Path(sys.argv[1])
    os.chdir(home)
    sys.argv[1:] = arguments(home, int(sys.argv[2]), sys.argv[3])
    main()
