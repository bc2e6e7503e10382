"""The engine that shapes, in this process and on the tiny model, for tests and benchmarks that look inside.

::

    async with shaping_engine({"uniform": Shaping()}) as engine:
        output = await engine.generate("7a-5b*4>", "an-id", "uniform", n=8)
        engine.records["an-id"].candidates
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind

from darts_server.demo.problems import MAX_RESPONSE_TOKENS
from darts_server.demo.server import FLAGS, MODEL
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.latency import Latency
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.plan import OFF, Limits
from darts_server.rollout.rollouts import Rollouts
from darts_server.store import Store
from darts_server.types import CohortRecord, GroupRecord, RequestOptions
from darts_server.vllm import server
from darts_server.vllm.engine import PromptRequest, VllmPort, VllmRollouts, prompt_key_of
from darts_server.vllm.llm import ShapingLLM


class TinyEngine:
    """The engine, and the record of every group that ended, by request id."""

    def __init__(self) -> None:
        self.llm: ShapingLLM
        self.port: VllmPort
        self.records: dict[str, GroupRecord] = {}
        self.batches: list[CohortRecord] = []
        self.store = Store()
        self.prompts = Prompts(self.store)
        self.latency: Latency

    def candidates_started(self, count: int) -> None:
        """Implements the observer."""

    def group_ended(self, record: GroupRecord) -> None:
        """Implements the observer."""
        self.records[record.group_id] = record

    def cohort_ended(self, record: CohortRecord) -> None:
        """Implements the observer."""
        self.batches.append(record)

    def rollouts(self, port: VllmPort, policies: Mapping[str, Shaping]) -> VllmRollouts:
        """What the engine shapes with."""
        self.port = port
        self.latency = Latency(self.store, port.capacity)
        return Rollouts(
            port, policies, OFF, Limits(1024), self.store, [self], peek_interval=0.005, latency=self.latency
        )

    def prompt(self, text: str) -> Any:
        """The prompt as vLLM's routes hand it to ``generate()``."""
        renderer = self.llm.renderer
        parsed = parse_model_prompt(self.llm.model_config, text)
        (rendered,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        return rendered

    def std(self, text: str) -> float | None:
        """What is known of the spread of the prompt's lengths, in tokens."""
        return self.prompts.std(prompt_key_of(PromptRequest(self.prompt(text), final_only(), "any")))

    async def generate(self, text: str, request_id: str, policy: str, **params: Any) -> RequestOutput:
        """The final output of one request under a named policy."""
        asked = final_only(**params, extra_args={"darts_policy": policy})
        outputs = [output async for output in self.llm.generate(self.prompt(text), asked, request_id)]
        return outputs[-1]


@asynccontextmanager
async def shaping_engine(policies: Mapping[str, Shaping], *flags: str) -> AsyncIterator[TinyEngine]:
    """A running engine with these policies, beside ``off``, which is its default."""
    engine = TinyEngine()
    wiring = server.Wiring(
        rollouts=lambda port, *_: engine.rollouts(port, policies),
        read_options=lambda _: RequestOptions(),
        extend=lambda *_: None,
    )
    async with server.engine(server.parse([str(MODEL), *FLAGS, *flags]), wiring) as engine.llm:
        yield engine


def final_only(**params: Any) -> SamplingParams:
    """Sampling parameters as a request that does not stream has them."""
    defaults = {"temperature": 1.0, "max_tokens": MAX_RESPONSE_TOKENS}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **defaults | params)
