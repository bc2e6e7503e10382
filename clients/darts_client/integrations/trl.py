"""TRL's GRPOTrainer against darts-server: needs the extra `darts-client[trl]`, and vLLM, which TRL requires.

```python
trainer = DartsGRPOTrainer(
    model="Qwen/Qwen3-8B",
    reward_funcs=report_rewards(is_correct),
    args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:8000"),
    train_dataset=dataset,
)
```

TRL 1.16 is neither edited nor copied. The trainer is a subclass of TRL's. TRL's `VLLMClient`, its only object that
sends requests to the server, is replaced by a subclass while the trainer is made. On a GPU with NCCL TRL's own trainer
needs only the server's address; docs/trl.md says what this one adds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

try:
    import torch
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: this needs darts-client[trl]", name=exc.name) from exc

from .._requests import auth_headers
from ._callback import DartsCallback
from ._processes import run_on_main
from ._reporting import RewardReport, SampledBatch, find_reports, report_rewards
from ._server import Server, TensorSpec, TensorStream
from ._trl_ahead import AheadOptions, PositionCallback, PromptsAhead, as_answer, load_position
from ._weight_transfer import WeightTransfer
from ._weighting import SampledGroups, weighted_advantages

__all__ = ["DartsCallback", "DartsGRPOTrainer", "RewardReport", "WeightTransfer", "report_rewards"]

XARGS = "vllm_xargs"
CLIENT = "VLLMClient"


class DartsGRPOTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]  # Any without trl
    """TRL's trainer, which pushes weights without NCCL, evaluates unshaped, reports rewards, and has a `DartsCallback`.

    The arguments are TRL's; `args` must have `use_vllm=True` and `vllm_mode="server"`. With `weight_sync="nccl"` TRL
    sends the weights. Functions wrapped by `report_rewards` report while training, never in evaluation;
    `reward_reports` counts their rewards.

    With `advantages="unbiased"` the trajectories' weights in the server's records give the advantages of training, in
    place of those that TRL computes relative to the group; see `darts_client.advantages`. `scale_rewards="none"` leaves
    them as they are; otherwise they are divided by their root mean square over the batch. Policies without weights are
    an error in training. Their baseline is the mean reward of others of the group or, with `baseline="pass_rate"` and
    where it is known, the share of right ones among the prompt's trajectories of earlier groups: for rewards of 1 for
    right and 0 for wrong, which are reported.

    With `rollouts="auto"` no step waits for its slowest prompts, and nothing that was generated is thrown away: half as
    many prompts more are started, the first groups that are complete are trained on, and the others go on in the next
    batch. TRL's importance sampling corrects for their first tokens, which have the log-probs of the older weights. It
    is short for `prompts_ahead=0.5, carry="resume"` under the server's policy `auto`. With `carry="restart"` they start
    again, first in the next batch (tail batching); with `long_rounds=True` they wait until they fill a batch of their
    own, so that no other waits for a long one. With `max_staleness=1` each generation batch is sampled while the one
    before is trained on; TRL's importance sampling corrects for the older weights. All train on the prompts that TRL
    would train on, each as often, in one process.

    Raises:
        ValueError: vLLM is not used, or runs in this process; or arguments do not go with each other.
        DartsError: the server is not a darts-server; in training, new weights were refused or did not arrive.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        weight_sync: Literal["http", "nccl"] = "http",
        advantages: Literal["group", "unbiased"] = "group",
        baseline: Literal["group", "pass_rate"] = "group",
        prompts_ahead: float = 0.0,
        max_staleness: int = 0,
        long_rounds: bool = False,
        carry: Literal["restart", "resume"] = "restart",
        rollouts: Literal["auto"] | None = None,
        api_key: str | None = None,
        **named: Any,
    ) -> None:
        if args is None or not args.use_vllm or args.vllm_mode != "server":
            raise ValueError("args must have use_vllm=True and vllm_mode='server'")
        if weight_sync not in ("http", "nccl"):
            raise ValueError(f"weight_sync must be 'http' or 'nccl', got {weight_sync!r}")
        _check_advantages(advantages, baseline, args)
        self._ahead_options = AheadOptions.of(rollouts, prompts_ahead, max_staleness, long_rounds, carry)
        self._ahead_options.check(args, advantages)
        client_class = PushingVLLMClient if weight_sync == "http" else DartsVLLMClient
        with _replace_vllm_client(partial(client_class, api_key=api_key)):
            super().__init__(model, reward_funcs, args, *more, **named)
        self._ahead_options.check_trainer(self)
        self._last_batch: SampledBatch | None = None
        self._is_weighted = advantages == "unbiased"
        self._by_pass_rate = baseline == "pass_rate"
        self._last_rewards = torch.empty(0, 0)
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        if self.accelerator.is_main_process:
            self._client.is_training = self._is_training
        self._server = Server(url, api_key)
        self.reward_reports = find_reports(self.reward_funcs)
        for report in self.reward_reports:
            report.connect(self._server, lambda: self._last_batch)
        self._darts_callback = DartsCallback(url, api_key)
        # Before the reporters, which log what earlier callbacks have added.
        self.callback_handler.callbacks.insert(0, self._darts_callback)
        self._positions = PositionCallback()
        self.add_callback(self._positions)

    @property
    def _client(self) -> "DartsVLLMClient":
        """The main process's client."""
        client: Any = self.vllm_generation.vllm_client
        return cast(DartsVLLMClient, client)

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **named: Any) -> Any:
        """Train as TRL does, and restore the server's state from the same checkpoint."""
        checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        self._darts_callback.checkpoint = checkpoint
        try:
            return super().train(resume_from_checkpoint, *more, **named)
        finally:
            if self._positions.prompts is not None:
                self._positions.prompts.close()
                self._positions.prompts = None

    def _generate(self, prompts: list[Any]) -> Any:
        if self.accelerator.is_main_process:
            self._client.sampled = None
        output = super()._generate(prompts)
        # TRL passes reward functions the tokens of the completions only, not those of the prompts.
        self._last_batch = (output[0], output[1]) if self._is_training() else None
        return output

    def _calculate_rewards(self, *inputs: Any) -> torch.Tensor:
        self._last_rewards = super()._calculate_rewards(*inputs)  # of all processes
        return self._last_rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self._ahead_options and self._is_training():
            inputs = self._sample_ahead()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._is_weighted and self._is_training():
            advantages = run_on_main(self._weighted_advantages)
            # TRL's table of completions is of one generation batch, which these replace.
            logged: Any = self._logs["advantages"]
            logged.extend(advantages)
            first = self.accelerator.process_index * len(inputs)
            output["advantages"] = torch.tensor(advantages[first : first + len(inputs)]).to(output["advantages"])
        return output

    def _sample_ahead(self) -> list[dict[str, Any]]:
        """Sample a batch, which TRL's client then returns for these inputs."""
        if self._positions.prompts is None:
            folder = (
                self._darts_callback.checkpoint
                or Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            )
            position = load_position(folder) if self.state.global_step else None
            self._positions.prompts = PromptsAhead(self, self._ahead_options, self._server, position)
        batch = self._positions.prompts.next()
        self._client.sampled_ahead = as_answer(batch)
        return self._positions.prompts.rows(batch)

    def _weighted_advantages(self) -> list[float]:
        """Return those of all processes, on the main one: it has sampled, and all have all rewards."""
        per_function = self._last_rewards
        rewards = (per_function * self.reward_weights.to(per_function)).nansum(dim=1)
        rewards[per_function.isnan().all(dim=1)] = torch.nan
        sampled = self._client.sampled
        if sampled is None:
            raise ValueError("advantages='unbiased' needs prompts without images: those are requested one by one")
        records = sampled.records(self._server)
        scale = self.scale_rewards != "none"
        return weighted_advantages(records, rewards.tolist(), scale=scale, by_pass_rate=self._by_pass_rate)

    def _is_training(self) -> bool:
        """Return whether TRL is training, not evaluating; TRL itself reads the same flag."""
        model: Any = self.model
        return bool(model.training)


