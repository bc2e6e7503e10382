"""ms-swift's client of vLLM servers, for a darts-server.

ms-swift's own client needs the routes of `swift rollout`, and sends weights by NCCL, which needs a GPU.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import httpx
import torch
from safetensors.torch import save
from swift.infer_engine.protocol import RolloutOutput
from swift.rlhf_trainers import VLLMInferClient

from darts_client import Client

SECONDS = 600.0
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


class DartsClient(VLLMInferClient):
    """`VLLMClient` of ms-swift with one server. The weights of a step are pushed as one file."""

    use_async_engine = enable_multi_turn = enable_lora = use_gym_env = False

    def __init__(self, base_urls: Sequence[str], **options: Any) -> None:
        del options
        super().__init__(base_urls=base_urls)
        self._darts = Client(base_urls[0], timeout=SECONDS)
        self._http = httpx.Client(base_url=base_urls[0], timeout=SECONDS)
        self._weights: dict[str, torch.Tensor] = {}

    def infer(
        self, infer_requests: Sequence[Mapping[str, Any]], request_config: Mapping[str, Any], **options: Any
    ) -> list[RolloutOutput]:
        """Request the trajectories of a prompt, which stand side by side, as one group."""
        del options
        groups = [list(group) for _, group in groupby(infer_requests, key=lambda each: each["messages"])]
        sampling = {name: request_config[name] for name in SAMPLING if request_config[name] is not None}

        def request(group: list[Mapping[str, Any]]) -> list[RolloutOutput]:
            body = {"messages": group[0]["messages"], "n": len(group), "logprobs": True, "return_token_ids": True}
            response = self._http.post("/v1/chat/completions", json=body | sampling)
            response.raise_for_status()
            answer = response.json()
            return [RolloutOutput(response=answer | {"choices": [choice]}) for choice in answer["choices"]]

        with ThreadPoolExecutor(len(groups)) as pool:
            return [output for outputs in pool.map(request, groups) for output in outputs]

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        self._weights[name] = weights.detach().clone()

    def process_weights_after_loading(self) -> None:
        """Push the weights. ms-swift calls this after the last tensor of a step."""
        self._darts.weights.push(save(self._weights))
        self._weights = {}

    def _ignore(self, device: object = None) -> None:
        """The server needs no communicator, and drops its caches by itself."""

    init_communicator = close_communicator = get_engine_type = _ignore
    reset_mm_cache = reset_prefix_cache = reset_encoder_cache = _ignore
