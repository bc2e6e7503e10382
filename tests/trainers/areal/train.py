"""AReaL's own trainer, `PPOTrainer` with FSDP, of the tiny model on a CPU, with the rollouts of a darts-server.

    python -m tests.trainers.areal.train FOLDER STEPS [SETTING=VALUE...]

runs in the trainer's environment, with the addresses of the server in AREAL_LLM_SERVER_ADDRS. AReaL writes its
checkpoints below FOLDER, which must be below the server's `--weights-root`. Each step prints a line of JSON.
"""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

from areal import PPOTrainer
from areal.api.cli_args import PPOConfig, load_expr_config
from areal.utils.stats_logger import StatsLogger
from datasets import Dataset

from darts_server.offline.demo.problems import reward, sample_problem
from darts_server.offline.demo.server import MODEL

PROMPTS = 4
"""Prompts of a step."""
SIZE = 4
"""Trajectories of a prompt."""
_rng = Random(0)
PROBLEMS = [sample_problem(_rng) for _ in range(512)]


def score(prompt: str, completion: str, *tokens: list[int], number: int, **columns: Any) -> float:
    """The reward of the tiny task. ``number``: a column of the data, the problem."""
    del prompt, tokens, columns
    return reward(PROBLEMS[number], completion.removesuffix("<eos>"))


def report(logger: StatsLogger, epoch: int, epoch_step: int, step: int, metrics: dict[str, float]) -> None:
    """Print the metrics of a step, in place of AReaL's loggers."""
    print(json.dumps({"step": step} | metrics), flush=True)


def settings(folder: Path, steps: int) -> dict[str, Any]:
    names = {"experiment_name": "tiny", "trial_name": "cpu"}
    files = names | {"fileroot": str(folder)}
    return names | {
        "total_train_epochs": 1,
        "total_train_steps": steps,
        "tokenizer_path": str(MODEL),
        "cluster": {
            "fileroot": str(folder),
            "n_nodes": 1,
            "n_gpus_per_node": 1,
            "name_resolve": {"type": "nfs", "nfs_record_root": str(folder / "names")},
        },
        "gconfig": {"n_samples": SIZE, "max_new_tokens": 128, "temperature": 1.0},
        "rollout": names | {"backend": "vllm:d1", "max_head_offpolicyness": 0, "consumer_batch_size": PROMPTS},
        "actor": names
        | {
            "backend": "fsdp:d1",
            "path": str(MODEL),
            # AReaL packs trajectories, and leaves their borders to flash attention, which needs a GPU. Other kinds of
            # attention are right only for one trajectory in a micro-batch, and need a kind that is causal by itself.
            "attn_impl": "sdpa",
            "mb_spec": {"n_mbs": PROMPTS * SIZE},
            "dtype": "float32",
            "grad_reduce_dtype": "float32",
            "gradient_checkpointing": False,
            "weight_update_mode": "disk",
            "optimizer": {"lr": 2e-4, "lr_scheduler_type": "constant", "warmup_steps_proportion": 0.0},
            "kl_ctl": 0.0,
            "ppo_n_minibatches": 1,
            "adv_norm": {"mean_level": "batch", "std_level": "batch"},
            "reward_norm": {"mean_level": "group", "std_level": "group", "group_size": SIZE},
            "use_decoupled_loss": True,
            "recompute_logprob": True,
        },
        "train_dataset": {
            "path": "",
            "type": "rl",
            "batch_size": PROMPTS,
            "shuffle": False,
            "pin_memory": False,
            "num_workers": 0,
        },
        "saver": files,
        "evaluator": files,
        "recover": files | {"mode": "disabled"},
        "stats_logger": files,
    }


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    (folder / "tiny.yaml").write_text(json.dumps(settings(folder, steps)))
    config, _ = load_expr_config(["--config", str(folder / "tiny.yaml"), *sys.argv[3:]], PPOConfig)
    rows = [
        {"messages": [{"role": "user", "content": problem.prompt}], "number": number}
        for number, problem in enumerate(PROBLEMS)
    ]
    StatsLogger.init = StatsLogger.close = lambda self: None
    StatsLogger.commit = report
    trainer = PPOTrainer(config, train_dataset=Dataset.from_list(rows))
    try:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={"reward_fn": score, "gconfig": config.gconfig, "tokenizer": str(MODEL)},
        )
    finally:
        trainer.close()
