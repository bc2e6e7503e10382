"""Measure what the answer to a batch costs per token: to encode it, to send it, and to read it with the client.

    python -m benchmarks.answers

CPU time of one group of 8 trajectories with log-probs, the least of several rounds, in which the forms take turns. A
group event is what ``"stream": "groups"`` sends. Reading makes the client's ``Group``.
"""

import argparse
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from random import Random

import httpx
import numpy as np

from darts_client._batch import TENSORS, read_batch
from darts_client._rollouts import rollouts_request
from darts_server.http.resources.rollouts import encode_event, encode_json, take_tokens
from darts_server.http.resources.rollouts_models import GroupOut
from darts_server.http.token_tensors import TokenTensors
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.batches.events import GroupEnded, GroupResult
from darts_server.rollout.batches.run import StreamMode
from darts_server.types import FinishReason, Outcome, Sample, SelectedAs

SIZE = 8
HEAD = b'{"id":"b","policy":"off","usage":{"generated":1,"returned":1,"wasted":0,"seconds":1.0},"groups":['


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.answers", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000, help="of a trajectory (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of which the fastest counts (default: %(default)s)")
    options = parser.parse_args(argv)
    print(measure(options.tokens, options.rounds))
    return 0


def measure(tokens: int, rounds: int) -> str:
    """Return the table."""
    result = make_group(tokens)
    encode = {"JSON": encode_plain, "group event": encode_group_event, "safetensors": encode_tensors}
    read: dict[str, Callable[[bytes], object]] = {"JSON": read_json, "safetensors": read_tensors}
    encoding, reading = dict.fromkeys(encode, float("inf")), dict.fromkeys(read, float("inf"))
    bodies: dict[str, bytes] = {}
    for _ in range(rounds):
        for form, work in encode.items():
            began = time.process_time()
            bodies[form] = work(result)
            encoding[form] = min(encoding[form], time.process_time() - began)
        for form, parse in read.items():
            began = time.process_time()
            parse(bodies[form])
            reading[form] = min(reading[form], time.process_time() - began)
    lines = ["| form | encode (us a token) | bytes a token | read (us a token) |", "|---|---|---|---|"]
    for form in encode:
        count = SIZE * tokens
        shown = f"{reading[form] / count * 1e6:.3f}" if form in reading else ""
        lines.append(f"| {form} | {encoding[form] / count * 1e6:.3f} | {len(bodies[form]) / count:.1f} | {shown} |")
    return "\n".join(lines)


def make_group(tokens: int) -> GroupResult:
    random = Random(0)

    def sample() -> Sample:
        values = np.array([-random.expovariate(1.0) for _ in range(tokens)], np.float32).astype(np.float64)
        token_ids = array("i", [random.randrange(150_000) for _ in range(tokens)])
        return Sample(token_ids, array("d", values.tobytes()), "word " * tokens, FinishReason.STOP)

    candidates = [
        CandidateRecord(index, tokens, FinishReason.STOP, SelectedAs.SHORT, None, False, 0.0, 1.0, 0, 0)
        for index in range(SIZE)
    ]
    record = GroupRecord("group", "prompt", "uniform", SIZE, Outcome.COMPLETED, candidates, 0.0, 1.0, None)
    return GroupResult(0, "group", "prompt", {index: sample() for index in range(SIZE)}, record)


def encode_plain(result: GroupResult) -> bytes:
    return HEAD + encode_json(GroupOut.of(result).model_dump()) + b"]}"


def encode_group_event(result: GroupResult) -> bytes:
    return encode_event(1, GroupEnded(result), StreamMode.GROUPS)


def encode_tensors(result: GroupResult) -> bytes:
    tensors, fields = TokenTensors(), GroupOut.of(result).model_dump()
    take_tokens(fields, tensors)
    tensors.answer = HEAD + encode_json(fields) + b"]}"
    return b"".join(tensors.chunks())


def read_json(body: bytes) -> object:
    return _read(body, "application/json")


def read_tensors(body: bytes) -> object:
    return _read(body, TENSORS)


def _read(body: bytes, media_type: str) -> object:
    request = httpx.Request("POST", "http://localhost/darts/v1/rollouts")
    return read_batch(REQUEST, httpx.Response(200, content=body, headers={"Content-Type": media_type}, request=request))


REQUEST = rollouts_request(["a"], None, group_size=SIZE, max_tokens=1, durable=False)

if __name__ == "__main__":
    sys.exit(main())
