"""A rollout replica of veRL: one server on one device."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from .server import DartsServer
from .weights import server_name


class DartsReplica(RolloutReplica):  # type: ignore[misc]  # veRL has no types here
    """Starts a `DartsServer` beside the replica's worker.

    Raises:
        NotImplementedError: the configuration has a setting that the server does not support under a trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size != 1:
            raise NotImplementedError(
                "rollout.name=darts replaces the weights of single-device engines only: set "
                "rollout.tensor_model_parallel_size, data_parallel_size and pipeline_model_parallel_size to 1"
            )
        lora = self.model_config.get("lora") or {}
        lora_rank = lora.get("rank", 0) or self.model_config.get("lora_rank", 0)
        if lora_rank > 0 and not lora.get("merge", False):
            raise NotImplementedError(
                "rollout.name=darts takes merged weights: set actor_rollout_ref.model.lora.merge=True"
            )

    async def launch_servers(self) -> None:
        """Start the server actor on the worker's machine, with the worker's device."""
        [worker] = self.workers
        # Ray runs the function in the worker's process.
        node_id, devices = await worker.__ray_call__.remote(_get_node_and_devices)
        role = ""
        if self.is_reward_model:
            role = "reward_"
        elif self.is_teacher_model:
            role = "teacher_"
        platform = get_platform()
        # Without these variables Ray hides devices that it has not assigned to the actor itself.
        env = dict.fromkeys(platform.ray_noset_envvars(), "1") | platform.rollout_env_vars()
        actor = ray.remote(DartsServer).options(
            name=server_name(self.replica_rank, role) + self.name_suffix,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            runtime_env={"env_vars": env},
            max_concurrency=self.max_concurrency,
        )

        server = actor.remote(self.config, self.model_config, self.replica_rank, devices)
        self.servers.append(server)
        await server.launch_server.remote()
        self._server_handle = server
        self._server_address = await server.get_address.remote()


def _get_node_and_devices(_: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), ())
    return context.get_node_id(), ",".join(devices)
