"""A shaping engine on the tiny model in this process, for tests and benchmarks that inspect it.

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

from darts_server.http.options import merge_options
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS
from darts_server.offline.demo.server import FLAGS, MODEL
from darts_server.policy.shaping import Shaping
from darts_server.records import CohortRecord, GroupRecord
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.plan import Limits, Planner
from darts_server.rollout.rollouts import Intervals, Rollouts
from darts_server.store import Store
from darts_server.types import OFF
from darts_server.vllm.api.engine import VllmPort
from darts_server.vllm.api.launch import start_engine
from darts_server.vllm.api.llm import ShapingLLM
from darts_server.vllm.flags import parse
from darts_server.vllm.requests.prompt_request import PromptRequest


class TinyEngine:
    """A shaping engine, with the record of every finished group by request id."""

    def __init__(self) -> None:
        self.llm: ShapingLLM
        self.port: VllmPort
        self.records: dict[str, GroupRecord] = {}
        self.cohorts: list[CohortRecord] = []
        self.store = Store()
        self.statistics: Statistics

    def group_ended(self, record: GroupRecord) -> None:
        self.records[record.group_id] = record

    def prompt(self, text: str) -> Any:
        """Return the prompt in the form in which vLLM's routes pass it to ``generate()``."""
        renderer = self.llm.renderer
        parsed = parse_model_prompt(self.llm.model_config, text)
        (rendered,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        return rendered

    def std(self, text: str) -> float | None:
        """Return the learned standard deviation of the prompt's lengths, in tokens."""
        stats = self.statistics.prompts.load(PromptRequest(self.prompt(text), final_only(), "any").prompt_key)
        return None if stats is None else stats.std_ema

    async def generate(self, text: str, request_id: str, policy: str, **params: Any) -> RequestOutput:
        """Run one request under a named policy, and return its final output."""
        sampling = final_only(**params, extra_args={"darts_policy": policy})
        outputs = [output async for output in self.llm.generate(self.prompt(text), sampling, request_id)]
        return outputs[-1]


@asynccontextmanager
async def shaping_engine(policies: Mapping[str, Shaping], *flags: str) -> AsyncIterator[TinyEngine]:
    """Run an engine with these policies and ``off``, the default."""
    engine = TinyEngine()
    async with start_engine(parse([str(MODEL), *FLAGS, *flags])) as running:
        engine.llm = running.llm
        engine.port = running.port
        engine.statistics = Statistics(engine.store, engine.port.capacity)
        planner = Planner(policies, OFF, Limits(1024))
        rollouts = Rollouts(running.port, planner, engine.statistics, Intervals(poll=0.005))
        rollouts.observers.group_ended.add(engine.group_ended)
        rollouts.observers.cohort_ended.add(engine.cohorts.append)
        running.serve_groups(rollouts, merge_options)
        yield engine


def final_only(**params: Any) -> SamplingParams:
    """Return the sampling parameters of a request that does not stream."""
    defaults = {"temperature": 1.0, "max_tokens": MAX_RESPONSE_TOKENS}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **defaults | params)
