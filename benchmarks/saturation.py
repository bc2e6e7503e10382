"""Find the rate of tokens that one API process keeps up with, and how late it stops and answers on the way there.

    python -m benchmarks.saturation

The server is `darts-server serve` with the tiny model, but its engine is a script: it "generates" one token with a
log-prob for each of 2,000 sequences at a time, at a chosen rate, as the messages that vLLM's engine sends. They are
decoded and processed as ever; only the socket between the two processes is left out. The callers, in this process, keep
so many groups in flight over HTTP, each a request to ``POST /darts/v1/rollouts``.

Late is measured from the moment at which the engine had the token: until a message has been processed ("token"); until
the other candidates of a group are aborted, from the last token of the one that decided it ("stop"); and until the
answer is passed to the web server, from the last token of the group ("answer"). The event loop is measured by a timer.

Other load on the machine would make everything late. So the server's event loop, and the script, run on a clock of
their own: the CPU time of that thread, and the time in which the loop had nothing to do. All figures are seconds on it:
what they would be on a core of its own, as far as caches and the callers' own speed are the same.
"""

import argparse
import asyncio
import json
import re
import selectors
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qsl

import httpx
import numpy as np

from darts_server.demo.server import Server, serving

RATES = (10_000, 20_000, 30_000, 40_000, 60_000, 80_000, 120_000, 250_000, 500_000)
GROUP_SIZE = 8
CANDIDATES = 12
"""Of a group, by the default redundancy."""
LATE_SECONDS = 0.05
"""Of the event loop, or of tokens: more is saturated."""
BEHIND = 0.97
"""Share of the tokens that were sent which are processed at least."""
GIVES_UP = 0.6
"""Share below which no higher rate is tried."""
LAG_SECONDS = 0.01
SETTLE_SECONDS = 1.0
MAX_TOKENS = 4096
CONTROL = "/benchmark"
GROUP_ID = re.compile(rb'"group_id":"([^"]+)"')
SERVE = "--serve"
FLAGS = ("--max-model-len", str(MAX_TOKENS + 64), "--max-num-seqs", "4096", "--log-level", "WARNING")
HEADS = (
    *(
        "tokens/s sent",
        "processed",
        "CPU of the process",
        "tokens per CPU second",
        "loop late p99, max (ms)",
        "token p99 (ms)",
    ),
    *("stops", "stop p50, p99 (ms)", "answers", "answer p50, p99 (ms)"),
)