class DartsVLLMClient(VLLMClient):  # type: ignore[misc, unused-ignore]  # Any without trl
    """TRL's client, with an API key; it requests unshaped completions while the policy is not in training mode."""

    def __init__(self, *args: Any, api_key: str | None = None, **named: Any) -> None:
        self.is_training: Callable[[], bool] = lambda: True
        self.sampled: SampledGroups | None = None
        """The first completions in training since this was None: later ones are further turns of tool calls."""
        self.sampled_ahead: dict[str, Any] | None = None
        """Completions of the prompts that are requested next."""
        self._api_key = api_key
        super().__init__(*args, **named)

    def generate(self, prompts: Any, *args: Any, **named: Any) -> Any:
        ahead, self.sampled_ahead = self.sampled_ahead, None
        if ahead is None:
            return super().generate(prompts, *args, **named)
        if [list(ids) for ids in prompts] != ahead["prompt_ids"]:
            raise RuntimeError("TRL requests other prompts than those that were sampled ahead")
        return ahead

    def check_server(self, *args: Any, **named: Any) -> None:
        self.session.headers.update(auth_headers(self._api_key))  # TRL's __init__ makes the session, then calls this
        super().check_server(*args, **named)

    def _post(self, url: str, **options: Any) -> Any:
        if not self.is_training():
            return super()._post(url, **without_shaping(options))
        answer = super()._post(url, **options)
        if self.sampled is None and (options.get("json") or {}).get("return_token_ids"):
            self.sampled = SampledGroups.of(answer)
        return answer


