"""Rollouts of TRL's asynchronous trainer with a tool, and weights by `WeightTransfer`."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import aiohttp
from accelerate import PartialState
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer

from darts_client.integrations._trl_names import ROLLOUT_LOOP, find_object
from darts_client.integrations.trl import WeightTransfer
from darts_server.offline.demo.server import MODEL
from tests.trainers.programs.steps import SIZE, TEXTS, Trainer, main

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def add(a: int) -> str:
    """Add.

    Args:
        a: a number.
    """
    return f"{a}a+1b>"


def make_tokenizer() -> Any:
    """The model's, which reads a call of the tool in every answer: the tiny policy makes none."""
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_schema = {}
    tokenizer.parse_response = lambda ids, **_: {
        "role": "assistant",
        "content": tokenizer.decode(ids, skip_special_tokens=True),
        "tool_calls": [CALL],
    }
    return tokenizer


def make_loop(url: str, texts: Sequence[str], size: int, tool_calls: int, loop_class: Any = None) -> Any:
    """TRL's loop of the asynchronous trainer: groups of ``size``; every answer but the last calls the tool."""
    value: Any = SimpleNamespace(value=0)
    metrics: Any = SimpleNamespace(put_nowait=lambda _: None)
    return (loop_class or find_object(*ROLLOUT_LOOP))(
        model_name="tiny",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        processing_class=make_tokenizer(),
        eos_token_ids=[1],
        rollout_buffer=value,
        model_version_value=value,
        heartbeat_value=value,
        failed_event=value,
        exception_info_queue=value,
        metrics_queue=metrics,
        tools=[add],
        num_generations=size,
        max_inflight_tasks=len(texts) * size,
        vllm_server_url=url,
        max_tokens=24,
        max_tool_calling_iterations=tool_calls,
    )


class Trl(Trainer):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        PartialState()
        self._transfer = WeightTransfer(url)
        self._transfer.init_weight_transfer()
        self._loop = make_loop(url, TEXTS[0][:1], SIZE, 1)

    async def rollout(self, step: int) -> None:
        async with aiohttp.ClientSession() as self._loop.session:
            done = await asyncio.gather(*(self._conversation(text) for text in TEXTS[step] for _ in range(SIZE)))
        for _, _, sequences, calls, failures, _ in done:
            assert (calls, failures) == (1, 0)
            assert all(any(each.completion_mask) for each in sequences)

    async def evaluate(self) -> None:
        """It has no evaluation."""

    def _conversation(self, text: str) -> Any:
        return self._loop._generate_one([{"role": "user", "content": text}], {"add": add}, [add])

    async def update(self, folder: str, version: int) -> None:
        self._transfer.pause()
        weights = load_file(f"{folder}/model.safetensors")
        await asyncio.to_thread(self._transfer.send_weights, iter(weights.items()))
        self._transfer.resume()


if __name__ == "__main__":
    main(Trl)
