"""veRL's own managers, clients and agent loops with two replicas of the backend `darts`.

    python -m tests.trainers.verl.rollouts

Prints the job's folder, and the name of each part that has passed. A part that fails raises an AssertionError.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import ray
import torch
import verl
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager

from darts_client.verl.plugin import load_replica
from darts_client.verl.server import to_flags
from darts_client.verl.weights import job_folder
from darts_server.offline.demo.server import MODEL
from tests.integration.weights import EMBEDDING, HEAD, ROUNDING, perturbed
from tests.trainers.verl.cluster import REPLICAS, SIZE, cluster, configure, overrides

TEXTS = ("5a-3b*4>", "6a-3b*4>")
PROMPT = [5, 6, 7, 8]
LONG = 240
GRANTED = 6
"""Candidates of a group under the policy uniform."""
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
ENDLESS = SAMPLING | {"ignore_eos": True, "max_tokens": LONG}


class Sender(Worker):  # type: ignore[misc]
    """A trainer's worker that has random weights for each step."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs("darts_client.verl.weights")
        self._engine = CheckpointEngineRegistry.new("darts", bucket_size=1 << 20, is_master=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]
    def execute_checkpoint_engine(self, method: str, *args: Any, **named: Any) -> Any:
        return getattr(self._engine, method)(*args, **named)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int, mode: str) -> None:
        await self._engine.send_weights(iter(perturbed(global_steps).items()), global_steps=global_steps)


def call(server: Any, function: Any) -> Any:
    """Run a function of the server actor in the actor."""
    return ray.get(server.__ray_call__.remote(function))


