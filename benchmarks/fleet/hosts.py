"""Hosts of engines that take time and generate nothing of worth: for what is measured or tested in front of them.

    python -m benchmarks.fleet.hosts < JSON of `Scripted`

They send what the host of a real engine sends (`darts_server.vllm.engine_core.holding`): the first token of each
request, then some hundred tokens at a time, the other tokens when the request finishes or is aborted, and counts every
ten milliseconds.
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from darts_server.vllm.engine_core.holding import REPORT_SECONDS, Report, buffer_limit, request_number
from darts_server.vllm.fleet.transport import Connection, Hello, connect

ANSWERS: dict[str, Any] = {"get_supported_tasks": ("generate",), "is_sleeping": False, "reset_prefix_cache": True}
"""What engines answer to calls; ``None`` to all others, and to those of workers that they have no probe."""
TOKEN = 5


class Scripted(msgspec.Struct):
    """``ranks``: a host for each. ``rate``: tokens a second of each engine, of which ``slots`` requests run at once.

    ``mean``: length of a request, exponentially distributed, and bounded by its ``max_tokens``. ``ready``: vLLM's
    message of an engine that is ready.
    """

    host: str
    port: int
    token: str
    ranks: list[int]
    rate: float = 20_000.0
    slots: int = 256
    mean: float = 500.0
    ready: bytes = b""


class ScriptedHost:
    """One host, and its engine."""

    def __init__(self, script: Scripted, rank: int) -> None:
        self.rank, self.calls = rank, list[tuple[str, Any]]()
        self.running: dict[str, EngineCoreRequest] = {}
        self.is_stopped = False
        """Whether it sends nothing, as a process that is stopped."""
        self.is_deaf = False
        """Whether it does nothing that it is told."""
        self._script, self._rng = script, np.random.default_rng(rank)
        self._requests, self._calls_decoder = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._ids: list[str] = []
        # Columns: number, length, tokens that a message has at most.
        self._fixed = np.zeros((0, 3), dtype=np.int64)
        self._count, self._sent = np.zeros(0), np.zeros(0, dtype=np.int64)
        self._last = time.monotonic()
        self.connection: Connection | None = None
        self.answers = dict(ANSWERS)
        self.failures: dict[str, str] = {}
        """Messages of the errors that calls raise, by method."""
        self.tokens = 0
        """That were generated."""
        self.late: list[float] = []
        """Seconds from the end of the candidate that decides its group to the abort of another that was longer then."""
        self._decided: dict[
            str, tuple[float, set[str]]
        ] = {}  # when the last one of each group ended, and the longer ones

    async def run(self) -> None:
        """Connect, and generate until cancelled."""
        script = self._script
        hello = Hello(script.token, self.rank, script.ready, "ipc://nobody")
        self.connection = await connect(script.host, script.port, hello, self)
        self._last = time.monotonic()
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if not self.is_stopped:
                self.step()

    def close(self) -> None:
        """End as a process that is killed."""
        if self.connection is not None:
            self.connection.close("killed")

    def _reply(self, message: EngineCoreOutputs) -> None:
        if self.connection is not None:
            parts: Sequence[Any] = self._encoder.encode(message)
            self.connection.send(parts)

    # --- messages of the coordinator --------------------------------------------

    def message_received(self, parts: list[bytes]) -> None:
        kind, *rest = parts
        if self.is_deaf:
            return
        if kind == EngineCoreRequestType.ADD.value:
            self._add(self._requests.decode(rest))
        elif kind == EngineCoreRequestType.ABORT.value:
            aborted = self._calls_decoder.decode(rest)
            now = time.monotonic()
            for each in aborted:
                then, longer = self._decided.get(group_of(each), (now, set()))
                if each in longer:
                    self.late.append(now - then)
            self._send(self._end([each for each in aborted if each in self.running], FinishReason.ABORT))
        elif kind == EngineCoreRequestType.UTILITY.value:
            _, call, method, args = self._calls_decoder.decode(rest)
            self.calls.append((method, args))
            answer = ["no probe"] if method == "collective_rpc" and "probe" in args[0] else self.answers.get(method)
            if method == "collective_rpc" and answer is None:
                answer = [None]
            output = UtilityOutput(call, self.failures.get(method), UtilityResult(answer))
            self._reply(EngineCoreOutputs(utility_output=output))

    def connection_lost(self, reason: str) -> None:
        self.running.clear()
        self._ids.clear()

    def _add(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        assert params is not None
        length = max(1, min(int(self._rng.exponential(self._script.mean)), params.max_tokens or 1))
        if params.ignore_eos:
            length = params.max_tokens or 1
        number = request_number(params)
        most = buffer_limit(number) if number > 0 else 1
        self.running[request.request_id] = request
        self._ids.append(request.request_id)
        self._fixed = np.vstack([self._fixed, [[number, length, most]]])
        self._count, self._sent = np.append(self._count, 0.0), np.append(self._sent, 0)

    # --- tokens -----------------------------------------------------------------

    def step(self) -> None:
        """Generate for the time that has passed, and send what is due."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if not self._ids:
            return
        slots = min(len(self._ids), self._script.slots)
        self._count[:slots] += elapsed * self._script.rate / slots
        np.minimum(self._count, self._fixed[:, 1], out=self._count)
        counts = self._count.astype(np.int64)
        unsent = counts - self._sent
        ended = counts >= self._fixed[:, 1]
        due = np.flatnonzero(((self._sent == 0) & (counts > 0)) | (unsent >= self._fixed[:, 2]) | ended)
        outputs = [self._output(place, int(counts[place])) for place in due if not ended[place]]
        outputs += self._end([self._ids[place] for place in due if ended[place]], None)
        self._send(outputs)

    def _output(self, place: int, count: int, reason: FinishReason | None = None) -> EngineCoreOutput:
        new, name = count - int(self._sent[place]), self._ids[place]
        self._sent[place] = count
        self.tokens += new
        params, logprobs = self.running[name].sampling_params, None
        if params is not None and params.logprobs is not None and new:
            ids = np.full((new, 1), TOKEN, dtype=np.int32)
            logprobs = LogprobsLists(ids, np.full((new, 1), -0.5, dtype=np.float32), np.ones(new, dtype=np.int32))
        return EngineCoreOutput(name, [TOKEN] * new, new_logprobs=logprobs, finish_reason=reason)

    def _end(self, names: list[str], reason: FinishReason | None) -> list[EngineCoreOutput]:
        """End requests; ``reason``: ``None`` if they have their length, and then ended by themselves or at a limit."""
        places = [self._ids.index(name) for name in names]
        outputs = []
        for place in places:
            params = self.running[self._ids[place]].sampling_params
            is_cut = params is not None and self._fixed[place, 1] == params.max_tokens
            end = reason or (FinishReason.LENGTH if is_cut else FinishReason.STOP)
            outputs.append(self._output(place, int(self._count[place]), end))
            if reason is None:
                group = group_of(self._ids[place])
                others = (at for at, name in enumerate(self._ids) if group_of(name) == group and at not in places)
                longer = {self._ids[at] for at in others if self._count[at] >= self._count[place]}
                self._decided[group] = time.monotonic(), longer
        if places:
            self._ids = [name for place, name in enumerate(self._ids) if place not in places]
            for column in ("_fixed", "_count", "_sent"):
                setattr(self, column, np.delete(getattr(self, column), places, axis=0))
            for name in names:
                del self.running[name]
        return outputs

    def _send(self, outputs: list[EngineCoreOutput]) -> None:
        held = self._fixed[:, 0] > 0
        numbers = array("q", self._fixed[held, 0].tolist()).tobytes()
        counts = array("i", self._count[held].astype(np.int64).tolist()).tobytes()
        self._reply(Report(outputs=outputs, timestamp=time.monotonic(), numbers=numbers, counts=counts))


def group_of(name: str) -> str:
    """Return the group of a request, by vLLM's internal name of it."""
    return name.partition("_")[2].rpartition("-")[0]


async def main() -> None:
    """Run hosts until killed. Prints a line of JSON every second: tokens so far, and new delays of aborts."""
    script = msgspec.json.decode(sys.stdin.buffer.read(), type=Scripted)
    hosts = [ScriptedHost(script, rank) for rank in script.ranks]
    tasks = [asyncio.create_task(host.run()) for host in hosts]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(1.0)
        late = [each for host in hosts for each in host.late]
        for host in hosts:
            host.late.clear()
        print(msgspec.json.encode({"tokens": sum(host.tokens for host in hosts), "late": late}).decode(), flush=True)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
