"""Prompts ahead of their step for TRL's GRPOTrainer: the part of `DartsGRPOTrainer` that runs before TRL samples."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._models import Group
from .._prompts import PromptSpec
from ._ahead import POSITION_FILE, Batch, BatchesAhead, Carry, GroupRequests, Position, rollout_options
from ._server import Server
from ._trl_names import GRPOConfig, RepeatSampler


@dataclass(frozen=True, slots=True)
class AheadOptions:
    """Options of a `DartsGRPOTrainer`."""

    prompts_ahead: float = 0.0
    max_staleness: int = 0
    long_rounds: bool = False
    carry: Carry = "restart"
    policy: str | None = None
    server_advantages: bool = False
    dynamic_sampling: bool = False

    @classmethod
    def from_arguments(
        cls,
        rollouts: str | None,
        prompts_ahead: float,
        max_staleness: int,
        long_rounds: bool,
        carry: Carry,
    ) -> "AheadOptions":
        """Return the given options, or the options that `rollouts` stands for.

        Raises:
            ValueError: `rollouts` is unknown, or other options are given beside it.
        """
        given = cls(prompts_ahead, max_staleness, long_rounds, carry)
        if rollouts is None:
            return given
        if rollouts != "auto":
            raise ValueError(f"rollouts must be 'auto' or None, got {rollouts!r}")
        if given != cls():
            raise ValueError("rollouts='auto' chooses prompts_ahead, carry and the others; leave these out")
        return cls(prompts_ahead=0.5, carry="resume", policy="auto")

    @property
    def samples_ahead(self) -> bool:
        """Whether batches are sampled before TRL requests them."""
        return bool(self.prompts_ahead or self.max_staleness or self.server_advantages)

    @property
    def needs_rewards(self) -> bool:
        """Whether the server's verifier needs the columns of the data set."""
        return self.server_advantages or self.dynamic_sampling

    def check(self, args: GRPOConfig, advantages: str) -> None:
        """Raise ValueError if a value is impossible, or conflicts with TRL's arguments."""
        if self.prompts_ahead < 0:
            raise ValueError(f"prompts_ahead must be at least 0, got {self.prompts_ahead}")
        if self.max_staleness not in (0, 1):
            raise ValueError(f"max_staleness must be 0 or 1, got {self.max_staleness}")
        if self.carry not in ("restart", "resume"):
            raise ValueError(f"carry must be 'restart' or 'resume', got {self.carry!r}")
        if self.carry == "resume" and not self.prompts_ahead:
            raise ValueError("carry='resume' needs prompts_ahead above 0, else no prompt is carried over")
        if self.long_rounds and not self.prompts_ahead:
            raise ValueError("long_rounds=True needs prompts_ahead above 0, else no prompt is left over")
        if self.dynamic_sampling and not self.prompts_ahead:
            raise ValueError("dynamic_sampling=True needs prompts_ahead above 0, the prompts that take the places")
        # True with `server_advantages` alone, too.
        if not self.samples_ahead:
            return
        if self.server_advantages and self.policy is not None:
            raise ValueError("advantages='server' needs the policy 'informative'; leave rollouts='auto' out")
        if self.server_advantages and args.scale_rewards == "batch":
            raise ValueError("advantages='server' needs scale_rewards 'group' or 'none', as the server knows one group")
        if advantages == "unbiased":
            raise ValueError(f"advantages={advantages!r} does not work with prompts_ahead or max_staleness")
        if args.world_size > 1:
            raise ValueError(f"prompts_ahead and max_staleness work in one process, and there are {args.world_size}")
        if (self.max_staleness or self.carry == "resume") and not args.vllm_importance_sampling_correction:
            option = "max_staleness=1" if self.max_staleness else "carry='resume'"
            raise ValueError(f"{option} needs vllm_importance_sampling_correction=True, which corrects for old tokens")
        generation_kwargs: Any = args.generation_kwargs or {}
        policy = rollout_options(generation_kwargs).get("policy")
        if self.server_advantages and policy is not None:
            raise ValueError(
                f"advantages='server' chooses the policy 'informative', and vllm_xargs in generation_kwargs has "
                f"darts_policy = {policy!r}; leave darts_policy out"
            )

    def check_trainer(self, trainer: Any) -> None:
        """Raise ValueError if the trainer does not sample by one request for each batch."""
        samplers = {
            "rollout_func": trainer.rollout_func,
            "environment_factory": trainer.environment_factories,
            "tools": trainer.tools,
        }
        for name, sampler in samplers.items():
            if self.samples_ahead and sampler:
                raise ValueError(f"prompts_ahead and max_staleness do not work with {name}, which samples in turns")

    def check_data(self, dataset: Any, size: int) -> None:
        """Raise ValueError if prompts cannot be drawn from this data set ahead of their step."""
        if isinstance(dataset, IterableDataset):
            raise ValueError("prompts_ahead and max_staleness need a train_dataset with a length, not a stream")
        if len(dataset) < size:
            raise ValueError(f"train_dataset has {len(dataset)} prompts, less than the {size} of a generation batch")
        if {"image", "images"} & set(dataset.column_names):
            raise ValueError("prompts_ahead and max_staleness do not work with images")


