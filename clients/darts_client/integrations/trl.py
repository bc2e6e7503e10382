"""TRL's GRPOTrainer against darts-server: needs the extra `darts-client[trl]`, and vLLM, which TRL requires.

```python
trainer = DartsGRPOTrainer(
    model="Qwen/Qwen3-8B",
    reward_funcs=report_rewards(is_correct),
    args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:8000"),
    train_dataset=dataset,
)
```

TRL is neither edited nor copied: the trainer is a subclass of TRL's. TRL's `VLLMClient`, which sends all requests,
is replaced by a subclass while the trainer is created. On a GPU with NCCL TRL's own trainer needs only the server's
address; docs/trl.md says what this trainer adds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from .._requests import auth_headers
from ..advantages import server_advantages
from ._callback import DartsCallback
from ._processes import run_on_main
from ._reporting import RewardReport, SampledBatch, find_reports, report_rewards
from ._server import Server, TensorSpec, TensorStream
from ._trl_ahead import AheadOptions, PositionCallback, PromptsAhead, build_trl_answer, load_position
from ._trl_names import GRPOConfig, GRPOTrainer, VLLMClient, vllm_generation
from ._weight_transfer import WeightTransfer
from ._weighting import SampledGroups, weighted_advantages

__all__ = ["DartsCallback", "DartsGRPOTrainer", "RewardReport", "WeightTransfer", "report_rewards"]

XARGS = "vllm_xargs"
CLIENT = "VLLMClient"


class DartsGRPOTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]  # Any without trl
    """TRL's trainer, with weights over HTTP, evaluation by vLLM alone, reported rewards and a `DartsCallback`.

    `args` must have `use_vllm=True` and `vllm_mode="server"`. `reward_reports` has the counts of functions that
    `report_rewards` has wrapped.

    The last five options train on the same prompts as often, in one process. TRL's importance sampling corrects for
    tokens of older weights.

    Args:
        weight_sync: "http" needs no NCCL. With "nccl" TRL sends the weights.
        advantages: "server" trains with the advantages of the policy `informative`: a group has the signal of all its
            candidates. The server needs a verifier, which gets the columns of the data set. "unbiased" computes
            advantages in training from the weights in the server's records, see `darts_client.advantages`. They are
            divided by their root mean square, unless `scale_rewards="none"`.
        baseline: baseline of "unbiased". "pass_rate" is the prompt's share of correct trajectories in earlier groups.
            It needs reported rewards of 1 for correct and 0 for wrong.
        rollouts: "auto" stands for `prompts_ahead=0.5, carry="resume"` under the policy `auto`. No step waits for its
            slowest prompts, and no token is thrown away.
        dynamic_sampling: whether groups whose rewards on the server are all equal are replaced by groups of the
            `prompts_ahead`, as far as there are enough. This biases the gradient (DAPO).
        prompts_ahead: additional prompts, as a share of a batch. Training uses the groups that are complete first.
        carry: "resume" continues unfinished prompts in the next batch. "restart" starts them again (tail batching).
        long_rounds: whether unfinished prompts wait until they fill a batch of their own.
        max_staleness: 1 samples a batch while the batch before is trained on.

    Raises:
        ValueError: vLLM is not used or runs in this process, or arguments conflict.
        DartsError: the server is not a darts-server; in training, new weights were refused or did not arrive.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more_args: Any,
        weight_sync: Literal["http", "nccl"] = "http",
        advantages: Literal["group", "unbiased", "server"] = "group",
        baseline: Literal["group", "pass_rate"] = "group",
        dynamic_sampling: bool = False,
        prompts_ahead: float = 0.0,
        max_staleness: int = 0,
        long_rounds: bool = False,
        carry: Literal["restart", "resume"] = "restart",
        rollouts: Literal["auto"] | None = None,
        api_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None or not args.use_vllm or args.vllm_mode != "server":
            raise ValueError("args must have use_vllm=True and vllm_mode='server'")
        if weight_sync not in ("http", "nccl"):
            raise ValueError(f"weight_sync must be 'http' or 'nccl', got {weight_sync!r}")
        _check_advantages(advantages, baseline, args)
        self._ahead_options = replace(
            AheadOptions.from_arguments(rollouts, prompts_ahead, max_staleness, long_rounds, carry),
            server_advantages=advantages == "server",
            dynamic_sampling=dynamic_sampling,
        )
        self._ahead_options.check(args, advantages)

        client_class = PushingVLLMClient if weight_sync == "http" else DartsVLLMClient
        with _replace_vllm_client(partial(client_class, api_key=api_key)):
            super().__init__(model, reward_funcs, args, *more_args, **kwargs)
        self._ahead_options.check_trainer(self)
        if self.accelerator.is_main_process:
            self._client.is_training = self._is_training

        self._last_batch: SampledBatch | None = None
        self._rewards_by_function = torch.empty(0, 0)
        self._is_unbiased = advantages == "unbiased"
        self._server_advantages: list[float] = []
        self._by_pass_rate = baseline == "pass_rate"
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self._server = Server(url, api_key)
        self.reward_reports = find_reports(self.reward_funcs)
        for report in self.reward_reports:
            report.connect(self._server, lambda: self._last_batch)
        self._darts_callback = DartsCallback(url, api_key)
        # Reporters log the metrics that earlier callbacks have added, so this callback is the first.
        self.callback_handler.callbacks.insert(0, self._darts_callback)
        self._positions = PositionCallback()
        self.add_callback(self._positions)

    @property
    def _client(self) -> "DartsVLLMClient":
        client: Any = self.vllm_generation.vllm_client
        return cast(DartsVLLMClient, client)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, and restore the server's state from the same checkpoint."""
        checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        self._darts_callback.checkpoint = checkpoint
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self._positions.prompts is not None:
                self._positions.prompts.close()
                self._positions.prompts = None

    def _generate(self, prompts: list[Any]) -> Any:
        if self.accelerator.is_main_process:
            self._client.sampled_groups = None
        output = super()._generate(prompts)
        # TRL passes the tokens of the completions to reward functions, but not the tokens of the prompts.
        self._last_batch = (output[0], output[1]) if self._is_training() else None
        return output

    def _calculate_rewards(self, *inputs: Any) -> torch.Tensor:
        # The rewards of all processes.
        self._rewards_by_function = super()._calculate_rewards(*inputs)
        return self._rewards_by_function

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._ahead_options.samples_ahead and self._is_training():
            inputs = self._sample_ahead()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self._is_training():
            return output
        if self._ahead_options.server_advantages:
            self._replace_advantages(output, self._server_advantages, len(inputs))
        elif self._is_unbiased:
            self._replace_advantages(output, run_on_main(self._unbiased_advantages), len(inputs))
        return output

    def _replace_advantages(self, output: dict[str, Any], all_advantages: list[float], num_completions: int) -> None:
        # This is a deque with the length of one generation batch, so the new advantages push out TRL's.
        logged_advantages: Any = self._logs["advantages"]
        logged_advantages.extend(all_advantages)
        start = self.accelerator.process_index * num_completions
        advantages = all_advantages[start : start + num_completions]
        output["advantages"] = torch.tensor(advantages).to(output["advantages"])

    def _sample_ahead(self) -> list[dict[str, Any]]:
        """Sample a batch for TRL's client, and return TRL's inputs for it."""
        if self._positions.prompts is None:
            position = None
            if self.state.global_step:
                default_folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
                position = load_position(self._darts_callback.checkpoint or default_folder)
            self._positions.prompts = PromptsAhead(self, self._ahead_options, self._server, position)
        batch = self._positions.prompts.next()
        self._client.answer_ahead = build_trl_answer(batch)
        if self._ahead_options.server_advantages:
            self._server_advantages = [value for group in batch.groups for value in server_advantages(group)]
        return self._positions.prompts.rows(batch)

    def _unbiased_advantages(self) -> list[float]:
        """Return the advantages of all processes, on the main process, which has sampled."""
        by_function = self._rewards_by_function
        rewards = (by_function * self.reward_weights.to(by_function)).nansum(dim=1)
        # `nansum` is 0 for a completion that no function has rewarded.
        rewards[by_function.isnan().all(dim=1)] = torch.nan
        sampled_groups = self._client.sampled_groups
        if sampled_groups is None:
            raise ValueError(
                "advantages='unbiased' needs prompts without images, because images are requested one by one"
            )
        records = sampled_groups.fetch_records(self._server)
        scale = self.scale_rewards != "none"
        return weighted_advantages(
            records,
            rewards.tolist(),
            scale=scale,
            by_pass_rate=self._by_pass_rate,
        )

    def _is_training(self) -> bool:
        # TRL itself reads the same flag.
        model: Any = self.model
        return bool(model.training)


