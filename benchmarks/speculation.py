"""Compare what is sampled with and without speculative decoding: lengths and right answers must be the same.

    python -m benchmarks.speculation

Serves the tiny model without it and with each method, all at once, and draws as many answers to the same prompts from
each, unshaped and, on a GPU, under `uniform`. On a CPU, where darts-server refuses it, vLLM's own server is measured.
The first server is measured twice, to show what chance does. ``suffix`` needs the package arctic-inference.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from time import perf_counter

import httpx
import numpy as np
import torch

from benchmarks.overhead import GROUP_SIZE
from benchmarks.tables import markdown
from darts_server.offline.demo.problems import MAX_RESPONSE_TOKENS, Problem, reward, sample_problem
from darts_server.offline.demo.server import DARTS, PLAIN, Server, serving

METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
}
# Several engines fit on one card, whose free memory none of them may measure meanwhile.
GPU_FLAGS = ["--dtype", "bfloat16", "--no-enforce-eager", "--gpu-memory-utilization", "0.2"]
GPU_FLAGS += ["--kv-cache-memory-bytes", "4G"]
HEAD = ["speculation", "policy", "answers", "length", "differs by", "right", "log-prob a token", "seconds"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.speculation", description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ngram"], help="(default: ngram)")
    parser.add_argument("--prompts", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 of each prompt (default: %(default)s)")
    options = parser.parse_args(argv)
    on_gpu, rng = torch.cuda.is_available(), Random(0)
    problems = [sample_problem(rng) for _ in range(options.prompts)] * options.groups
    flags, env = (GPU_FLAGS, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) if on_gpu else ([], {})
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(method: str) -> Server:
            more = ["--speculative-config", json.dumps(METHODS[method])] if method in METHODS else []
            log = Path(f"out/speculation/{method}.log")
            return stack.enter_context(serving(DARTS if on_gpu else PLAIN, log, *flags, *more, env=env))

        servers = dict(zip(["none", *options.methods], pool.map(start, ["none", *options.methods]), strict=True))
        rows, first = [], dict[str, tuple[float, float]]()
        for method in ["none", *servers]:
            for policy in ["off", "uniform"] if on_gpu else ["off"]:
                begin = perf_counter()
                lengths, right, logprobs = draw(servers[method], problems, policy)
                # The prompts are the same in each row, so what differs between them is no error.
                by_prompt = lengths.reshape(options.groups, options.prompts, -1)
                length, error = lengths.mean(), float(np.sqrt(by_prompt.var(axis=(0, 2)).mean() / lengths.size))
                before, its_error = first.setdefault(policy, (length, error))
                figures = [f"{lengths.size:,}", f"{length:.2f} ± {error:.2f}"]
                figures += [f"{(length - before) / np.hypot(error, its_error):+.1f} errors", f"{right.mean():.3f}"]
                rows.append([method, policy, *figures, f"{logprobs.mean():.3f}", f"{perf_counter() - begin:.1f}"])
                print(" ".join(rows[-1]), file=sys.stderr)
    print(markdown(HEAD, rows))
    return 0


def draw(server: Server, problems: Sequence[Problem], policy: str) -> np.ndarray:
    """Request a group for each problem; return length, reward and mean log-prob of each answer, (3, groups, 8)."""
    body = {"model": "tiny", "n": GROUP_SIZE, "max_tokens": MAX_RESPONSE_TOKENS, "temperature": 1.0, "logprobs": 0}
    body |= {"darts_policy": policy} if policy != "off" else {}
    with httpx.Client(timeout=600, limits=httpx.Limits(max_connections=None)) as client, ThreadPoolExecutor(64) as pool:

        def request(problem: Problem) -> list[tuple[int, float, float]]:
            answer = client.post(f"{server.url}/v1/completions", json=body | {"prompt": problem.prompt})
            found = (
                (each["logprobs"]["token_logprobs"], each["text"])
                for each in answer.raise_for_status().json()["choices"]
            )
            return [(len(logprobs), reward(problem, text), float(np.mean(logprobs))) for logprobs, text in found]

        return np.asarray([*pool.map(request, problems)]).transpose(2, 0, 1)


if __name__ == "__main__":
    sys.exit(main())
