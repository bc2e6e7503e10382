"""Train the tiny task by TRL's GRPOTrainer with darts-server; a few minutes on two CPU cores.

    python -m examples.tiny_rl.train_trl
    python -m examples.tiny_rl.train_trl --policy darts_cut
    python -m examples.tiny_rl.train_trl --policy off --prompts-ahead 0.5 --carry restart
    python -m examples.tiny_rl.train_trl --policy off --max-staleness 1

The first command keeps the tokens of prompts that are not complete in their step. The second waits for all prompts. The
others are tail batching and one-step-off training, see `DartsGRPOTrainer`.

Task, rewards, recipe and the evaluation at the end are as in `train.py`; loop, loss and optimizer are TRL's. Every
entry that TRL logs is a line in log.jsonl. Entries of TRL's own evaluation, which is unshaped, too, have the prefix
`eval_`. Run it from the root of the repository, with vLLM, the extra "dev" and clients/ installed.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig  # type: ignore[attr-defined, unused-ignore]  # exported lazily

from darts_client import Client, DartsError
from darts_client.integrations.trl import DartsGRPOTrainer, RewardReport, report_rewards
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward
from darts_server.offline.demo.server import DARTS, MODEL, serving
from examples.tiny_rl.grpo import BETAS, CLIP, LEARNING_RATE
from examples.tiny_rl.remote import TIMEOUT_SECONDS
from examples.tiny_rl.tokenizer import EOS_ID, build_tokenizer
from examples.tiny_rl.train import HELD_OUT_SEED, Recipe, evaluate, problems
from examples.tiny_rl.train_log import HeldOut

# LoRA has few weights, and half of them start at 0.
LORA_LEARNING_RATE = 10 * LEARNING_RATE
# Number of steps at the start and at the end of a run whose rewards are compared.
COMPARED_STEPS = 5


def make_trainer(
    url: str,
    policy: str | None,
    recipe: Recipe,
    seed: int,
    out: Path,
    model: Path = MODEL,
    lora: int | None = None,
    advantages: Literal["group", "unbiased"] = "group",
    ahead: Mapping[str, Any] | None = None,
    **changes: Any,
) -> DartsGRPOTrainer:
    """Create TRL's trainer with the recipe of `train.py`.

    Args:
        policy: policy of the requests, or ``None`` for the server's.
        lora: rank of a LoRA adapter to train instead of all weights.
        ahead: arguments of `DartsGRPOTrainer` such as ``rollouts``.
        changes: arguments of ``GRPOConfig``.
    """
    held_out = problems(HELD_OUT_SEED, recipe.held_out_prompts)
    pool = problems(seed, recipe.pool, avoid=held_out)
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.prompts * recipe.group_size,
        "num_generations": recipe.group_size,
        "per_device_eval_batch_size": recipe.held_out_prompts * recipe.held_out_samples,
        "num_generations_eval": recipe.held_out_samples,
        "eval_strategy": "steps",
        "eval_steps": recipe.held_out_every,
        "max_completion_length": MAX_RESPONSE_TOKENS,
        "learning_rate": LEARNING_RATE if lora is None else LORA_LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": CLIP,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "generation_kwargs": {"vllm_xargs": {"darts_policy": policy}} if policy is not None else None,
        # The server uses float32, too.
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "seed": seed,
    }
    return DartsGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=[report_rewards(verifier(pool + held_out))],
        args=GRPOConfig(**settings | changes),
        train_dataset=dataset(pool),
        eval_dataset=dataset(held_out),
        processing_class=build_tokenizer(),
        advantages=advantages,
        peft_config=None if lora is None else LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear"),
        **(ahead or {}),
    )


def dataset(of: Sequence[Problem]) -> Dataset:
    return Dataset.from_list([{"prompt": problem.prompt} for problem in of])


def verifier(of: Sequence[Problem]) -> Callable[..., list[float]]:
    """Return the reward function for these problems' prompts."""
    by_prompt = {problem.prompt: problem for problem in of}

    def right(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        # A truncated completion gets 0, for the reason in `train.score`.
        return [
            reward(by_prompt[prompt], text) if ids[-1] == EOS_ID else 0.0
            for prompt, text, ids in zip(prompts, completions, completion_ids, strict=True)
        ]

    return right


def held_out_score(trainer: DartsGRPOTrainer, client: Client, recipe: Recipe) -> HeldOut:
    """Run the evaluation of `train.py` with the trainer's current weights."""
    trainer.vllm_generation.sync_weights()
    return evaluate(client, problems(HELD_OUT_SEED, recipe.held_out_prompts), recipe.held_out_samples, seed=0)


def summary(steps: Sequence[dict[str, Any]], before: HeldOut, after: HeldOut, report: RewardReport, took: float) -> str:
    """Summarize the run from the log entries of its training steps."""
    rewards = [step["reward"] for step in steps]
    first = rewards[:COMPARED_STEPS]
    last = rewards[-COMPARED_STEPS:]
    return "\n".join(
        [
            f"held out, unshaped: {_format(before)} before, {_format(after)} after",
            f"reward in training: {fmean(first):.3f} in the first {len(first)} steps, {fmean(last):.3f} in the last",
            f"tokens: {sum(step['darts/tokens_generated'] for step in steps):.0f} generated, "
            f"{sum(step['darts/tokens_returned'] for step in steps):.0f} trained on",
            f"seconds a step: {fmean(step['step_time'] for step in steps):.2f}; total, with evaluation: {took:.0f}",
            f"log-probs of server and trainer differ by at most "
            f"{max(step['sampling/sampling_logp_difference/max'] for step in steps):.1g}",
            # Equal completions share a reward, so the server counts the second as repeated.
            f"rewards: {report.matched + report.repeated} reached their trajectory, "
            f"{report.unknown + report.unreported} did not",
        ]
    )


def _format(score: HeldOut) -> str:
    return f"{score.right:.3f} ± {score.standard_error:.3f} right, {score.length_mean:.1f} tokens"


def main(argv: Sequence[str] | None = None) -> None:
    """Train and print a summary. Exits with a message if it fails."""
    options = arguments(argv)
    # The server needs the other core.
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe(options.steps)
    try:
        with ExitStack() as stack:
            url = options.url or stack.enter_context(serving(DARTS, options.out / "server.log")).url
            client = stack.enter_context(Client(url, timeout=TIMEOUT_SECONDS))
            kind: Literal["group", "unbiased"] = "unbiased" if options.unbiased else "group"
            trainer = make_trainer(
                url, options.policy, recipe, options.seed, options.out, options.model, options.lora, kind, options.ahead
            )
            before = held_out_score(trainer, client, recipe)
            start = time.perf_counter()
            trainer.train()
            took = time.perf_counter() - start
            after = held_out_score(trainer, client, recipe)
    except (DartsError, RuntimeError, OSError) as error:
        sys.exit(f"train_trl: {error}")
    except KeyboardInterrupt:
        sys.exit("train_trl: interrupted; the server it started has been stopped")
    log = options.out / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in trainer.state.log_history))
    steps = [line for line in trainer.state.log_history if "loss" in line]
    print(summary(steps, before, after, trainer.reward_reports[0], took), f"Log: {log}", sep="\n")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.tiny_rl.train_trl", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--policy", help="policy that shapes training groups (default: the server's)")
    add(
        "--prompts-ahead",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="prompts started in addition (default: 0.5; none with a --policy)",
    )
    add(
        "--carry",
        choices=["resume", "restart"],
        default="resume",
        help="how unfinished prompts continue in the next step (default: %(default)s)",
    )
    add("--max-staleness", type=int, default=0, choices=[0, 1], help="updates between sampling and training on it")
    add("--steps", type=int, default=Recipe.steps, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the training prompts and their order (default: %(default)s)")
    add("--model", type=Path, default=MODEL, metavar="FOLDER", help="initial policy (default: the shipped model)")
    add("--lora", type=int, metavar="RANK", help="train a LoRA adapter of this rank (default: all weights)")
    add("--unbiased", action="store_true", help="advantages from the trajectories' weights (--policy uniform has some)")
    add("--url", help="a running server with a model of the same architecture (default: start one)")
    add(
        "--out",
        type=Path,
        default=Path("out/train_trl"),
        metavar="FOLDER",
        help="folder for the log (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if options.lora is not None and options.lora < 1:
        parser.error("--lora must be at least 1")
    if not options.prompts_ahead >= 0:
        parser.error("--prompts-ahead must be at least 0")
    if options.unbiased and (options.prompts_ahead or options.max_staleness):
        parser.error("--unbiased does not go with --prompts-ahead and --max-staleness")
    options.ahead = {"prompts_ahead": options.prompts_ahead, "max_staleness": options.max_staleness}
    if options.prompts_ahead:
        options.ahead["carry"] = options.carry
    elif options.policy is None and not (options.max_staleness or options.unbiased):
        options.ahead = {"rollouts": "auto"}
    return options


if __name__ == "__main__":
    main()
