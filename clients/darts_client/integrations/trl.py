"""TRL's GRPOTrainer against darts-server: needs the extra `darts-client[trl]`, and vLLM, which TRL asks for.

```python
trainer = DartsGRPOTrainer(
    model="Qwen/Qwen3-8B",
    reward_funcs=report_rewards(right),
    args=GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://127.0.0.1:8000"),
    train_dataset=dataset,
)
```

Nothing of TRL 1.16 is edited or copied. The trainer is TRL's own; its `VLLMClient`, the one object in it that talks to
the server, is a subclass of TRL's, put into its place while the trainer is made. On a GPU with NCCL TRL's own trainer
needs the server's address alone; what this one adds is in docs/trl.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

try:
    import torch
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(f"{exc.msg}: this needs darts-client[trl]", name=exc.name) from exc

from .._connection import auth_headers
from .._errors import NotFound
from ._callback import DartsCallback
from ._link import Link
from ._reporting import RewardReport, Sampled, report_rewards, reports
from ._tensors import Announced, TensorStream

__all__ = ["DartsCallback", "DartsGRPOTrainer", "RewardReport", "report_rewards"]

XARGS = "vllm_xargs"
CLIENT = "VLLMClient"


class DartsGRPOTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """TRL's trainer, which pushes weights without NCCL, evaluates unshaped, reports rewards, and has a `DartsCallback`.

    The arguments are TRL's; `args` must have `use_vllm=True` and `vllm_mode="server"`. With `weight_sync="nccl"`
    weights go TRL's way. Functions wrapped by `report_rewards` report while training, and never in evaluation;
    `reward_reports` has what became of their rewards.

    Raises:
        ValueError: vLLM is not used, or in this process.
        DartsError: the server is no darts-server; in training, new weights were refused or did not arrive.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        weight_sync: Literal["http", "nccl"] = "http",
        api_key: str | None = None,
        **named: Any,
    ) -> None:
        if args is None or not args.use_vllm or args.vllm_mode != "server":
            raise ValueError("args must have use_vllm=True and vllm_mode='server'")
        if weight_sync not in ("http", "nccl"):
            raise ValueError(f"weight_sync must be 'http' or 'nccl', got {weight_sync!r}")
        kind = PushingClient if weight_sync == "http" else DartsVLLMClient
        with _in_place_of_trls(partial(kind, api_key=api_key)):
            super().__init__(model, reward_funcs, args, *more, **named)
        self._sampled: Sampled | None = None
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        if self.accelerator.is_main_process:
            client: Any = self.vllm_generation.vllm_client
            client.training = self._in_training
        self.reward_reports = reports(self.reward_funcs)
        for report in self.reward_reports:
            report.bind(Link(url, api_key), lambda: self._sampled)
        self._darts = DartsCallback(url, api_key)
        self.callback_handler.callbacks.insert(0, self._darts)  # before the reporters, which log what they are given

    def train(self, resume_from_checkpoint: str | bool | None = None, *more: Any, **named: Any) -> Any:
        """TRL's; the server's state is restored from the same checkpoint."""
        self._darts.checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        return super().train(resume_from_checkpoint, *more, **named)

    def _generate(self, prompts: list[Any]) -> Any:
        answer = super()._generate(prompts)
        # Reward functions are given the completions' tokens, and not the prompts'.
        self._sampled = (answer[0], answer[1]) if self._in_training() else None
        return answer

    def _in_training(self) -> bool:
        """As TRL tells training from evaluation."""
        model: Any = self.model
        return bool(model.training)


class DartsVLLMClient(VLLMClient):  # type: ignore[misc, unused-ignore]
    """TRL's client, which has an API key and asks for unshaped completions whenever the policy is not in training."""

    def __init__(self, *args: Any, api_key: str | None = None, **named: Any) -> None:
        self.training: Callable[[], bool] = lambda: True
        self._api_key = api_key
        super().__init__(*args, **named)

    def check_server(self, *args: Any, **named: Any) -> None:
        self.session.headers.update(auth_headers(self._api_key))  # TRL's __init__ makes the session, then calls this
        super().check_server(*args, **named)

    def _post(self, url: str, **options: Any) -> Any:
        return super()._post(url, **(options if self.training() else unshaped(options)))


class PushingClient(DartsVLLMClient):
    """Sends weights in the body of `PUT /darts/v1/weights`, tensor by tensor as TRL gives them: adapters merged."""

    @property
    def _link(self) -> Link:
        return Link(self.base_url, self._api_key)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """There is no communicator; only whether the server takes weights is asked."""
        try:
            self._link.weights()
        except NotFound as error:
            raise NotFound(f"{self.base_url} has no /darts/v1/weights: is it a darts-server?") from error

    def update_named_params(
        self, metadata: Sequence[Announced], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Send new weights; returns when they are served.

        Raises:
            ValueError: a tensor is neither float32, float16 nor bfloat16, as those of quantized models.
            DartsError: the server did not take them, and samples with the old ones.
        """
        try:
            stream = TensorStream(metadata, named_params)
            self._link.push(stream, stream.size)
        finally:
            for _ in named_params:  # at its end TRL takes adapters out again, and other processes gather with it
                pass

    def reset_prefix_cache(self) -> None:
        """The server's update has done that."""

    def get_server_info(self) -> Any:
        """TRL's; of a server without the development routes, the one setting that TRL looks at in it."""
        try:
            return super().get_server_info()
        except RuntimeError:
            return {"model_config": {"logprobs_mode": self._logprobs_mode()}}

    def _logprobs_mode(self) -> str:
        """The only token that may be drawn has a log-prob of 0, if log-probs are of what is drawn from."""
        asked = {"model": self.model, "prompt": [[0]], "max_tokens": 1, "top_k": 1, "logprobs": 0}
        answer = self._post(f"{self.base_url}/v1/completions", **unshaped({"json": asked}))
        (logprob,) = answer["choices"][0]["logprobs"]["token_logprobs"]
        return "processed_logprobs" if logprob == 0 else "raw_logprobs"


def unshaped(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a request, for completions as vLLM alone gives them: what it asks of shaping is taken out."""
    headers = (options.get("headers") or {}) | {"X-Darts-Policy": "off"}
    body = dict(options.get("json") or {})
    if XARGS in body:
        body[XARGS] = {name: value for name, value in body[XARGS].items() if not name.startswith("darts_")}
    return options | {"headers": headers} | ({"json": body} if body else {})


@contextmanager
def _in_place_of_trls(make_client: Callable[..., VLLMClient]) -> Iterator[None]:
    """Trainers that are made meanwhile get this client.

    The name is looked up once in a trainer's life, where its `VLLMGeneration` is made; TRL has no argument for it.
    """
    setattr(vllm_generation, CLIENT, make_client)
    try:
        yield
    finally:
        setattr(vllm_generation, CLIENT, VLLMClient)