class Fleet:
    """Two replicas, and a trainer that sends them weights."""

    def __init__(self) -> None:
        rollout = {"nnodes": 1, "n_gpus_per_node": REPLICAS}
        self.config = configure(overrides(rollout, {"policy": "uniform", "served_model_name": "tiny"}))
        self.manager = LLMServerManager.create(config=self.config)
        self.loops = AgentLoopManager.create(self.config, self.manager.get_client(LLMServerClient))
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        sender = RayClassWithInitArgs(ray.remote(Sender))
        trainer = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=sender, use_gpu=False, device_name="cpu")
        checkpoints = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self.checkpoints = CheckpointEngineManager(checkpoints, trainer, self.manager.get_replicas())
        self.servers = self.manager.server_handles
        self.urls = [f"http://{address}" for address in self.manager.server_addresses]
        self.keys = [call(server, lambda self: self._env["DARTS_ADMIN_API_KEY"]) for server in self.servers]

    def get(self, replica: int, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.keys[replica]}"}
        return httpx.get(f"{self.urls[replica]}/darts/v1/{path}", headers=headers, timeout=60).json()

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of all replicas, the oldest of a replica first."""
        records = []
        for replica in range(REPLICAS):
            for shown in self.get(replica, "live")["groups"]:
                records += self.get(replica, f"groups/{shown['group_id']}")["groups"]
        return records

    def roll_out(self, step: int, validate: bool = False) -> Any:
        count = len(TEXTS) * SIZE
        prompts = np.empty(count, dtype=object)
        prompts[:] = [[{"role": "user", "content": text}] for text in TEXTS for _ in range(SIZE)]
        uids = np.repeat(np.array(["uid-0", "uid-1"], dtype=object), SIZE)
        batch = DataProto.from_dict(
            tensors={"dummy": torch.zeros(count, 1)},
            non_tensors={"raw_prompt": prompts, "uid": uids, "index": np.repeat(np.arange(len(TEXTS)), SIZE)},
            meta_info={"global_steps": step, "validate": validate},
        )
        return self.loops.generate_sequences(batch)

    def wait_for_tokens(self, count: int) -> None:
        """Wait until the replicas have generated further tokens."""

        def generated() -> float:
            total = 0.0
            for url in self.urls:
                lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
                total += sum(
                    float(each.split()[-1]) for each in lines if each.startswith("vllm:generation_tokens_total")
                )
            return total

        before = generated()
        while generated() < before + count:
            time.sleep(0.02)


def logprobs_under(step: int, outputs: list[Any]) -> list[torch.Tensor]:
    """Return the log-probs of the outputs' tokens under the weights of a step, by transformers."""
    weights = perturbed(step)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict({HEAD: weights[EMBEDDING], **weights})
    results = []
    for output in outputs:
        tokens = torch.tensor(output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        results.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return results


def count_matches(step: int, outputs: list[Any]) -> list[list[bool]]:
    """Return for each token whether it was sampled with the weights of a step."""
    expected = logprobs_under(step, outputs)
    pairs = zip(expected, outputs, strict=True)
    return [((mine - torch.tensor(output.log_probs)).abs() < ROUNDING).tolist() for mine, output in pairs]


async def generate_during(action: Callable[[], None], fleet: Fleet, client: Any) -> list[Any]:
    """Send one long request after another from several tasks until the action has ended; return all outputs."""
    has_ended = asyncio.Event()

    async def repeat(task: int) -> list[Any]:
        outputs: list[Any] = []
        while not has_ended.is_set():
            request_id = f"request-{task}-{len(outputs)}"
            outputs.append(await client.generate(request_id, prompt_ids=PROMPT, sampling_params=dict(ENDLESS)))
        return outputs

    tasks = [asyncio.create_task(repeat(task)) for task in range(2 * REPLICAS)]
    try:
        await asyncio.to_thread(fleet.wait_for_tokens, 8)
        await asyncio.to_thread(action)
    finally:
        has_ended.set()
    return [output for outputs in await asyncio.gather(*tasks) for output in outputs]


def check_settings(fleet: Fleet) -> None:
    """veRL's settings and `engine_kwargs.darts` become flags; errors name what is not served."""
    flags = to_flags(
        {"policy": "off", "max_loras": 2, "enforce_eager": True, "async_scheduling": False, "revision": None}
    )
    assert flags == ["--policy", "off", "--max-loras", "2", "--enforce-eager", "--no-async-scheduling"]
    assert to_flags({"dialect": ["areal", "skyrl"], "hf_overrides": {"a": 1}}) == [
        "--dialect",
        "areal",
        "skyrl",
        "--hf-overrides",
        '{"a": 1}',
    ]
    rollout = fleet.config.actor_rollout_ref.rollout.copy()
    rollout.tensor_model_parallel_size = 2
    with pytest.raises(NotImplementedError, match="tensor_model_parallel_size"):
        replica(rollout, fleet.config.actor_rollout_ref.model)
    model = fleet.config.actor_rollout_ref.model.copy()
    model.lora_rank = 8
    with pytest.raises(NotImplementedError, match=r"lora\.merge=True"):
        replica(fleet.config.actor_rollout_ref.rollout, model)

    generate = fleet.servers[0].generate
    with pytest.raises(ValueError, match="image_data"):
        ray.get(generate.remote(PROMPT, dict(SAMPLING), "request", image_data=["pixels"]))
    with pytest.raises(ValueError, match="max_model_len 320"):
        ray.get(generate.remote([5] * 400, dict(SAMPLING), "request"))

    version = verl.__version__
    verl.__version__ = "0.8.1"
    try:
        with pytest.raises(ImportError, match=r"supports veRL 0\.9\.0, 0\.9\.1, but 0\.8\.1 is installed"):
            load_replica()
    finally:
        verl.__version__ = version


def replica(rollout: Any, model: Any) -> Any:
    return load_replica()(replica_rank=0, config=rollout, model_config=model, gpus_per_node=2)


def check_groups_and_versions(fleet: Fleet) -> None:
    """Two steps of rollouts: a group is on one replica, has its name and size, and the version of its step."""
    for step in (0, 1):
        fleet.checkpoints.update_weights(global_steps=step)
        output = fleet.roll_out(step)
        assert set(output.non_tensor_batch["min_global_steps"]) == {step}
        assert set(output.non_tensor_batch["max_global_steps"]) == {step}
        served = {fleet.get(replica, "weights")["version"] for replica in range(REPLICAS)}
        assert served == {step}
    records = fleet.groups()
    assert len(records) == 2 * len(TEXTS)
    for record in records:
        assert (record["outcome"], record["policy"], record["group_size"]) == ("completed", "uniform", SIZE), record
        assert len(record["candidates"]) == GRANTED
    names = {name for record in records for name in record["members"] if "uid" in name}
    assert names == {"0-uid-0", "0-uid-1", "1-uid-0", "1-uid-1"}, [record["members"] for record in records]

    fleet.roll_out(1, validate=True)
    assert len(fleet.groups()) == len(records)


def check_weights(fleet: Fleet) -> None:
    """The files of both replicas are the trainer's tensors to the last bit, and both sample with these tensors."""
    for server in fleet.servers:
        folder, step = call(server, lambda self: self._weights)
        tensors: dict[str, torch.Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            tensors |= load_file(file)
        assert all(torch.equal(tensors.pop(name), tensor) for name, tensor in perturbed(step).items())
        assert not tensors
        output = ray.get(server.generate.remote(PROMPT, dict(SAMPLING), "request"))
        assert all(count_matches(step, [output])[0])


def check_abort_and_resume(fleet: Fleet) -> None:
    """An update in the middle of answers: each token has the log-prob of the weights that were served then."""
    client = fleet.manager.get_client(FullyAsyncLLMServerClient)

    def update() -> None:
        fleet.checkpoints.update_weights(global_steps=2)

    outputs = asyncio.run(generate_during(update, fleet, client))
    switches = []
    for output, old, new in zip(outputs, count_matches(1, outputs), count_matches(2, outputs), strict=True):
        assert len(output.token_ids) == len(output.log_probs) == LONG
        steps = {output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]}
        switch = next((place for place in range(LONG) if not old[place]), LONG)
        assert all(new[switch:]), "a token is neither of the old weights nor of the new"
        expected = {1, 2} if 0 < switch < LONG else {1 if switch else 2}
        assert steps == expected, (steps, switch)
        switches.append(switch)
    assert any(0 < switch < LONG for switch in switches), switches


def check_clients_that_do_not_resume(fleet: Fleet) -> None:
    """An abort is invisible to a client that would take the beginning of an answer for a whole answer."""
    client = fleet.manager.get_client(LLMServerClient)

    def pause() -> None:
        fleet.checkpoints.abort_replicas()
        fleet.checkpoints.resume_generation_replicas()

    for output in asyncio.run(generate_during(pause, fleet, client)):
        assert (len(output.token_ids), output.stop_reason) == (LONG, "completed")


def check_rejected_requests(fleet: Fleet) -> None:
    """A replica that leaves the balancer answers later requests at once, without tokens."""
    fleet.checkpoints.abort_replicas(reject_request=True)
    output = ray.get(fleet.servers[0].generate.remote(PROMPT, dict(SAMPLING), "request"), timeout=60)
    assert (output.token_ids, output.stop_reason) == ([], "aborted")
    fleet.checkpoints.resume_generation_replicas()


def check_lost_server(fleet: Fleet) -> None:
    """A server that is killed starts again with the last weights, and no request is lost."""
    client = fleet.manager.get_client(FullyAsyncLLMServerClient)

    process = call(fleet.servers[0], lambda self: self._process.pid)

    def kill() -> None:
        [guard] = psutil.Process(process).children()
        [server] = guard.children()
        os.kill(server.pid, signal.SIGKILL)

    outputs = asyncio.run(generate_during(kill, fleet, client))
    assert {len(output.token_ids) for output in outputs} == {LONG}
    assert all(all(matches) for matches in count_matches(2, outputs))
    assert fleet.get(0, "weights")["version"] == 2
    assert call(fleet.servers[0], lambda self: self._num_restarts) == 1


PARTS = (
    check_settings,
    check_groups_and_versions,
    check_weights,
    check_abort_and_resume,
    check_clients_that_do_not_resume,
    check_rejected_requests,
    check_lost_server,
)


def main() -> None:
    with cluster():
        fleet = Fleet()
        folder = job_folder(None)
        assert folder.is_dir()
        assert all(address.startswith("127.0.0.1:") for address in fleet.manager.server_addresses)
        print(f"folder {folder}", flush=True)
        for part in PARTS:
            part(fleet)
            print(f"passed {part.__name__}", flush=True)


if __name__ == "__main__":
    main()
