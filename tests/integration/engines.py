"""The engine that shapes, in this process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from darts_server.policy.shaping import Shaping, Tail
from darts_server.rollout.rollouts import Limits, Rollouts
from darts_server.types import GroupRecord, RequestOptions
from darts_server.vllm import server
from darts_server.vllm.llm import ShapingLLM
from darts_server.vllm.requests import _options
from examples.tiny_rl.server import FLAGS, MODEL

SHAPINGS = {
    "sampled": Shaping(redundancy=1.5, num_longest=1, tail=Tail.SAMPLED),
    "longest": Shaping(redundancy=1.5, num_longest=1, tail=Tail.LONGEST),
    "shortest": Shaping(redundancy=1.5, num_longest=0),
}


class Recorder:
    """Keeps the records of ended groups by id."""

    def __init__(self) -> None:
        self.records: dict[str, GroupRecord] = {}

    def candidates_started(self, count: int) -> None:
        pass

    def group_ended(self, record: GroupRecord) -> None:
        self.records[record.group_id] = record


@asynccontextmanager
async def shaping_engine(*flags: str) -> AsyncIterator[tuple[ShapingLLM, Recorder]]:
    recorder = Recorder()
    wiring = server.Wiring(
        rollouts=lambda engine, _: Rollouts(engine, SHAPINGS, "sampled", Limits(1024), recorder, peek_interval=0.005),
        read_options=lambda _: RequestOptions(),
        extend=lambda _: None,
    )
    async with server.engine(server.parse([str(MODEL), *FLAGS, *flags]), wiring) as llm:
        yield llm, recorder


def prompt(llm: ShapingLLM, text: str) -> Any:
    """The prompt as vLLM's routes hand it to ``generate()``."""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    (rendered,) = llm.renderer.render_cmpl(
        [parse_model_prompt(llm.model_config, text)], llm.renderer.default_cmpl_tok_params
    )
    return rendered


async def generate(llm: ShapingLLM, text: str, request_id: str, policy: str, **params: Any) -> RequestOutput:
    """The final output of one request under a named policy."""
    token = _options.set(RequestOptions(policy=policy))
    try:
        outputs = llm.generate(prompt(llm, text), final_only(**params), request_id)
    finally:
        _options.reset(token)
    return [output async for output in outputs][-1]


def final_only(**params: Any) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **{"temperature": 1.0, "max_tokens": 256} | params)