class PromptsAhead:
    """Samples the batches of a trainer, with TRL's prompts in TRL's order, each as often as TRL would."""

    def __init__(
        self,
        trainer: Any,
        options: AheadOptions,
        server: Server,
        position: Position | None,
    ) -> None:
        self._trainer = trainer
        self._options = options
        args = trainer.args
        state = trainer.state
        size = args.generation_batch_size // trainer.num_generations
        options.check_data(trainer.train_dataset, size)

        # TRL counts optimizer steps. The last step of an epoch may have fewer forward passes.
        passes_of_batch = args.steps_per_generation * trainer.num_iterations
        passes_of_epoch = len(trainer.train_dataset) // size * passes_of_batch
        passes_done = count_passes(state.global_step, args.gradient_accumulation_steps, passes_of_epoch)
        # There is no checkpoint, or it is from a training without prompts ahead.
        if position is None:
            position = Position(passes_done // passes_of_batch * size)
        total_passes = count_passes(state.max_steps, args.gradient_accumulation_steps, passes_of_epoch)
        batches = ceil((total_passes - passes_done) / passes_of_batch)
        self.position = position
        """Position after the batch that is trained on now."""

        request_options = rollout_options(trl_sampling(trainer))
        if options.policy is not None:
            request_options.setdefault("policy", options.policy)
        if options.server_advantages:
            by_std = args.scale_rewards != "none"
            request_options["policy"] = {"name": "informative", "advantage_std": by_std}
        if options.dynamic_sampling:
            # Groups of equal rewards fill up a batch if too few groups are informative.
            request_options |= {"only": "informative", "return_zero_variance": True}
        self._requests = GroupRequests(server, trainer.num_generations, request_options, options.carry)
        self._batches = BatchesAhead(
            islice(iterate_prompt_numbers(trainer, size), position.drawn, None),
            position,
            size=size,
            ahead_share=options.prompts_ahead,
            batches=batches,
            tokenize=self._tokenize,
            request=self._request_groups,
            long_rounds=options.long_rounds,
            only_informative=options.dynamic_sampling,
        )

    def next(self) -> Batch:
        """Return the next batch. New weights reach the server before anything else is sampled."""
        trainer = self._trainer
        # A prefetched batch was sampled with the old weights, so it must end before they change.
        batch = self._batches.next() if self._batches.is_prefetched else None
        if trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        if batch is None:
            batch = self._batches.next()
        if self._options.max_staleness:
            self._batches.prefetch()
        self.position = batch.position
        return batch

    def rows(self, batch: Batch) -> list[dict[str, Any]]:
        prompt_rows = [self._trainer.train_dataset[number] for number in batch.prompts]
        return [row for row in prompt_rows for _ in range(self._trainer.num_generations)]

    def close(self) -> None:
        self._batches.close()
        self._requests.cancel()

    def _request_groups(
        self, numbers: Sequence[int], token_ids: Sequence[Sequence[int]], num_wanted: int
    ) -> list[Group]:
        if not self._options.needs_rewards:
            return self._requests.request(token_ids, num_wanted)
        # Verifiers read the columns of the data set in the metadata.
        rows = [self._trainer.train_dataset[number] for number in numbers]
        prompts = [PromptSpec(ids, metadata=select_metadata(row)) for ids, row in zip(token_ids, rows, strict=True)]
        return self._requests.request(prompts, num_wanted)

    def _tokenize(self, numbers: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the token ids that TRL would send."""
        prompts = [self._trainer.train_dataset[number]["prompt"] for number in numbers]
        token_ids: Sequence[Sequence[int]] = self._trainer._tokenize_prompts(prompts)[0]
        return token_ids


class PositionCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # Any without trl
    """Saves the position in the order of prompts with each checkpoint."""

    def __init__(self) -> None:
        self.prompts: PromptsAhead | None = None

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self.prompts is not None and state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            self.prompts.position.save(folder / POSITION_FILE)


def select_metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {}
    for name, value in row.items():
        if name == "prompt":
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            # JSON cannot represent the column.
            continue
        metadata[name] = value
    return metadata


def load_position(folder: Path) -> Position | None:
    path = folder / POSITION_FILE
    return Position.load(path) if path.is_file() else None


def count_passes(steps: int, passes_of_step: int, passes_of_epoch: int) -> int:
    steps_of_epoch = ceil(passes_of_epoch / passes_of_step)
    complete_epochs, further_steps = divmod(steps, steps_of_epoch)
    return complete_epochs * passes_of_epoch + further_steps * passes_of_step


def iterate_prompt_numbers(trainer: Any, size: int) -> Iterator[int]:
    """Yield the numbers of prompts as TRL draws them, epoch after epoch, each at most once in an epoch."""
    sampler = RepeatSampler(
        trainer.train_dataset,
        mini_repeat_count=1,
        batch_size=size,
        repeat_count=1,
        shuffle=trainer.shuffle_dataset,
        seed=trainer.args.seed,
    )
    while True:
        yield from sampler


def trl_sampling(trainer: Any) -> dict[str, Any]:
    """Return the sampling parameters that TRL passes to its client."""
    generation = trainer.vllm_generation
    sampling = {
        "repetition_penalty": generation.repetition_penalty,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_p": generation.min_p or 0.0,
        "max_tokens": generation.max_completion_length,
    }
    if generation.structured_outputs_regex is not None:
        sampling["structured_outputs"] = {"regex": generation.structured_outputs_regex}
    return sampling | dict(generation.generation_kwargs or {})


def build_trl_answer(batch: Batch) -> dict[str, Any]:
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    # TRL expects each prompt once, and a list of top log-probs for each token, here with the sampled token alone.
    return {
        "prompt_ids": [list(ids) for ids in batch.token_ids],
        "completion_ids": [list(trajectory.token_ids) for trajectory in trajectories],
        "logprobs": [[[value] for value in trajectory.logprobs or ()] for trajectory in trajectories],
        "logprob_token_ids": [[[token] for token in trajectory.token_ids] for trajectory in trajectories],
    }
