"""One rollout under one policy: all prompts at once, each with the lengths that the trace gives its candidates."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from benchmarks.gpu.bench import Bench, all_of, cpu_seconds, number_of
from benchmarks.gpu.policies import AGAIN, PLAIN, SHAPED, SIZE, UNSHAPED, statistics
from benchmarks.gpu.records import Records
from benchmarks.gpu.traces import Trace
from darts_server.rollout.learned.prompts import KIND
from darts_server.types import FinishReason, GroupRecord


@dataclass
class Outcome:
    """What one rollout did. Times are of ``time.perf_counter()``; ``decided``: when each group was, by prompt."""

    policy: str
    began: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    candidates: int = 0
    generated: int = 0
    returned: list[int] = field(default_factory=list)
    decided: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def share_decided(self, share: float) -> float:
        """Seconds until that share of the groups was decided."""
        times = sorted(self.decided.values())
        return times[min(len(times) - 1, int(share * len(times)))] - self.began


async def rollout(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    """From an engine that has nothing to do to the last group.

    Raises:
        TimeoutError: it took longer than ``limit`` seconds.
        AssertionError: a trajectory has another length than it should.
    """
    await bench.quiet()
    if policy in UNSHAPED:
        return await _unshaped(bench, policy, trace, limit)
    return await _shaped(bench, policy, trace, limit)


async def _unshaped(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    """Each trajectory is a request of its own, since a request has one length for all of its choices."""
    plain = policy in (PLAIN, AGAIN)
    bench.shape_nothing(plain=plain)
    outcome, asked = Outcome(policy), []
    for i, prompt in enumerate(trace.prompts):
        for j, length in enumerate(prompt.lengths[:SIZE]):
            asked.append((i, bench.params(length), f"{policy}-{j}-{i}"))
    outputs = await _timed(bench, outcome, asked, limit, plain=plain)
    outcome.generated, outcome.candidates = sum(outcome.returned), len(outputs)
    return outcome


async def _shaped(bench: Bench, policy: str, trace: Trace, limit: float) -> Outcome:
    records, store = Records(), bench.empty_store()
    for i, prompt in enumerate(trace.prompts):
        store.put(KIND, f"prompt-{i}", asdict(statistics(prompt, trace)))

    def length(request_id: str, index: int) -> tuple[int, FinishReason]:
        tokens = trace.prompts[number_of(request_id)].length(index)
        return tokens, trace.reason(tokens)

    bench.shape_with({policy: SHAPED[policy]}, store, length, [records])
    outcome, asked = Outcome(policy), []
    for i in range(len(trace.prompts)):
        params = bench.params(trace.cap, SIZE, darts_policy=policy, darts_prompt_key=f"prompt-{i}")
        asked.append((i, params, f"{policy}-{i}"))
    await _timed(bench, outcome, asked, limit)
    _check(trace, records.groups)
    outcome.generated, outcome.candidates = records.generated, records.candidates
    return outcome


async def _timed(
    bench: Bench,
    outcome: Outcome,
    asked: Sequence[tuple[int, SamplingParams, str]],
    limit: float,
    *,
    plain: bool = False,
) -> list[RequestOutput]:
    """Ask for all, each a prompt, its parameters and a name, and note when and at what cost they came."""

    async def one(prompt: int, params: SamplingParams, name: str) -> RequestOutput:
        output = await bench.ask(prompt, params, name, plain=plain)
        outcome.decided[prompt] = time.perf_counter()  # the last one's, if a group is several requests
        return output

    for prompt, _, _ in asked:
        bench.prompt(prompt)  # made before the clock runs
    outcome.began, used = time.perf_counter(), cpu_seconds()
    outputs = await all_of((one(*request) for request in asked), limit)
    outcome.ended, outcome.cpu = time.perf_counter(), cpu_seconds() - used
    outcome.returned = [len(choice.token_ids) for output in outputs for choice in output.outputs]
    return outputs


def _check(trace: Trace, groups: Sequence[GroupRecord]) -> None:
    """Whether every trajectory has the length that the trace, or the deadline, gives it."""
    for record in groups:
        prompt = trace.prompts[number_of(record.group_id)]
        for candidate in record.selected:
            length = prompt.length(candidate.index)
            if candidate.tokens != length and not (candidate.cut and candidate.tokens < length):
                raise AssertionError(f"{record.group_id}: {candidate} should have {length} tokens")