class DartsVLLMClient(VLLMClient):  # type: ignore[misc, unused-ignore]  # Any without trl
    """TRL's client with an API key. It requests unshaped completions while the model is not in training mode."""

    def __init__(self, *args: Any, api_key: str | None = None, **kwargs: Any) -> None:
        self.is_training: Callable[[], bool] = lambda: True
        self.sampled_groups: SampledGroups | None = None
        """Groups of the first answer in training since this was None. Later answers are further turns of tool calls."""
        self.answer_ahead: dict[str, Any] | None = None
        """Completions of the prompts that TRL requests next."""
        self._api_key = api_key
        super().__init__(*args, **kwargs)

    def generate(self, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the completions that were sampled ahead, or request completions."""
        answer = self.answer_ahead
        self.answer_ahead = None
        if answer is None:
            return super().generate(prompts, *args, **kwargs)
        if [list(ids) for ids in prompts] != answer["prompt_ids"]:
            raise RuntimeError("TRL requests other prompts than the prompts that were sampled ahead")
        return answer

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        # TRL's __init__ creates the session and then calls this method.
        self.session.headers.update(auth_headers(self._api_key))
        super().check_server(*args, **kwargs)

    def _post(self, url: str, **options: Any) -> Any:
        # An evaluation needs plain samples.
        if not self.is_training():
            return super()._post(url, **without_shaping(options))
        answer = super()._post(url, **options)
        # With tool calls TRL requests further turns, which are no groups.
        body = options.get("json") or {}
        if self.sampled_groups is None and body.get("return_token_ids"):
            self.sampled_groups = SampledGroups.from_answer(answer)
        return answer


class PushingVLLMClient(DartsVLLMClient):
    """Sends weights in the body of `PUT /darts/v1/weights`, tensor by tensor as TRL yields them, with LoRA merged."""

    @property
    def _server(self) -> Server:
        return Server(self.base_url, self._api_key)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Check that the server accepts weights. There is no NCCL communicator."""
        self._server.check_weights()

    def update_named_params(
        self,
        metadata: Sequence[TensorSpec],
        named_params: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Send new weights. Return when the server samples with them.

        Raises:
            ValueError: a tensor is not float32, float16 or bfloat16, as in quantized models.
            DartsError: the server refused the weights.
        """
        try:
            self._server.push(TensorStream(metadata, named_params))
        finally:
            # TRL unmerges LoRA adapters at the end of the iterator, and the other processes gather in step with it.
            for _ in named_params:
                pass

    def reset_prefix_cache(self) -> None:
        """Do nothing, because the server's update resets the cache."""

    def get_server_info(self) -> Any:
        """Return the server's information. Without development routes it has only the setting that TRL reads."""
        try:
            return super().get_server_info()
        except RuntimeError:
            # TRL raises it for a missing route.
            body = {"model": self.model, "prompt": [[0]], "max_tokens": 1, "top_k": 1, "logprobs": 0}
            answer = self._post(f"{self.base_url}/v1/completions", **without_shaping({"json": body}))
            [logprob] = answer["choices"][0]["logprobs"]["token_logprobs"]
            # With `top_k=1` the log-prob is 0 if log-probs are of the distribution after `top_k`.
            mode = "processed_logprobs" if logprob == 0 else "raw_logprobs"
            return {"model_config": {"logprobs_mode": mode}}


def without_shaping(options: dict[str, Any]) -> dict[str, Any]:
    headers = (options.get("headers") or {}) | {"X-Darts-Policy": "off"}
    options = options | {"headers": headers}
    body = dict(options.get("json") or {})
    # The body may have shaping options of its own.
    if XARGS in body:
        body[XARGS] = {name: value for name, value in body[XARGS].items() if not name.startswith("darts_")}
    if body:
        options["json"] = body
    return options


def _check_advantages(advantages: str, baseline: str, args: GRPOConfig) -> None:
    if advantages not in ("group", "unbiased", "server"):
        raise ValueError(f"advantages must be 'group', 'unbiased' or 'server', got {advantages!r}")
    if baseline not in ("group", "pass_rate"):
        raise ValueError(f"baseline must be 'group' or 'pass_rate', got {baseline!r}")
    if baseline == "pass_rate" and advantages != "unbiased":
        raise ValueError("baseline='pass_rate' needs advantages='unbiased'")
    if advantages == "group":
        return
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"advantages={advantages!r} needs multi_objective_aggregation='sum_then_normalize': the other way "
            "normalizes rewards by the group, which depends on which trajectories were returned"
        )
    if args.mask_truncated_completions:
        raise ValueError(
            f"advantages={advantages!r} needs mask_truncated_completions=False: truncated completions stand "
            "for others with their weights"
        )


@contextmanager
def _replace_vllm_client(make_client: Callable[..., VLLMClient]) -> Iterator[None]:
    # TRL has no argument for it, and reads the name once in a trainer's life, where it creates its `VLLMGeneration`.
    setattr(vllm_generation, CLIENT, make_client)
    try:
        yield
    finally:
        setattr(vllm_generation, CLIENT, VLLMClient)
