"""SkyRL's Tinker server trains an adapter of the tiny model on a CPU, and samples from a darts-server.

    python -m tests.trainers.skyrl_tx.train FOLDER STEPS [FLAG...]

FLAG: of the darts-server, such as ``--policy uniform``. The folder gets the servers' logs and the adapters.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from darts_server.offline.demo.server import DARTS, MODEL, Server, bind_port, serving
from tests.trainers.environments import ROOT, create

PROMPTS = 16
"""Prompts of a step."""
SIZE = 8
"""Trajectories of a prompt."""
RANK = 8
HELD_OUT = 256
"""Problems that are sampled once before the first step and once after the last, without shaping."""
START_SECONDS = 300.0
"""Importing JAX and torch takes most of the start."""
GRACE_SECONDS = 30.0
BACKEND = {"max_lora_adapters": 2, "max_lora_rank": RANK, "train_micro_batch_size": 32}


@contextmanager
def serving_adapters(folder: Path, *flags: str) -> Iterator[Server]:
    """Run a darts-server that loads an adapter from ``folder`` when a request names it."""
    adapters = folder / "adapters"
    adapters.mkdir(parents=True)
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters),
        # SkyRL waits five minutes for an answer. On a busy machine the compilation of vLLM's sampler took longer.
        "TORCHDYNAMO_DISABLE": "1",
    }
    # vLLM's resolver takes adapters whose base model has the name that the server was started with.
    lora = ("--served-model-name", str(MODEL), "--enable-lora", "--max-lora-rank", str(RANK))
    with serving(DARTS, folder / "darts.log", *lora, *flags, env=environment) as server:
        yield server


@contextmanager
def tinker_server(python: Path, folder: Path, sampler: str) -> Iterator[str]:
    """Run SkyRL's Tinker server, which samples from ``sampler``; yield its address."""
    with bind_port() as free:
        port = int(free.getsockname()[1])
    arguments = {
        "host": "127.0.0.1",
        "port": port,
        "base-model": MODEL,
        "backend-config": json.dumps(BACKEND),
        "checkpoints-base": folder / "checkpoints",
        "database-url": f"sqlite:///{folder / 'tinker.db'}",
        "external-inference-url": sampler,
        "external-inference-lora-base": folder / "adapters",
    }
    # SkyRL starts its engine by the command that it was started by, which has to be uv.
    command = ["uv", "run", "--no-project", "--offline", "-m", "skyrl.tinker.api"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    environment = os.environ | {
        "VIRTUAL_ENV": str(python.parents[1]),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        # Adapters are unpacked here, and then renamed.
        "TMPDIR": str(folder),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "tinker.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SkyRL's server does not start:\n{(folder / 'tinker.log').read_text()[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", verify=False).status_code == 200
    except httpx.TransportError:
        return False


def run_loop(python: Path, url: str, steps: int, held_out: int) -> Iterator[dict[str, Any]]:
    """Run `loop` in the trainer's environment; yield its lines."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients"))),
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
    }
    command = [str(python), "-m", "tests.trainers.skyrl_tx.loop", url, str(MODEL), str(steps), str(held_out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"step"'):
                    yield json.loads(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"the loop exited with code {process.returncode}")


def main(folder: Path, steps: int, *flags: str) -> None:
    python = create("skyrl")
    with serving_adapters(folder, *flags) as server, tinker_server(python, folder, server.url) as url:
        for line in run_loop(python, url, steps, HELD_OUT):
            print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), *sys.argv[3:])