# --- in the server's process ------------------------------------------------


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while other processes have the core."""

    def __init__(self) -> None:
        self.idle = 0.0
        super().__init__(_IdleSelector(self))

    def time(self) -> float:
        return time.thread_time() + self.idle


class _IdleSelector(selectors.DefaultSelector):
    def __init__(self, loop: OwnTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic()
        found = super().select(timeout)
        waited = time.monotonic() - began
        # It may get the core again long after its timer was due.
        self._loop.idle += waited if timeout is None else min(waited, max(0.0, timeout))
        return found


def run_on_own_time(main: Any) -> Any:
    with asyncio.Runner(loop_factory=OwnTimeLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Measured:
    """What was measured since the last reset. Seconds, but for counts."""

    began: float = field(default_factory=now)
    cpu: float = field(default_factory=time.process_time)
    sent: int = 0
    processed: int = 0
    scripting: float = 0.0
    lags: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)


class ScriptedCore:
    """Stands in for the engine's process behind vLLM's client ``core``. ``mean``: tokens of a candidate."""

    def __init__(self, core: Any, mean: float) -> None:
        self._core = core
        self._mean = mean
        self._random = Random(0)
        self._running: dict[str, bytes] = {}
        self._groups: dict[str, str] = {}
        self._ends: defaultdict[int, list[str]] = defaultdict(list)
        self._step = 0
        self._finished_at: dict[str, float] = {}
        """The last time at which a candidate of a group had its last token, by group."""
        self.rate = 0.0
        self.measured = Measured()
        self._token, self._last = _encoded_output(finished=False), _encoded_output(finished=True)
        core.add_request_async = self._add
        core.abort_requests_async = self._abort

    async def _add(self, request: Any) -> None:
        name = request.request_id
        # Log-normal. The first ones are at any point of their lengths already, or all would end at the same time.
        length = self._mean * self._random.lognormvariate(-0.125, 0.5) * (self._random.random() if not self.rate else 1)
        self._running[name] = _named(name, self._token)
        self._groups[name] = request.external_req_id.split("_", 1)[1]
        self._ends[self._step + max(1, min(MAX_TOKENS, round(length)))].append(name)

    async def _abort(self, names: Sequence[str]) -> None:
        at = now()
        stopped = {self._groups[name] for name in names if name in self._running}
        self.measured.stops += [at - self._finished_at[group] for group in stopped if group in self._finished_at]
        for name in names:
            self._running.pop(name, None)
            self._groups.pop(name, None)

    @property
    def running(self) -> int:
        return len(self._running)

    def answered(self, group: str) -> None:
        """Count the answer to a group."""
        if (at := self._finished_at.pop(group, None)) is not None:
            self.measured.answers.append(now() - at)

    async def run(self) -> None:
        """Send messages; a failure is the engine's death."""
        try:
            await self._send()
        except Exception as error:
            self._core.outputs_queue.put_nowait(error)
            raise

    async def _send(self) -> None:
        """Send a message for each step when it is due, whether or not the earlier ones have been processed."""
        due = now()
        while True:
            if not self.rate or not self._running:
                await asyncio.sleep(LAG_SECONDS)
                due = now()
                continue
            due += len(self._running) / self.rate
            await asyncio.sleep(max(0.0, due - now()))
            began = time.thread_time()
            frame = self._next_message(min(due, now()))  # timers may be early, by their resolution
            self.measured.scripting += time.thread_time() - began
            self._core.outputs_queue.put_nowait(self._core.decoder.decode([frame]))

    def _next_message(self, at: float) -> bytearray:
        self._step += 1
        ended = [name for name in self._ends.pop(self._step, ()) if name in self._running]
        for name in ended:
            self._running[name] = _named(name, self._last)
            self._finished_at[self._groups[name]] = at
        self.measured.sent += len(self._running)
        outputs = list(self._running.values())
        head = b"\x94\x00\xdd" + len(outputs).to_bytes(4, "big")  # engine 0, a list of outputs, no statistics, the time
        message = bytearray(b"".join([head, *outputs, b"\xc0\xcb", struct.pack(">d", at)]))
        for name in ended:
            del self._running[name], self._groups[name]
        return message

    def watch(self, processor: Any) -> None:
        """Measure when messages have been processed."""
        process = processor.process_outputs

        def process_and_measure(outputs: Any, timestamp: float, stats: Any) -> Any:
            processed = process(outputs, timestamp, stats)
            self.measured.processed += len(outputs)
            self.measured.tokens.append(now() - timestamp)
            return processed

        processor.process_outputs = process_and_measure

    async def watch_loop(self) -> None:
        """Measure how late timers are."""
        while True:
            due = now() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.measured.lags.append(now() - due)


