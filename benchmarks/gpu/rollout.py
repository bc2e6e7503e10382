"""Run a rollout under one policy: all prompts at once, with the candidates' lengths from the trace."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench, cpu_seconds, gather_within, prompt_number
from benchmarks.gpu.policies import AGAIN, PLAIN, SHAPED, SIZE, UNSHAPED, statistics
from benchmarks.gpu.records import Records
from benchmarks.gpu.traces import Trace
from darts_server.records import GroupRecord
from darts_server.rollout.learned.statistics import KIND
from darts_server.types import FinishReason
from darts_server.vllm.prompt_request import PromptRequest


@dataclass
class Outcome:
    """The result of a rollout. Times are of ``time.perf_counter()``; ``complete``: of each group, by prompt."""

    policy: str
    start: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    candidates: int = 0
    generated: int = 0
    returned: list[int] = field(default_factory=list)
    complete: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def seconds_to(self, share: float) -> float:
        """Return the seconds until this share of the groups was complete."""
        times = sorted(self.complete.values())
        return times[min(len(times) - 1, int(share * len(times)))] - self.start


async def run_rollout(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    """Run a rollout on an idle engine, until the last group is complete.

    Raises:
        TimeoutError: it took longer than ``limit`` seconds.
        AssertionError: a trajectory does not have its length.
    """
    await bench.drain()
    if policy in UNSHAPED:
        return await _unshaped(bench, policy, trace, limit)
    return await _shaped(bench, policy, trace, limit)


async def _unshaped(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    """Send each trajectory as a request of its own, since all choices of a request have one length."""
    plain = policy in (PLAIN, AGAIN)
    bench.shape_nothing(plain=plain)
    outcome, requests = Outcome(policy), []
    for i, prompt in enumerate(trace.prompts):
        for j, length in enumerate(prompt.lengths[:SIZE]):
            requests.append((i, bench.params(length), f"{policy}-{j}-{i}"))
    outputs = await _run_timed(bench, outcome, requests, limit, plain=plain)
    outcome.generated, outcome.candidates = sum(outcome.returned), len(outputs)
    return outcome


async def _shaped(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    records, store = Records(), bench.empty_store()
    for i, prompt in enumerate(trace.prompts):
        store.put(KIND, f"prompt-{i}", asdict(statistics(prompt, trace)))

    def length(request: PromptRequest, index: int, resumed: bool) -> tuple[int, FinishReason]:
        tokens = trace.prompts[prompt_number(request.request_id)].length(index)
        return tokens, trace.reason(tokens)

    bench.shape_with({policy: SHAPED[policy]}, store, length, records.groups)
    outcome, requests = Outcome(policy), []
    for i in range(len(trace.prompts)):
        params = bench.params(trace.cap, SIZE, darts_policy=policy, darts_prompt_key=f"prompt-{i}")
        requests.append((i, params, f"{policy}-{i}"))
    await _run_timed(bench, outcome, requests, limit)
    _check_lengths(trace, records.groups)
    outcome.generated, outcome.candidates = records.generated, records.candidates
    return outcome


async def _run_timed(
    bench: Bench,
    outcome: Outcome,
    requests: Sequence[tuple[int, SamplingParams, str]],
    limit: float,
    *,
    plain: bool = False,
) -> list[RequestOutput]:
    """Send all requests (prompt, parameters, name), and record their time and CPU cost."""

    async def one(prompt: int, params: SamplingParams, name: str) -> RequestOutput:
        output = await bench.request(prompt, params, name, plain=plain)
        outcome.complete[prompt] = time.perf_counter()  # of the last one, if a group is several requests
        return output

    for prompt, _, _ in requests:
        bench.prompt(prompt)  # rendered before the clock starts
    outcome.start, used = time.perf_counter(), cpu_seconds()
    outputs = await gather_within((one(*request) for request in requests), limit)
    outcome.end, outcome.cpu = time.perf_counter(), cpu_seconds() - used
    outcome.returned = [len(choice.token_ids) for output in outputs for choice in output.outputs]
    return outputs


def _check_lengths(trace: Trace, groups: Sequence[GroupRecord]) -> None:
    """Check that every trajectory has its length from the trace, or was cut at the deadline."""
    for record in groups:
        prompt = trace.prompts[prompt_number(record.group_id)]
        for candidate in record.selected:
            length = prompt.length(candidate.index)
            if candidate.tokens != length and not (candidate.cut and candidate.tokens < length):
                raise AssertionError(f"{record.group_id}: {candidate} should have {length} tokens")
