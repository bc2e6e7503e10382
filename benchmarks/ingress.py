"""Measure what an ingress adds to a request, and how many requests it forwards.

    python -m benchmarks.ingress
    python -m benchmarks.ingress --tokens 1000 --ingresses 2 --servers 1 4 16 --rounds 3 --requests 100 --callers 16

The servers behind it answer every request at once, with the same JSON, so all that is measured is the way there and
back: a small one, or with ``--tokens`` one with so many tokens in each of eight trajectories, and their log-probs.
Direct requests and those through the ingress take turns, round by round, so that other load on the machine affects
both. Throughput is that of one ingress process, or of several, with 1 to 16 servers; on a machine with few cores the
servers and the caller take a part of them from the ingress, whose own CPU time per request is therefore shown too.
"""

import argparse
import asyncio
import functools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import httpx
import numpy as np
import psutil
from starlette.types import Receive, Scope, Send

REPLICAS = (1, 2, 4, 8, 16)
START_SECONDS = 60.0
HOST = "127.0.0.1"
TRAJECTORIES = 8
BODY = json.dumps({"model": "m", "prompt": "What is three plus four?", "n": 8, "max_tokens": 1}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + (
    b"content-length: %d\r\n\r\n" % len(BODY) + BODY
)
SERVE = ["-m", "benchmarks.ingress", "--serve"]
HEADS = ("servers", "direct ms p50, p99", "through the ingress", "added p50", "requests/s", "CPU ms a request")


def answer_with(tokens: int) -> bytes:
    """Return an answer of ``/v1/completions`` with so many tokens in each trajectory; a small one for 0."""
    if not tokens:
        choices = [{"index": 0, "text": "7", "finish_reason": "stop"}]
        return json.dumps({"id": "cmpl-1", "choices": choices, "usage": {"completion_tokens": 1}}).encode()
    rng = np.random.default_rng(0)
    choices = []
    for index in range(TRAJECTORIES):
        words = [f" w{number}" for number in rng.integers(0, 10_000, tokens)]
        logprobs = [-float(each) for each in rng.exponential(0.5, tokens)]
        choices.append(
            {
                "index": index,
                "text": "".join(words),
                "token_ids": rng.integers(0, 150_000, tokens).tolist(),
                "logprobs": {
                    "text_offset": np.cumsum([0, *map(len, words[:-1])]).tolist(),
                    "tokens": words,
                    "token_logprobs": logprobs,
                    "top_logprobs": [{word: each} for word, each in zip(words, logprobs, strict=True)],
                },
                "finish_reason": "stop",
            }
        )
    usage = {"completion_tokens": TRAJECTORIES * tokens}
    return json.dumps({"id": "cmpl-1", "choices": choices, "usage": usage}, separators=(",", ":")).encode()


async def trivial_server(answer: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with the same JSON."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.ingress", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="one after the other, a round (default: %(default)s)")
    parser.add_argument("--callers", type=int, default=64, help="at a time, for throughput (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=0,
        help=f"in each of the {TRAJECTORIES} trajectories of an answer, with log-probs; 0 for a small answer (default)",
    )
    parser.add_argument("--ingresses", type=int, default=1, help="processes, which share the callers (default: 1)")
    parser.add_argument(
        "--servers", type=int, nargs="+", default=REPLICAS, help="one row for each number (default: 1 2 4 8 16)"
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    answer = answer_with(options.tokens)
    if options.serve is not None:
        return _serve(options.serve, answer)
    print(f"answers of {len(answer):,} bytes, {options.ingresses} ingress processes\n")
    print(asyncio.run(measure(options)))
    return 0


async def measure(options: argparse.Namespace) -> str:
    """Measure all rows, and return the table and by which power of the number of servers the throughput grows."""
    rounds, requests, callers = options.rounds, options.requests, options.callers
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    each = max(1, requests // 10)
    throughput = {}
    for count in options.servers:
        with ExitStack() as stack:
            serve = [*SERVE[:-1], "--tokens", str(options.tokens), SERVE[-1]]
            servers = [stack.enter_context(running(serve)) for _ in range(count)]
            urls = ",".join(f"http://{HOST}:{port}" for port, _ in servers)
            command = ["-m", "darts_server", "ingress", "--server-list", urls, "--log-level", "ERROR", "--port"]
            ingresses = [stack.enter_context(running(command)) for _ in range(options.ingresses)]
            ports, processes = [port for port, _ in ingresses], [process for _, process in ingresses]
            port = ports[0]
            direct: list[float] = []
            through: list[float] = []
            await asyncio.gather(latencies(servers[0][0], 50), latencies(port, 50))  # warms up
            for _ in range(rounds):
                direct += await latencies(servers[0][0], requests)
                through += await latencies(port, requests)
            cpu, rates = sum(map(cpu_seconds, processes)), []
            for _ in range(rounds):
                began = time.perf_counter()
                await asyncio.gather(*(latencies(ports[at % len(ports)], each) for at in range(callers)))
                rates.append(callers * each / (time.perf_counter() - began))
            cost = (sum(map(cpu_seconds, processes)) - cpu) / (rounds * callers * each)
        throughput[count] = statistics.median(rates)
        added = (statistics.median(through) - statistics.median(direct)) * 1e3
        row = [
            count,
            shown(direct),
            shown(through),
            f"{added:.2f}",
            f"{throughput[count]:.0f}",
            f"{cost * 1e3:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, row))} |")
    if len(throughput) > 1:
        lines.append(f"\nrequests/s grow by the {exponent(throughput):.2f}th power of the number of servers")
    return "\n".join(lines)


def exponent(throughput: Mapping[int, float]) -> float:
    """Fit the power of the number of servers by which the throughput grows."""
    return float(np.polyfit(np.log(list(throughput)), np.log(list(throughput.values())), 1)[0])


def shown(seconds: Sequence[float]) -> str:
    """Format median and 99th percentile, in milliseconds."""
    return f"{statistics.median(seconds) * 1e3:.2f}, {statistics.quantiles(seconds, n=100)[98] * 1e3:.2f}"


async def latencies(port: int, count: int) -> list[float]:
    """Send requests one after the other on one connection; return the seconds that each took."""
    reader, writer = await asyncio.open_connection(HOST, port)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length.split(b":")[1]))
        found.append(time.perf_counter() - began)
    writer.close()
    return found


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


@contextmanager
def running(command: Sequence[str]) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a server that takes its port as the last argument, until the block ends."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, *command, str(port)])
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://{HOST}:{port}/health", verify=False).status_code == 200:
                    break
            time.sleep(0.05)
        yield port, process
    finally:
        process.terminate()
        process.wait()


def _serve(port: int, answer: bytes) -> int:
    import uvicorn

    app = functools.partial(trivial_server, answer)
    uvicorn.run(app, host=HOST, port=port, log_level="warning", access_log=False, lifespan="off", interface="asgi3")
    return 0


if __name__ == "__main__":
    sys.exit(main())