def _encoded_output(*, finished: bool) -> tuple[bytes, bytes]:
    """Encode a candidate's output of one token with its log-prob: what is before its name, and what is behind it."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    one = np.array([[5]], np.int32)
    logprobs = LogprobsLists(one, np.array([[-0.5]], np.float32), np.array([1], np.int32))
    output = EngineCoreOutput("", [5], logprobs, finish_reason=FinishReason.STOP if finished else None)
    frames: Sequence[Any] = MsgpackEncoder().encode(output)
    [frame] = frames
    before, behind = bytes(frame).split(b"\xa0", 1)  # the empty name
    return before, behind


def _named(name: str, output: tuple[bytes, bytes]) -> bytes:
    text, (before, behind) = name.encode(), output
    return before + b"\xd9" + len(text).to_bytes(1, "big") + text + behind


class Control:
    """Takes a rate, returns what was measured at it, and sees when answers are passed to the web server."""

    def __init__(self, app: Any, core: ScriptedCore) -> None:
        self._app = app
        self._core = core

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != CONTROL:
            await self._app(scope, receive, partial(self._observe, send))
            return
        wanted = dict(parse_qsl(scope["query_string"].decode()))
        body: dict[str, Any] = {"running": self._core.running}
        if wanted:
            self._core.rate = float(wanted["rate"])
            await asyncio.sleep(SETTLE_SECONDS)
            self._core.measured = measured = Measured()
            await asyncio.sleep(float(wanted["seconds"]))
            body |= {name: getattr(measured, name) for name in Measured.__slots__}
            body |= {"ended": now(), "cpu": time.process_time() - measured.cpu}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    async def _observe(self, send: Any, message: Any) -> None:
        if message["type"] == "http.response.body" and (found := GROUP_ID.search(message["body"][:4096])):
            self._core.answered(found[1].decode())
        await send(message)


def serve(mean: float, arguments: Sequence[str]) -> int:
    """Run the server with a scripted engine."""
    from darts_server import cli

    uvloop: Any = import_module("uvloop")
    uvloop.run = run_on_own_time
    app: Any = import_module("darts_server.app")
    start, extend = app.start_engine, app.extend
    scripted: list[ScriptedCore] = []

    @asynccontextmanager
    async def start_scripted(args: Any) -> Any:
        async with start(args) as engine:
            core = ScriptedCore(engine.llm.engine_core, mean)
            core.watch(engine.llm.output_processor)
            scripted.append(core)
            tasks = [asyncio.create_task(core.run()), asyncio.create_task(core.watch_loop())]
            yield engine
            for task in tasks:
                task.cancel()

    def extend_observed(application: Any, *rest: Any) -> None:
        extend(application, *rest)
        application.add_middleware(Control, core=scripted[0])

    app.start_engine, app.extend = start_scripted, extend_observed
    return cli.main(["serve", *arguments])


# --- in the callers' process ------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [SERVE]:
        return serve(float(arguments[1]), arguments[2:])
    parser = argparse.ArgumentParser("python -m benchmarks.saturation", description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=2000, help="at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=float, default=400, help="mean of a candidate (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=8, help="of the server's clock, at each rate (default: %(default)s)"
    )
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="tokens/s (default: %(default)s)")
    parser.add_argument("--no-logprobs", action="store_true", help="request none; the engine sends them anyway")
    options = parser.parse_args(arguments)
    from darts_server.demo.server import MODEL

    command = ("benchmarks.saturation", SERVE, str(options.tokens), str(MODEL))
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    with serving(command, Path("out/saturation/server.log"), *FLAGS, env=env) as server:
        rows = asyncio.run(measure(server, options))
    print(report(rows))
    return 0


async def measure(server: Server, options: argparse.Namespace) -> list[tuple[float, float, Mapping[str, Any]]]:
    """Return the rate, the CPU seconds and what the server measured, for each rate."""
    body = {
        "prompts": [{"token_ids": [5, 6, 7], "key": "one"}],
        "group_size": GROUP_SIZE,
        "sampling": {"max_tokens": MAX_TOKENS, "logprobs": None if options.no_logprobs else True},
    }
    rows: list[tuple[float, float, Mapping[str, Any]]] = []
    async with httpx.AsyncClient(
        base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=None), verify=False
    ) as client:

        async def call() -> None:
            while True:
                answer = await client.post("/darts/v1/rollouts", json=body)
                answer.raise_for_status()

        calling = [asyncio.create_task(call()) for _ in range(max(1, options.sequences // CANDIDATES))]
        try:
            while (await client.get(CONTROL)).json()["running"] < len(calling) * CANDIDATES:
                await asyncio.sleep(SETTLE_SECONDS)
            for rate in options.rates:
                answer = await client.get(CONTROL, params={"rate": rate, "seconds": options.seconds})
                answer.raise_for_status()
                found = answer.json()
                rows.append((float(rate), found["cpu"], found))
                print(report(rows[-1:]).splitlines()[-1], file=sys.stderr)
                if found["processed"] < GIVES_UP * found["sent"]:
                    break  # what is left waits for longer and longer
                if any(task.done() for task in calling):
                    raise RuntimeError(f"a caller failed: {next(task for task in calling if task.done()).exception()}")
        finally:
            for task in calling:
                task.cancel()
            await asyncio.gather(*calling, return_exceptions=True)
    return rows


def report(rows: Sequence[tuple[float, float, Mapping[str, Any]]]) -> str:
    """Format the table, and say where the process is saturated."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    saturated = None
    for rate, cpu, found in rows:
        seconds = found["ended"] - found["began"]
        late, token = percentile(found["lags"], 99), percentile(found["tokens"], 99)
        share = found["processed"] / max(1, found["sent"])
        used = cpu - found["scripting"]
        cells = [
            f"{rate:,.0f}",
            f"{found['processed'] / seconds:,.0f}",
            f"{used / seconds:.0%}",
            f"{found['processed'] / max(used, 1e-9):,.0f}",
            f"{late * 1e3:.0f}, {percentile(found['lags'], 100) * 1e3:.0f}",
            f"{token * 1e3:.0f}",
            *_counted(found["stops"]),
            *_counted(found["answers"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if saturated is None and (late > LATE_SECONDS or token > LATE_SECONDS or share < BEHIND):
            saturated = rate
    end = "at none of these rates" if saturated is None else f"from {saturated:,.0f} tokens/s on"
    return "\n".join([*lines, "", f"Saturated {end}."]) if len(rows) != 1 else "\n".join(lines)


def _counted(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "0", ""
    return str(len(seconds)), f"{percentile(seconds, 50) * 1e3:.1f}, {percentile(seconds, 99) * 1e3:.1f}"


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


if __name__ == "__main__":
    sys.exit(main())
