"""The trainer's weights as folders of safetensors files, in shared memory or on a disk.

A folder is written under a temporary name and renamed when it is complete. The last two folders stay, so the file
system needs room for two models.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

SHARED_MEMORY = "/dev/shm"
FOLDER_FORMAT = "darts_folder"
"""The `wire_format` of a checkpoint engine that yields the folder itself."""
ARRIVAL_SECONDS = 600.0
"""Timeout of a folder that another process writes. Gathering and writing a large model takes minutes."""
POLL_SECONDS = 0.05


def job_folder(parent: str | None) -> Path:
    """Return this Ray job's folder below `parent`, by default in shared memory."""
    context = ray.get_runtime_context()
    # Job ids are unique in a cluster only.
    name = f"darts-verl-{context.get_session_name()}-{context.get_job_id()}"
    return Path(parent or SHARED_MEMORY) / name


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name of a replica's server actor. `role`: `reward_`, `teacher_` or nothing."""
    return f"darts_server_{role}{replica_rank}_0"


class WeightFolders:
    """Numbered folders of weights. `file_bytes`: about the size of a file."""

    def __init__(self, root: Path, prefix: str, file_bytes: int) -> None:
        self._root = root
        self._prefix = prefix
        self._file_bytes = file_bytes
        self._last_number = 0

    def next_path(self) -> Path:
        self._last_number += 1
        return self._root / f"{self._prefix}-{self._last_number}"

    async def write(self, path: Path, weights: Any, *, is_writer: bool) -> None:
        """Write all tensors to the folder, or only gather them if another process writes.

        Raises:
            RuntimeError: there is no room.
        """
        if not is_writer:
            # All workers of a trainer gather in step.
            async for _ in ensure_async_iterator(weights):
                pass
            return
        # The folder before stays, because the server goes back to it if this update fails.
        shutil.rmtree(self._root / f"{self._prefix}-{self._last_number - 2}", ignore_errors=True)
        unfinished = path.with_name(f"{path.name}.{uuid4().hex}")
        try:
            unfinished.mkdir(parents=True)
            await self._write_files(unfinished, weights)
            # Fails if another machine has written `path`. Machines of a colocated trainer must not share the root.
            unfinished.rename(path)
        except OSError as error:
            raise RuntimeError(
                f"the weights cannot be written below {self._root}: {error}. Name another folder with "
                "+actor_rollout_ref.rollout.engine_kwargs.darts.weights_root"
            ) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    async def _write_files(self, folder: Path, weights: Any) -> None:
        # One file at a time is in memory.
        tensors: dict[str, torch.Tensor] = {}
        num_bytes = 0
        async for name, tensor in ensure_async_iterator(weights):
            # A copy, because the trainer reuses its buffers.
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            num_bytes += tensor.nbytes
            if num_bytes >= self._file_bytes:
                save_file(tensors, folder / f"{uuid4().hex}.safetensors")
                tensors = {}
                num_bytes = 0
        if tensors:
            save_file(tensors, folder / f"{uuid4().hex}.safetensors")

    async def wait_until_written(self, path: Path) -> None:
        """Wait until another process has written the folder.

        Raises:
            TimeoutError: it does not appear.
        """
        try:
            async with asyncio.timeout(ARRIVAL_SECONDS):
                while not path.is_dir():
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(
                f"no weights arrived at {path} in {ARRIVAL_SECONDS:.0f} s. All machines must see this folder: name "
                "a shared folder, or use the checkpoint engine nccl"
            ) from None


class ServerAdapter(BaseRollout):  # type: ignore[misc]  # veRL has no types here
    """Brings weights from a veRL worker to the server of its replica."""

    def __init__(
        self,
        config: Any,
        model_config: Any,
        device_mesh: Any,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        # A replica is one worker. veRL reads both attributes.
        self.replica_rank = rank if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

        prefix = f"replica-{self.replica_rank}"
        self._is_writer = True
        if device_mesh is not None:
            # Workers of the trainer gather the same tensors in step, so the first worker of a machine writes for all.
            prefix = "trainer"
            self._is_writer = rank % int(os.environ["RAY_LOCAL_WORLD_SIZE"]) == 0
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self._folders = WeightFolders(weights_root(self.config), prefix, bucket_bytes)

    @property
    def server(self) -> Any:
        # The server starts after this worker.
        return ray.get_actor(server_name(self.replica_rank))

    async def resume(self, tags: list[str]) -> None:
        if self.config.free_cache_engine:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        if self.config.free_cache_engine:
            await self.server.sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Bring new weights, and return when the server samples with them.

        Raises:
            NotImplementedError: a LoRA adapter, or tensors in another form.
        """
        if peft_config is not None:
            raise NotImplementedError("LoRA adapters are not sent; set actor_rollout_ref.model.lora.merge=True")
        if wire_format == FOLDER_FORMAT:
            [path] = [folder async for folder in ensure_async_iterator(weights)]
        elif wire_format == "named_tensors":
            path = self._folders.next_path()
            await self._folders.write(path, weights, is_writer=self._is_writer)
            await self._folders.wait_until_written(path)
        else:
            raise NotImplementedError(f"rollout.name=darts takes whole tensors, not the wire format {wire_format!r}")
        await self.server.load_weights.remote(str(path), global_steps)


def weights_root(config: Any) -> Path:
    user_settings = config.engine_kwargs.get("darts") or {}
    return job_folder(user_settings.get("weights_root"))


@CheckpointEngineRegistry.register("darts")
class FolderCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Weights from a trainer to replicas with GPUs of their own, through a folder that all their machines see.

    Args:
        folder: the folder, by default this job's folder in shared memory.
    """

    wire_format = FOLDER_FORMAT

    def __init__(self, bucket_size: int, is_master: bool = False, folder: str | None = None) -> None:
        self._is_master = is_master
        self._folders = WeightFolders(job_folder(folder), f"sent-{uuid4().hex}", bucket_size)
        self._path = Path()

    def prepare(self) -> dict[str, Any]:
        if not self._is_master:
            return {}
        return {"path": str(self._folders.next_path())}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        # The first worker of the trainer is the master.
        path = metadata[0]["path"]
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self._path = Path(path)

    def finalize(self) -> None:
        """Do nothing. `write` removes old folders."""

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        await self._folders.write(self._path, weights, is_writer=self._is_master)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Path]:
        await self._folders.wait_until_written(self._path)
        yield self._path
