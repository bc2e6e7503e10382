"""Session groups in SkyRL: `SessionGenerator` is SkyRL's generator, with a `SessionClient` as its inference client.

SkyRL wants a number of trajectories of each prompt. The generator starts `EXTRA` more sessions, and returns the
trajectories that the server has selected. A stopped session gets the status 410, which SkyRL's loop raises.
"""

from copy import copy
from itertools import compress
from typing import Any

from aiohttp import ClientResponseError
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator, TrajectoryOutput

EXTRA = 4
COPIED = ("prompts", "env_classes", "env_extras")


class SessionClient(RemoteInferenceClient):
    async def _generate_single(self, **request: Any) -> Any:
        # SkyRL names a trajectory by its instance and its repetition. The instance is the session's id.
        request["session_id"] = request["session_id"].rpartition("_")[0]
        return await super()._generate_single(**request)


class SessionGenerator(SkyRLGymGenerator):
    async def generate(self, batch: dict[str, Any], disable_tqdm: bool = False) -> Any:
        # The trajectories of a prompt stand together, and their number is the same for all prompts.
        instances = [each.instance_id for each in batch["trajectory_ids"]]
        size = instances.count(instances[0])
        groups = [await self._call("sessions", {"size": size, "extra": EXTRA}) for _ in batch["prompts"][::size]]
        sessions = [(size * number, each) for number, group in enumerate(groups) for each in group["sessions"]]
        started = batch | {name: [copy(batch[name][start]) for start, _ in sessions] for name in COPIED}
        started["trajectory_ids"] = [TrajectoryID(each["id"], each["index"]) for _, each in sessions]
        output = await super().generate(started, disable_tqdm)

        ended = [await self._call(f"session-groups/{group['group_id']}") for group in groups]
        selected = [each["selected"] for group in ended for each in group["sessions"]]
        return output | {name: list(compress(v, selected)) for name, v in output.items() if isinstance(v, list)}

    async def agent_loop(self, *args: Any, trajectory_id: Any = None, **more: Any) -> Any:
        try:
            output = await super().agent_loop(*args, trajectory_id=trajectory_id, **more)
        except ClientResponseError as error:
            if error.status != 410:
                raise
            return TrajectoryOutput([0], [0.0], "abort", [0], [0], [0.0], {})
        await self._call(f"sessions/{trajectory_id.instance_id}:end", {"reward": float(sum(output.reward))})
        return output

    async def _call(self, path: str, body: Any = None) -> Any:
        session = await self.inference_engine_client._get_session()
        url = f"{self.inference_engine_client.proxy_url}/darts/v1/{path}"
        async with session.request("GET" if body is None else "POST", url, json=body) as response:
            return await response.json()