class PushingVLLMClient(DartsVLLMClient):
    """Sends weights in the body of `PUT /darts/v1/weights`, tensor by tensor as TRL yields them, with LoRA merged."""

    @property
    def _server(self) -> Server:
        return Server(self.base_url, self._api_key)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Check that the server accepts weights; there is no NCCL communicator."""
        self._server.check_weights()

    def update_named_params(
        self, metadata: Sequence[TensorSpec], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Send new weights; returns when they are served.

        Raises:
            ValueError: a tensor is neither float32, float16 nor bfloat16, such as those of quantized models.
            DartsError: the server refused them, and still samples with the old ones.
        """
        try:
            self._server.push(TensorStream(metadata, named_params))
        finally:
            # At the end of its iterator TRL unmerges LoRA adapters; other processes gather in step with it.
            for _ in named_params:
                pass

    def reset_prefix_cache(self) -> None:
        """Do nothing: the server's update resets the cache."""

    def get_server_info(self) -> Any:
        """Return TRL's answer; from a server without development routes, the one setting that TRL reads from it."""
        try:
            return super().get_server_info()
        except RuntimeError:
            return {"model_config": {"logprobs_mode": self._logprobs_mode()}}

    def _logprobs_mode(self) -> str:
        """Sample with `top_k=1`: the log-prob is 0 if log-probs are those of the distribution after `top_k`."""
        body = {"model": self.model, "prompt": [[0]], "max_tokens": 1, "top_k": 1, "logprobs": 0}
        answer = self._post(f"{self.base_url}/v1/completions", **without_shaping({"json": body}))
        (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
        return "processed_logprobs" if logprob == 0 else "raw_logprobs"


def without_shaping(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request for completions from vLLM alone, without the body's own shaping options."""
    headers = (options.get("headers") or {}) | {"X-Darts-Policy": "off"}
    body = dict(options.get("json") or {})
    if XARGS in body:
        body[XARGS] = {name: value for name, value in body[XARGS].items() if not name.startswith("darts_")}
    return options | {"headers": headers} | ({"json": body} if body else {})


def _check_advantages(advantages: str, baseline: str, args: GRPOConfig) -> None:
    if advantages not in ("group", "unbiased"):
        raise ValueError(f"advantages must be 'group' or 'unbiased', got {advantages!r}")
    if baseline not in ("group", "pass_rate"):
        raise ValueError(f"baseline must be 'group' or 'pass_rate', got {baseline!r}")
    if baseline == "pass_rate" and advantages == "group":
        raise ValueError("baseline='pass_rate' needs advantages='unbiased'")
    if advantages == "group":
        return
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "advantages='unbiased' needs multi_objective_aggregation='sum_then_normalize': the other way "
            "normalizes rewards by the group, which depends on which trajectories were returned"
        )
    if args.mask_truncated_completions:
        raise ValueError(
            "advantages='unbiased' needs mask_truncated_completions=False: truncated completions stand "
            "for others with their weights"
        )


@contextmanager
def _replace_vllm_client(make_client: Callable[..., VLLMClient]) -> Iterator[None]:
    """Let trainers that are made within the block use this client.

    TRL reads the name once in a trainer's life, where its `VLLMGeneration` is made, and has no argument for it.
    """
    setattr(vllm_generation, CLIENT, make_client)
    try:
        yield
    finally:
        setattr(vllm_generation, CLIENT, VLLMClient)
