"""Measure what an ingress adds to a request, and how many requests it forwards.

    python -m benchmarks.ingress

The servers behind it answer every request at once, with the same small JSON, so all that is measured is the way there
and back. Direct requests and those through the ingress take turns, round by round, so that other load on the machine
affects both. Throughput is that of one ingress process with 1 to 16 servers; on a machine with few cores the servers
and the caller take a part of them from the ingress, whose own CPU time per request is therefore shown too.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import httpx
import psutil
from starlette.types import Receive, Scope, Send

REPLICAS = (1, 2, 4, 8, 16)
START_SECONDS = 60.0
HOST = "127.0.0.1"
ANSWER = json.dumps(
    {"id": "cmpl-1", "choices": [{"index": 0, "text": "7", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
).encode()
BODY = json.dumps({"model": "m", "prompt": "What is three plus four?", "n": 8, "max_tokens": 1}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + (
    b"content-length: %d\r\n\r\n" % len(BODY) + BODY
)
SERVE = ["-m", "benchmarks.ingress", "--serve"]
HEADS = ("servers", "direct ms p50, p99", "through the ingress", "added p50", "requests/s", "CPU ms a request")


async def trivial_server(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with the same JSON."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.ingress", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="one after the other, a round (default: %(default)s)")
    parser.add_argument("--callers", type=int, default=64, help="at a time, for throughput (default: %(default)s)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        return _serve(options.serve)
    print(asyncio.run(measure(options.rounds, options.requests, options.callers)))
    return 0


async def measure(rounds: int, requests: int, callers: int) -> str:
    """Measure all rows, and return the table."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    each = max(1, requests // 10)
    for count in REPLICAS:
        with ExitStack() as stack:
            servers = [stack.enter_context(running(SERVE)) for _ in range(count)]
            urls = ",".join(f"http://{HOST}:{port}" for port, _ in servers)
            command = ["-m", "darts_server", "ingress", "--server-list", urls, "--log-level", "WARNING", "--port"]
            port, process = stack.enter_context(running(command))
            direct: list[float] = []
            through: list[float] = []
            await asyncio.gather(latencies(servers[0][0], 50), latencies(port, 50))  # warms up
            for _ in range(rounds):
                direct += await latencies(servers[0][0], requests)
                through += await latencies(port, requests)
            cpu, rates = cpu_seconds(process), []
            for _ in range(rounds):
                began = time.perf_counter()
                await asyncio.gather(*(latencies(port, each) for _ in range(callers)))
                rates.append(callers * each / (time.perf_counter() - began))
            cost = (cpu_seconds(process) - cpu) / (rounds * callers * each)
        added = (statistics.median(through) - statistics.median(direct)) * 1e3
        row = [
            count,
            shown(direct),
            shown(through),
            f"{added:.2f}",
            f"{statistics.median(rates):.0f}",
            f"{cost * 1e3:.2f}",
        ]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


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


def _serve(port: int) -> int:
    import uvicorn

    uvicorn.run(trivial_server, host=HOST, port=port, log_level="warning", access_log=False, lifespan="off")
    return 0


if __name__ == "__main__":
    sys.exit(main())
